#include <iomanip>
#include <iostream>

#include "examples/commands.h"
#include "nn/config_field.h"
#include "nn/gradcheck_suite.h"

namespace heddle::examples {
namespace {

int run_gradcheck(const std::string& only) {
  std::vector<nn::GradcheckCase> cases = nn::gradcheck_cases();
  std::erase_if(cases, [&](const nn::GradcheckCase& check) { return check.name.find(only) == std::string::npos; });
  if (cases.empty()) throw ConfigError("--only: expected a part of an op's or module's name, got " + nn::quoted_text(only));
  int failed = 0;
  std::cout << std::left << std::setw(28) << "op or module" << std::setw(44) << "inputs" << std::setw(12) << "worst"
            << "bound\n";
  for (const nn::GradcheckCase& check : cases) {
    const GradcheckResult result = check.run();
    if (!result.ok) ++failed;
    std::cout << std::setw(28) << check.name << std::setw(44) << check.inputs << std::setw(12) << std::setprecision(2)
              << std::scientific << result.worst_error << result.bound << (result.ok ? "" : "  FAILED: " + result.message)
              << std::endl;
  }
  std::cout << cases.size() - failed << " passed, " << failed << " failed\n";
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
