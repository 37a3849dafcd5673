#include "quant/quantize_model.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "kernels/runtime/random.h"
#include "nn/linear.h"
#include "nn/posix_file.h"
#include "quant/quant_linear.h"

namespace heddle::quant {
namespace {

using nlohmann::json;

bool matches(const std::string& pattern, const std::string& name) {
  if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0) return true;
  for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1))
    if (fnmatch(pattern.c_str(), name.c_str() + dot + 1, 0) == 0) return true;
  return false;
}

struct Layer {
  std::string name;
  std::shared_ptr<nn::Linear> layer;
  std::size_t index;  // among the model's linear layers
};

std::vector<Layer> plain_layers(const nn::Module& model) {
  std::vector<Layer> out;
  for (const auto& [name, module] : model.modules()) {
    if (std::dynamic_pointer_cast<nn::LinearBase>(module) == nullptr) continue;
    const auto layer = std::dynamic_pointer_cast<nn::Linear>(module);
    HEDDLE_CHECK(layer != nullptr, "quantize: '", name, "' is already quantised or has an adapter; quantise the plain model");
    out.push_back({name, layer, out.size()});
  }
  return out;
}

const char* const kLayerPattern = "a pattern that names linear layers, as \"o_proj\" and \"layers.0.*\" do";

// The layers that are to be quantised, and the names of those that a pattern excludes.
struct Selection {
  std::vector<Layer> chosen;
  std::vector<std::string> kept;
};

Selection select_layers(const nn::Module& model, const std::vector<std::string>& exclude) {
  const std::vector<Layer> layers = plain_layers(model);
  for (const std::string& pattern : exclude) {
    const bool is_known = std::ranges::any_of(layers, [&](const Layer& layer) { return matches(pattern, layer.name); });
    if (!is_known && pattern != "lm_head")
      throw nn::BadValue("quantize.exclude", kLayerPattern, nn::quoted_text(nn::printable(pattern)));
  }
  Selection out;
  for (const Layer& layer : layers) {
    if (is_excluded(layer.name, exclude)) out.kept.push_back(layer.name);
    else out.chosen.push_back(layer);
  }
  HEDDLE_CHECK(!out.chosen.empty(), "quantize: all ", out.kept.size(), " linear layers are excluded; exclude fewer");
  return out;
}

// Layers with the same key share a tensor scale.
std::string fused_with(const std::string& name) {
  static const std::map<std::string, std::string> kFused = {
      {"q_proj", "qkv"}, {"k_proj", "qkv"}, {"v_proj", "qkv"}, {"gate_proj", "gate_up"}, {"up_proj", "gate_up"}};
  const std::size_t dot = name.rfind('.') + 1;
  const auto found = kFused.find(name.substr(dot));
  return found == kFused.end() ? name : name.substr(0, dot) + found->second;
}

// The largest magnitudes of weights that share a tensor scale, by fused_with; of none in formats without one.
std::map<std::string, Tensor> shared_magnitudes(const std::vector<Layer>& layers, const QuantSpec& spec) {
  std::map<std::string, Tensor> out;
  if (spec.format != QuantFormat::nvfp4) return out;
  for (const auto& [name, layer, index] : layers) {
    const Tensor own = largest_magnitude(name + ".weight", layer->weight());
    Tensor& shared = out[fused_with(name)];
    if (!shared.defined() || own.item() > shared.item()) shared = own;
  }
  return out;
}

// Elements at one place of two layers are not to be drawn alike.
std::uint64_t seed_of_layer(std::int64_t seed, std::size_t index) {
  const auto words = philox(static_cast<std::uint64_t>(seed), index, 0);
  return std::uint64_t{words[1]} << 32 | words[0];
}

// Calls body(layer, packed) for every layer and its quantised weight, rounded stochastically if there is a seed.
template <typename Body>
void for_packed(const std::vector<Layer>& layers, const QuantSpec& spec, std::optional<std::int64_t> seed, const Body& body) {
  const std::map<std::string, Tensor> magnitudes = shared_magnitudes(layers, spec);
  for (const Layer& layer : layers) {
    const auto shared = magnitudes.find(fused_with(layer.name));
    body(layer, QuantizedWeight::quantize(layer.name + ".weight", layer.layer->weight(), spec,
                                          shared == magnitudes.end() ? Tensor() : shared->second,
                                          seed ? std::optional(seed_of_layer(*seed, layer.index)) : std::nullopt));
  }
}

std::string text(const char* format, double value) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}

