#include "lora/lora_config.h"

#include <cmath>
#include <regex>

namespace heddle::lora {
namespace {

template <typename Value>
Value value_of(const std::vector<std::pair<std::string, Value>>& pattern, const std::string& layer, Value otherwise) {
  for (const auto& [ending, value] : pattern)
    if (std::regex_match(layer, std::regex("(.*\\.)?(" + ending + ")"))) return value;
  return otherwise;
}

}  // namespace

std::int64_t LoraConfig::rank_of(const std::string& layer) const { return value_of(rank_pattern, layer, r); }

double LoraConfig::alpha_of(const std::string& layer) const { return value_of(alpha_pattern, layer, lora_alpha); }

double LoraConfig::scale_of(const std::string& layer) const {
  const auto rank = static_cast<double>(rank_of(layer));
  return alpha_of(layer) / (use_rslora ? std::sqrt(rank) : rank);
}

}  // namespace heddle::lora
