#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/config_field.h"

namespace heddle::lora {

// How A and B start: each way the model's function is what it was.
enum class InitLoraWeights {
  kaiming,   // "true": A from U(-1/sqrt(in), 1/sqrt(in)), as PEFT's kaiming_uniform with a = sqrt(5)
  gaussian,  // A from N(0, 1/r), the standard deviation being 1/r; B is zero, as with kaiming
  pissa,     // A and B hold the r largest singular values of the weight, and what is adapted is the rest. Meng et al. 2024
};

inline constexpr std::array<std::pair<std::string_view, InitLoraWeights>, 3> kInitNames{
    {{"true", InitLoraWeights::kaiming}, {"gaussian", InitLoraWeights::gaussian}, {"pissa", InitLoraWeights::pissa}}};

// Low-rank adaptation, in PEFT's names and meanings. Hu et al. 2021.
struct LoraConfig {
  std::int64_t r = 8;
  double lora_alpha = 8;
  double lora_dropout = 0;  // of the input of A, in training mode
  // Ends of the names of Linear layers, after a dot ("q_proj", "mlp.up_proj"), the same with wildcards ("layers.[01].*.q_proj"), or
  // "all-linear": every one but lm_head. "c_attn" stands for q_proj, k_proj and v_proj with one A for all, as GPT-2 has them.
  std::vector<std::string> target_modules{"q_proj", "k_proj", "v_proj", "o_proj"};
  bool use_rslora = false;  // scale alpha / sqrt(r) instead of alpha / r. Kalajdzievski 2023
  InitLoraWeights init_lora_weights = InitLoraWeights::kaiming;
  // r and lora_alpha of some layers: the first entry whose regular expression is the name, or its end after a dot, counts
  // (Note: Patterns of names, lora/name_pattern.h).
  nn::ByName<std::int64_t> rank_pattern;
  nn::ByName<double> alpha_pattern;
  bool use_dora = false;         // weights rescaled to learned row norms. Liu et al. 2024
  double loraplus_lr_ratio = 1;  // learning rate of B and of DoRA's norms over that of A. Hayou et al. 2024

  friend bool operator==(const LoraConfig&, const LoraConfig&) = default;
};

// The fields point into `config`.
std::vector<nn::Field> fields(LoraConfig& config);

}  // namespace heddle::lora