std::string padded(const std::string& value, std::size_t width, bool is_right = true) {
  const std::string space(width > value.size() ? width - value.size() : 0, ' ');
  return is_right ? space + value : value + space;
}

struct NamedSpec {
  std::string name;
  QuantSpec spec;
};

std::vector<NamedSpec> comparable_specs() {
  using enum QuantFormat;
  std::vector<NamedSpec> out;
  for (const QuantFormat format : {fp8_e4m3, fp8_e5m2})
    for (const auto& [grain_name, grain] : kGrainNames)
      out.push_back({concat_text(name_of(format), ", scale a ", grain_name), {.format = format, .grain = grain}});
  out.push_back({"fp4", {.format = fp4}});
  for (const auto& [rounding_name, rounding] : kMxRoundingNames)
    out.push_back({concat_text("mxfp4, ", rounding_name), {.format = mxfp4, .mx_rounding = rounding}});
  for (const auto& [rounding_name, rounding] : kRoundingNames)
    out.push_back({concat_text("nvfp4, ", rounding_name), {.format = nvfp4, .scale_rounding = rounding}});
  for (const ScaleSearch search : {ScaleSearch::four_over_six, ScaleSearch::mse})
    out.push_back({concat_text("nvfp4, ", nn::name_of(nn::EnumNames<ScaleSearch>(kSearchNames), search)), {.format = nvfp4, .scale_search = search}});
  return out;
}

struct Total {
  std::int64_t weights = 0, dense_bytes = 0, bytes = 0;

  explicit Total(const QuantReport& report) {
    for (const LayerReport& layer : report.layers) {
      weights += layer.out_features * layer.in_features;
      dense_bytes += layer.dense_bytes;
      bytes += layer.bytes;
    }
  }
  double bits() const { return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(weights, 1)); }
};

}  // namespace

bool is_excluded(const std::string& layer, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) { return matches(pattern, layer); });
}

QuantReport quantize_model(nn::Module& model, const QuantConfig& config, std::optional<QuantCompute> compute) {
  nn::require_valid("quantize", {}, conflicts(config));
  HEDDLE_CHECK(config.seed || config.rounding == ElementRounding::nearest, "quantize: stochastic rounding needs a seed");
  const QuantSpec spec = config.spec();
  const Selection selection = select_layers(model, config.exclude);
  QuantReport report{.layers = {}, .kept = selection.kept, .seed = config.seed};
  std::vector<std::shared_ptr<QuantLinear>> quantized;
  for_packed(selection.chosen, spec, config.seed, [&](const Layer& layer, const QuantizedWeight& packed) {
    const Tensor& weight = layer.layer->weight();
    report.layers.push_back({layer.name, spec, weight.size(0), weight.size(1), weight.nbytes(), packed.nbytes(), packed.bits_per_weight(),
                             quant_error(weight, packed)});
    quantized.push_back(std::make_shared<QuantLinear>(packed, layer.layer->bias(), weight.dtype(), compute));
  });
  for (std::size_t i = 0; i < quantized.size(); ++i) model.replace_child(selection.chosen[i].name, quantized[i]);
  return report;
}

void dequantize_model(nn::Module& model) {
  for (const auto& [name, module] : model.modules())
    if (const auto layer = std::dynamic_pointer_cast<QuantLinear>(module); layer != nullptr)
      model.replace_child(name, std::make_shared<nn::Linear>(layer->dense_weight(), layer->bias()));
}

std::int64_t quantized_weights(const nn::Module& model) {
  std::int64_t out = 0;
  for (const auto& [name, module] : model.modules())
    if (const auto* layer = dynamic_cast<const QuantLinear*>(module.get()); layer != nullptr) out += layer->out_features() * layer->in_features();
  return out;
}

std::string summary(const QuantReport& report) {
  const Total total(report);
  QuantError error;
  for (const LayerReport& layer : report.layers) error.add(layer.error);
  return concat_text(report.layers.size(), " layers: ", total.weights, " weights, ", total.dense_bytes, " bytes before, ", total.bytes, " after (",
                     text("%.4f", total.bits()), " bits a weight), SQNR ", text("%.2f", error.sqnr_db()), " dB",
                     report.seed ? concat_text(", rounded stochastically with seed ", *report.seed) : "");
}

std::vector<std::string> notes(const QuantReport& report) {
  constexpr double kMany = 0.25;  // normally distributed weights lose 7 to 11 % in formats of blocks, 14 % in fp4, nearly none in FP8
  std::vector<std::string> out;
  for (const auto& layer : report.layers)
    if (const QuantError& error = layer.error; static_cast<double>(error.zeroed) > kMany * static_cast<double>(error.count))
      out.push_back(concat_text("note: ", error.zeroed, " of the ", error.count, " weights of ", layer.name,
                                " became 0: they are too small beside the largest that their scale serves"));
  return out;
}

