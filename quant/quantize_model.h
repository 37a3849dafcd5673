#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nn/chart.h"
#include "nn/module.h"
#include "quant/quant_config.h"
#include "quant/quantized_weight.h"

namespace heddle::quant {

struct LayerReport {
  std::string name;
  QuantSpec spec;
  std::int64_t out_features = 0, in_features = 0;
  std::int64_t dense_bytes = 0, bytes = 0;
  double bits_per_weight = 0;
  QuantError error;
};

struct QuantReport {
  std::vector<LayerReport> layers;
  std::vector<std::string> kept;  // Linear layers that an exclude pattern names
  std::optional<std::int64_t> seed = {};  // of stochastic rounding
};

// Puts a QuantLinear in the place of every Linear layer of the model that no exclude pattern names. In nvfp4 the queries', keys' and
// values' projections of a layer share a tensor scale, and so do gate and up: programs that run them as one product need it. Stochastic
// rounding draws for each layer of the model anew, whatever is excluded. Throws ConfigError for a config that contradicts itself,
// nn::BadValue for a pattern that names no linear layer (other than lm_head, which a tied model lacks) and for FP8 products that cannot
// be, heddle::Error for a weight that is not finite, for a layer that is no longer plain, and if nothing is left to quantise; the model is
// then unchanged.
QuantReport quantize_model(nn::Module& model, const QuantConfig& config, std::optional<QuantCompute> compute = {});

// Puts plain layers of the decoded weights, in the layers' dtype, back for every QuantLinear of the model.
void dequantize_model(nn::Module& model);

// How many weights the QuantLinear layers of a model hold; they are no parameters of it.
std::int64_t quantized_weights(const nn::Module& model);

// Whether a pattern of QuantConfig::exclude names a layer.
bool is_excluded(const std::string& layer, const std::vector<std::string>& patterns);

// A line for every layer of which more than a quarter of the weights became 0, as they do beside one that is much larger; in nvfp4 it may be
// in another layer that shares the tensor scale.
std::vector<std::string> notes(const QuantReport& report);

// The report in a line, as a table with its notes, as JSON, and the layers' SQNR as a chart.
std::string summary(const QuantReport& report);
std::string to_table(const QuantReport& report);
std::string to_json(const QuantReport& report);
nn::BarChart to_chart(const QuantReport& report);

// A table of what every format would make of the model's Linear layers, or of those that the pattern `only` names, those of `exclude`
// apart; the model stays as it is. Throws as quantize_model does, and nn::BadValue if `only` names none of them.
std::string scoreboard(const nn::Module& model, const std::vector<std::string>& exclude, const std::string& only = "*");

}  // namespace heddle::quant
