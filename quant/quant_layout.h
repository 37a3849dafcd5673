#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "kernels/quantize/quantize.h"

namespace heddle::quant {

// How a layout (Note: Quantised checkpoints, quant_file.h) stores a layer "P": the tensors P.<codes>, P.<scales> and, if it has one,
// P.<global>, with their dtypes in the file.
struct LayoutNames {
  std::string title;  // "nvfp4-pack-quantized"
  QuantFormat format = QuantFormat::nvfp4;
  std::string codes, code_dtype;
  std::string scales;
  std::vector<std::string> scale_dtypes;  // the first is the one written
  std::string global = {};
  bool global_is_inverse = false;  // a factor of the weights rather than of the block scales
};

// The layouts of a checkpoint's layers: one for all that are quantised, which the tensors tell, or one for each layer that the config lists.
struct FileLayout {
  LayoutNames common;
  bool is_mixed = false;
  std::map<std::string, LayoutNames> layers = {};

  const LayoutNames* of(const std::string& layer) const;  // null for a layer that is not listed
};

// What a quantization_config means. Throws heddle::Error naming `where` for one that is not read.
FileLayout parse_layout(const nlohmann::json& quantization, const std::string& where);
// Whether it speaks of layers of several layouts without listing them: older programs wrote the list to hf_quant_config.json alone.
bool lacks_layers(const nlohmann::json& quantization);

// Whether there is a layout that weights of this form are written in, that layout, and its quantization_config; `kept` are the layers
// that are not quantised. The last two throw heddle::Error for a format without one.
bool has_layout(const QuantSpec& spec);
LayoutNames written_layout(const QuantSpec& spec);
nlohmann::json quantization_config(const QuantSpec& spec, const std::vector<std::string>& kept);

}  // namespace heddle::quant
