#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>

// The command-line tool as a user runs it.

namespace heddle::test {

struct Outcome {
  int exit_code = -1;
  std::string output;  // standard output and standard error together
};

// Runs a shell command in the project's folder.
inline Outcome run(const std::string& command) {
  Outcome outcome;
  FILE* pipe = ::popen(("cd " HEDDLE_SOURCE_DIR " && " + command + " 2>&1").c_str(), "r");
  std::array<char, 4096> buffer;
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) outcome.output.append(buffer.data(), count);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

inline Outcome heddle(const std::string& arguments) { return run(HEDDLE_BINARY " " + arguments); }

// A run of three updates of a shipped config.
inline std::string train_three_steps(const std::string& config, const std::filesystem::path& folder) {
  return "train " + config + " --set train.max_steps=3 --set train.logging_steps=1 --set train.eval_iters=1" +
         " --set train.micro_batch_size=2 --set train.output_dir=" + folder.string();
}

}  // namespace heddle::test
