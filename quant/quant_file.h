#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kernels/quantize/quant_gemm.h"
#include "nn/transformer.h"

// Note: Quantised checkpoints
// A folder with weights (Note: Weights in files, tensor_files.h) and config.json, whose quantization_config names the layout:
//   compressed-tensors  nvfp4-pack-quantized, mxfp4-pack-quantized, and in FP8 float-quantized; written and read
//   ModelOpt            NVFP4, FP8, and MIXED_PRECISION, either of them a layer, also from hf_quant_config.json; read
//   "fp8"               128 x 128 blocks of FP8 with weight_scale_inv; read
// Weights only: scales of activations in a file are left out. Block scales lie row by row. ModelOpt's tensor scale is the inverse of
// the global scale of compressed-tensors, which is the one kept.

namespace heddle::quant {

// Writes the quantised layers and all parameters of a model to an existing folder. A Llama model gets the config.json that other
// programs read. Throws heddle::Error if no layer is quantised, layers differ in format, or the format has no published layout
// (fp8_e5m2, fp4).
void save_quantized(const std::filesystem::path& folder, const nn::CausalLM& model);

// Whether a folder holds a quantised checkpoint.
bool has_quantized(const std::filesystem::path& folder);

// The layers that a folder has quantised, as the headers of its files tell. Throws heddle::Error for an unknown layout and damaged headers.
struct StoredLayer {
  QuantSpec spec;
  std::int64_t out_features = 0, in_features = 0;
};
std::vector<StoredLayer> stored_layers(const std::filesystem::path& folder);

// Loads the weights of a plain model, with a QuantLinear for every layer that the folder has quantised. Returns the names of tensors
// that were left out: scales of activations and caches. Throws heddle::Error for an unknown layout, and naming every tensor that is
// missing, unexpected, of another shape or dtype, or damaged; nn::BadValue for FP8 products that cannot be; the model is then unchanged.
// Parameters that are not quantised are converted to the model's dtype.
std::vector<std::string> load_quantized(const std::filesystem::path& folder, nn::CausalLM& model, std::optional<QuantCompute> compute = {});

}  // namespace heddle::quant
