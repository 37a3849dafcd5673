#pragma once

#include <cstdint>
#include <string>

#include "nn/train_config.h"
#include "nn/transformer.h"

namespace heddle::quant {

// Why train.precision fp8 cannot train such a model on the device; "" if it can.
std::string fp8_obstacle(const nn::TransformerConfig& model, Device device);

// The recipe of train.precision fp8: Linear layers of all blocks but the first and the last become Fp8Linear of the same parameters; the
// rest of the model computes in bfloat16 as it does. With history 0 scales are current, else delayed by at most that many steps.
// Returns how many layers. Throws heddle::Error with fp8_obstacle(), or if a slot holds anything but a bfloat16 nn::Linear.
std::int64_t use_fp8(nn::CausalLM& model, std::int64_t history);

// "FP8 in 24 linear layers, those of blocks 2 to 5 of 6: values E4M3, gradients E5M2, current scaling; all else bfloat16"
std::string describe_fp8(const nn::TransformerConfig& model, const nn::TrainConfig& train);

}  // namespace heddle::quant
