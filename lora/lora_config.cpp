#include "lora/lora_config.h"

#include <cmath>
#include <regex>

namespace heddle::lora {
namespace {

std::regex regex_of(const std::string& pattern) { return std::regex("(.*\\.)?(" + pattern + ")"); }

bool is_pattern(const std::string& text) {
  try {
    regex_of(text);
    return true;
  } catch (const std::regex_error&) {
    return false;
  }
}

template <typename Value>
Value value_of(const nn::ByName<Value>& pattern, const std::string& layer, Value otherwise) {
  for (const auto& [ending, value] : pattern)
    if (pattern_fits(ending, layer)) return value;
  return otherwise;
}

}  // namespace

bool pattern_fits(const std::string& pattern, const std::string& layer) { return std::regex_match(layer, regex_of(pattern)); }

std::int64_t LoraConfig::rank_of(const std::string& layer) const { return value_of(rank_pattern, layer, r); }

double LoraConfig::alpha_of(const std::string& layer) const { return value_of(alpha_pattern, layer, lora_alpha); }

double LoraConfig::scale_of(const std::string& layer) const {
  const auto rank = static_cast<double>(rank_of(layer));
  return alpha_of(layer) / (use_rslora ? std::sqrt(rank) : rank);
}

std::vector<nn::Field> fields(LoraConfig& c) {
  constexpr nn::EnumNames<InitLoraWeights> kInits{kInitNames};
  constexpr std::string_view kPatterns = "regular expressions for names";
  return {
      {"r", &c.r, {.range = nn::count_from(1)}},
      {"lora_alpha", &c.lora_alpha, {.range = nn::above(0)}},
      {"lora_dropout", &c.lora_dropout, {.range = nn::from_below(0, 1)}},
      {"target_modules", &c.target_modules, {.takes_one = true}},
      {"use_rslora", &c.use_rslora, {}},
      {"init_lora_weights", nn::choice(c.init_lora_weights, kInits), {}},
      {"rank_pattern", &c.rank_pattern, {.range = nn::count_from(1), .form = kPatterns, .accepts = is_pattern}},
      {"alpha_pattern", &c.alpha_pattern, {.range = nn::above(0), .form = kPatterns, .accepts = is_pattern}},
      {"use_dora", &c.use_dora, {}},
      {"loraplus_lr_ratio", &c.loraplus_lr_ratio, {.range = nn::above(0)}},
  };
}

}  // namespace heddle::lora
