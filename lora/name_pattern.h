#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle::lora {

// Note: Patterns of names
// Regular expressions for names of layers come from files that anyone may have written. They are matched by all states at once, never by
// trying again, so that time grows with length of pattern times length of name; what could make the states, the depth of recursion or the
// work of a look-ahead large has a bound here.

// What keeps a text from being used as a pattern, such as "is not a regular expression"; empty if nothing does.
std::string_view pattern_problem(const std::string& pattern);

// A text of unknown length, shortened and printable, for messages.
std::string start_of(std::string_view text);

// Whether a pattern without problems fits a whole name; the whole name or its end after a dot.
bool fits_name(const std::string& pattern, const std::string& name);
bool fits_ending(const std::string& pattern, const std::string& name);

// r and alpha of a layer in a LoraConfig or PeftConfig: those of the first pattern that fits an ending of its name, else those of all.
template <typename Value>
Value value_of(const std::vector<std::pair<std::string, Value>>& patterns, const std::string& layer, Value otherwise) {
  for (const auto& [pattern, value] : patterns)
    if (fits_ending(pattern, layer)) return value;
  return otherwise;
}

template <typename Config>
std::int64_t rank_of(const Config& config, const std::string& layer) {
  return value_of(config.rank_pattern, layer, config.r);
}

template <typename Config>
double alpha_of(const Config& config, const std::string& layer) {
  return value_of(config.alpha_pattern, layer, config.lora_alpha);
}

// What alpha is divided by: r, or sqrt(r) with use_rslora.
template <typename Config>
double rank_divisor(const Config& config, std::int64_t r) {
  return config.use_rslora ? std::sqrt(static_cast<double>(r)) : static_cast<double>(r);
}

template <typename Config>
double scale_of(const Config& config, const std::string& layer) {
  return alpha_of(config, layer) / rank_divisor(config, rank_of(config, layer));
}

}  // namespace heddle::lora
