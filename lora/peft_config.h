#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace heddle::lora {

// adapter_config.json: what PEFT 0.21 writes, in its names and meanings. Modules have the Hugging Face names of the base.
struct PeftConfig {
  std::string base_model_name_or_path;  // empty: null
  std::int64_t r = 0;
  double lora_alpha = 0;
  double lora_dropout = 0;
  bool use_rslora = false;
  bool use_dora = false;
  bool fan_in_fan_out = false;             // the base keeps its weights as [in, out], as GPT-2 does
  std::string init_lora_weights = "true";  // true, false or the name of a method
  bool targets_are_pattern = false;        // target_modules is one regular expression for whole names
  std::vector<std::string> target_modules;     // names, or ends of names after a dot
  bool excludes_are_pattern = false;           // so is exclude_modules
  std::vector<std::string> exclude_modules;    // as target_modules
  std::vector<std::int64_t> layers_to_transform;  // empty: all
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern;  // regular expressions for ends of names; the first that fits counts
  std::vector<std::pair<std::string, double>> alpha_pattern;

  bool targets(const std::string& module) const;
};

// Throws heddle::Error with the path for text that is not JSON, a pattern that cannot be used (Note: Patterns of names), another type of
// adapter, a missing r, lora_alpha or target_modules, values of a wrong type or range, and every option that changes what an adapter
// computes and that we do not have.
PeftConfig read_peft_config(const std::filesystem::path& path);

// Keys in alphabetical order, every key of PEFT, indented by two: PEFT's own text for the same config.
std::string peft_config_text(const PeftConfig& config);

// The shortest ends of names, cut at dots and not starting with a number, with which modules of different values can be told apart:
// {"a.x": 1, "b.x": 2, "a.y": 1, "b.y": 1} -> {"a.x": 1, "b.x": 2, "y": 1}.
template <typename Value>
std::map<std::string, Value> by_ending(const std::map<std::string, Value>& modules) {
  std::map<std::string, Value> out;
  for (const auto& [name, value] : modules) {
    for (std::size_t start = name.size(); start != 0;) {
      const std::size_t dot = name.rfind('.', start - 1);  // `start` is where the last ending began
      start = dot == std::string::npos ? 0 : dot;
      const std::string ending = name.substr(start == 0 ? 0 : start + 1);
      const bool fits_all = std::all_of(modules.begin(), modules.end(), [&](const auto& other) {
        return (other.first != ending && !other.first.ends_with("." + ending)) || other.second == value;
      });
      if (start != 0 && (!fits_all || (ending[0] >= '0' && ending[0] <= '9'))) continue;
      out.emplace(ending, value);
      break;
    }
  }
  return out;
}

}  // namespace heddle::lora