std::string to_table(const QuantReport& report) {
  std::size_t width = 5;
  for (const LayerReport& layer : report.layers) width = std::max(width, layer.name.size());
  std::string out = padded("layer", width, false) + padded("format", 10) + padded("shape", 14) + padded("bits", 10) + padded("MSE", 12) +
                    padded("SQNR dB", 9) + padded("worst", 12) + "\n";
  for (const LayerReport& layer : report.layers) {
    out += padded(layer.name, width, false) + padded(std::string(name_of(layer.spec.format)), 10) +
           padded(concat_text(layer.out_features, "x", layer.in_features), 14) + padded(text("%.6f", layer.bits_per_weight), 10) +
           padded(text("%.4g", layer.error.mse()), 12) + padded(text("%.2f", layer.error.sqnr_db()), 9) + padded(text("%.4g", layer.error.worst), 12) +
           "\n";
  }
  out += summary(report) + "\n";
  for (const std::string& note : notes(report)) out += note + "\n";
  for (const std::string& name : report.kept) out += "kept as it is: " + name + "\n";
  return out;
}

nn::BarChart to_chart(const QuantReport& report) {
  nn::BarChart out{.title = "Signal to quantisation noise", .x_label = "dB; 6 dB are one bit"};
  for (const LayerReport& layer : report.layers)
    out.bars.push_back({concat_text(layer.name, ", ", name_of(layer.spec.format)), layer.error.sqnr_db()});
  return out;
}

std::string scoreboard(const nn::Module& model, const std::vector<std::string>& exclude, const std::string& only) {
  auto [layers, kept] = select_layers(model, exclude);
  std::erase_if(layers, [&](const Layer& layer) { return !matches(only, layer.name); });
  if (layers.empty()) {
    const bool is_kept = std::ranges::any_of(kept, [&](const std::string& name) { return matches(only, name); });
    throw nn::BadValue("--only", is_kept ? "a pattern that names linear layers which are not excluded" : kLayerPattern,
                       nn::quoted_text(nn::printable(only)));
  }
  std::string out = padded("format", 30, false) + padded("bits", 10) + padded("MSE", 12) + padded("SQNR dB", 9) + padded("worst", 12) +
                    padded("became 0", 10) + "\n";
  for (const auto& [name, spec] : comparable_specs()) {
    QuantError error;
    std::int64_t bytes = 0;
    for_packed(layers, spec, {}, [&](const Layer& layer, const QuantizedWeight& packed) {
      error.add(quant_error(layer.layer->weight(), packed));
      bytes += packed.nbytes();
    });
    const auto count = static_cast<double>(std::max<std::int64_t>(error.count, 1));
    out += padded(name, 30, false) + padded(text("%.6f", 8.0 * static_cast<double>(bytes) / count), 10) + padded(text("%.4g", error.mse()), 12) +
           padded(text("%.2f", error.sqnr_db()), 9) + padded(text("%.4g", error.worst), 12) +
           padded(text("%.2f %%", 100.0 * static_cast<double>(error.zeroed) / count), 10) + "\n";
  }
  return out;
}

std::string to_json(const QuantReport& report) {
  json layers = json::array();
  for (const LayerReport& layer : report.layers)
    layers.push_back({{"layer", layer.name},
                      {"format", name_of(layer.spec.format)},
                      {"shape", {layer.out_features, layer.in_features}},
                      {"bytes_before", layer.dense_bytes},
                      {"bytes_after", layer.bytes},
                      {"bits_per_weight", layer.bits_per_weight},
                      {"mse", layer.error.mse()},
                      {"sqnr_db", layer.error.sqnr_db()},  // null without any noise
                      {"worst_error", layer.error.worst},
                      {"became_0", layer.error.zeroed},
                      {"peak_over_rms", layer.error.peak()}});
  const Total total(report);
  const json out = {{"layers", layers},
                    {"kept", report.kept},
                    {"rounding", report.seed ? "stochastic" : "nearest"},
                    {"seed", report.seed ? json(*report.seed) : json()},
                    {"weights", total.weights},
                    {"bytes_before", total.dense_bytes},
                    {"bytes_after", total.bytes},
                    {"bits_per_weight", total.bits()}};
  return out.dump(2) + "\n";
}

}  // namespace heddle::quant
