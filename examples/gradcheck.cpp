#include <iomanip>
#include <iostream>

#include "examples/commands.h"
#include "nn/gradcheck_suite.h"

namespace heddle::examples {
namespace {

int run_gradcheck(const std::string& only) {
  int checked = 0, failed = 0;
  std::cout << std::left << std::setw(28) << "op or module" << std::setw(44) << "inputs" << std::setw(12) << "worst"
            << "bound\n";
  for (const nn::GradcheckCase& check : nn::gradcheck_cases()) {
    if (!only.empty() && check.name.find(only) == std::string::npos) continue;
    const GradcheckResult result = check.run();
    ++checked;
    if (!result.ok) ++failed;
    std::cout << std::setw(28) << check.name << std::setw(44) << check.inputs << std::setw(12) << std::setprecision(2)
              << std::scientific << result.worst_error << check.tolerance << (result.ok ? "" : "  FAILED: " + result.message)
              << std::endl;
  }
  HEDDLE_CHECK(checked > 0, "gradcheck: no op or module has a name containing '", only, "'");
  std::cout << checked - failed << " passed, " << failed << " failed\n";
  return failed == 0 ? 0 : 1;
}

}  // namespace

void add_gradcheck_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("gradcheck", "Compare the gradient of every op and module with finite differences");
  const auto only = std::make_shared<std::string>();
  command->add_option("--only", *only, "Check only the names that contain this text");
  command->footer("Example: heddle gradcheck --only attention");
  command->callback([only, &exit_code] { exit_code = run_gradcheck(*only); });
}

}  // namespace heddle::examples
