#pragma once

#include <CLI/CLI.hpp>
#include <string>

// The subcommands of the heddle program. Each add_*_command declares its options on `app` and sets `exit_code` when the
// command runs: 0 done, 130 interrupted. Failures are exceptions; main turns them into exit codes.

namespace heddle::examples {

// `program` is how the user called it: commands that the program prints start with it.
void add_train_command(CLI::App& app, int& exit_code, const std::string& program);
void add_generate_command(CLI::App& app, int& exit_code);
void add_merge_command(CLI::App& app, int& exit_code);
void add_gradcheck_command(CLI::App& app, int& exit_code);
void add_quantize_command(CLI::App& app, int& exit_code);
void add_attention_command(CLI::App& app, int& exit_code);
void add_bench_attention_command(CLI::App& app, int& exit_code);
void add_bench_train_command(CLI::App& app, int& exit_code);

}  // namespace heddle::examples
