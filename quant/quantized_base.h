#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "nn/transformer.h"
#include "quant/quant_config.h"

// Note: Bases that are kept quantised
// A base is quantised once: what came out is kept beside it, as a quantised checkpoint in the folder BASE.FORMAT-KEY. The key is a
// fingerprint of the base's weights and of all that decides the result, so another base or config has another folder, and none is
// ever out of date; base.json in it has the key and a fingerprint of the kept weights. A folder that is damaged is made
// again. Where it cannot be written, as beside a base that is read-only, the base is quantised each time. Formats without a file layout
// (fp8_e5m2, fp4) always are.

namespace heddle::quant {

// Fills a plain model with the weights of a base, a path of the user's that stands for the checkpoint `folder`, quantised as `config`
// says from weights of `dtype`: that of the model, or a narrower one that its other parameters are then rounded to as well. Returns
// lines for a log: what it cost with its notes, and where it is kept or why it is not. Throws as nn::load_weights and quantize_model do.
std::vector<std::string> load_quantized_base(const std::filesystem::path& base, const std::filesystem::path& folder, const QuantConfig& config,
                                             DType dtype, nn::CausalLM& model, std::optional<QuantCompute> compute = {});

}  // namespace heddle::quant
