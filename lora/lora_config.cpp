#include "lora/lora_config.h"

#include "lora/name_pattern.h"

namespace heddle::lora {

std::vector<nn::Field> fields(LoraConfig& c) {
  constexpr nn::EnumNames<InitLoraWeights> kInits{kInitNames};
  constexpr std::string_view kPatterns = "regular expressions for names";
  constexpr auto is_pattern = [](const std::string& text) { return pattern_problem(text).empty(); };
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
