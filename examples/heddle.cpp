// The command-line tool. Exit codes: 0 done, 1 failure while running, 2 wrong usage or configuration, 130 interrupted.

#include <cstdlib>
#include <exception>
#include <iostream>

#include "examples/commands.h"
#include "kernels/runtime/check.h"

namespace {

constexpr int kRunFailure = 1;
constexpr int kUsageError = 2;

int run(int argc, char** argv) {
  CLI::App app("heddle: train small transformers, check gradients, run and measure attention", "heddle");
  app.set_version_flag("--version", "heddle " HEDDLE_VERSION);
  app.require_subcommand(1);
  app.footer("Example: heddle train configs/tiny.yaml");

  int exit_code = 0;
  heddle::examples::add_train_command(app, exit_code);
  heddle::examples::add_generate_command(app, exit_code);
  heddle::examples::add_gradcheck_command(app, exit_code);
  heddle::examples::add_attention_command(app, exit_code);
  heddle::examples::add_bench_attention_command(app, exit_code);
  heddle::examples::add_bench_train_command(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 reports --help and --version as errors with code 0.
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const heddle::ConfigError& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return kUsageError;
  } catch (const std::exception& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return kRunFailure;
  }
}
