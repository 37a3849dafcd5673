#include "examples/options.h"

#include <filesystem>

#include "configs/run_config.h"
#include "configs/yaml_reader.h"
#include "nn/atomic_file.h"
#include "nn/posix_file.h"

namespace heddle::examples {

CLI::Validator integer_in(std::int64_t low, std::int64_t high) {
  const auto check = [low, high](std::string& text) {
    const auto value = config::parse_integer(text);
    if (value && *value >= low && *value <= high) return std::string();
    return concat_text("expected integer in [", low, ", ", high, "], got ", nn::quoted_text(text));
  };
  return CLI::Validator(check, "");
}

CLI::Validator number_in(const nn::Range& range) {
  const auto check = [range](std::string& text) {
    const auto value = config::parse_number(text);
    if (value && range.contains(*value)) return std::string();
    return concat_text("expected number ", range.text(), ", got ", nn::quoted_text(text));
  };
  return CLI::Validator(check, "");
}

CLI::Validator non_empty() {
  const auto check = [](std::string& text) { return text.empty() ? std::string("expected a path, got \"\"") : std::string(); };
  return CLI::Validator(check, "");
}

CLI::Validator writable_file() {
  const auto check = [](std::string& text) {
    if (text.empty()) return std::string("expected a path, got \"\"");
    try {
      const nn::AtomicFile file(text);  // gone again without a trace
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  return CLI::Validator(check, "");
}

CLI::Validator new_folder() {
  const auto check = [](std::string& text) {
    if (!text.empty() && !std::filesystem::exists(std::filesystem::symlink_status(text))) return std::string();
    return "expected a folder that does not exist yet, got " + nn::quoted_text(nn::printable(text));
  };
  return CLI::Validator(check, "");
}

void add_device_option(CLI::App& command, std::string& device) {
  const auto check = [](std::string& text) {
    return config::is_device_name(text) ? std::string() : concat_text("expected ", config::kDeviceForm, ", got ", nn::quoted_text(text));
  };
  command.add_option("--device", device, std::string(config::kDeviceForm))->check(CLI::Validator(check, ""))->capture_default_str();
}

}  // namespace heddle::examples
