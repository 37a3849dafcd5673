// The command-line tool. Exit codes: 0 done, 1 failure while running, 2 wrong usage or configuration, 130 interrupted.

#include <csignal>
#include <exception>
#include <iostream>
#include <new>

#include "examples/commands.h"
#include "examples/run_setup.h"
#include "kernels/runtime/check.h"
#include "kernels/runtime/parallel.h"

namespace {

constexpr int kRunFailure = 1;
constexpr int kUsageError = 2;

int run(int argc, char** argv) {
  CLI::App app("heddle: train and quantise small transformers, check gradients, run and measure attention", "heddle");
  app.set_version_flag("--version", "heddle " HEDDLE_VERSION);
  app.require_subcommand(1);
  app.footer("Example: heddle train configs/tiny.yaml");

  int exit_code = 0;
  heddle::examples::add_train_command(app, exit_code, argv[0]);
  heddle::examples::add_generate_command(app, exit_code);
  heddle::examples::add_merge_command(app, exit_code);
  heddle::examples::add_quantize_command(app, exit_code);
  heddle::examples::add_gradcheck_command(app, exit_code);
  heddle::examples::add_attention_command(app, exit_code);
  heddle::examples::add_bench_attention_command(app, exit_code);
  heddle::examples::add_bench_train_command(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 asks for a subcommand, without a word on the one that it does not know.
    if (error.get_exit_code() != 0 && app.get_subcommands().empty() && !app.remaining().empty()) {
      const std::string given = app.remaining().front();
      throw heddle::ConfigError("there is no " + std::string(given.starts_with('-') ? "option" : "command") + " '" + given + "'; heddle --help lists them");
    }
    // It reports --help and --version as errors with code 0.
    exit_code = app.exit(error) == 0 ? 0 : kUsageError;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the shell's limit of file sizes fails with that reason instead
  try {
    heddle::examples::use_threads(heddle::num_threads(), "OMP_NUM_THREADS");
    const int exit_code = run(argc, argv);
    if (!std::cout.flush()) throw heddle::Error("cannot write to standard output; is the disk full?");
    return exit_code;
  } catch (const heddle::ConfigError& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return kUsageError;
  } catch (const std::bad_alloc&) {
    std::cerr << "heddle: out of memory; use a smaller batch or model\n";
    return kRunFailure;
  } catch (const std::exception& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return kRunFailure;
  }
}
