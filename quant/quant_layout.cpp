#include "quant/quant_layout.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "kernels/runtime/check.h"
#include "nn/json_text.h"
#include "nn/posix_file.h"

namespace heddle::quant {
namespace {

using nlohmann::json;

const std::vector<std::string> kFloats = {"F32", "BF16", "F16"};

LayoutNames compressed_nvfp4() {
  return {.title = "nvfp4-pack-quantized",
          .format = QuantFormat::nvfp4,
          .codes = "weight_packed",
          .code_dtype = "U8",
          .scales = "weight_scale",
          .scale_dtypes = {"F8_E4M3"},
          .global = "weight_global_scale"};
}

LayoutNames compressed_mxfp4() {
  return {.title = "mxfp4-pack-quantized",
          .format = QuantFormat::mxfp4,
          .codes = "weight_packed",
          .code_dtype = "U8",
          .scales = "weight_scale",
          .scale_dtypes = {"U8", "F8_E8M0"}};
}

LayoutNames fp8(const std::string& title, const std::string& scales = "weight_scale") {
  return {.title = title, .format = QuantFormat::fp8_e4m3, .codes = "weight", .code_dtype = "F8_E4M3", .scales = scales, .scale_dtypes = kFloats};
}

LayoutNames modelopt_nvfp4(const std::string& title) {
  return {.title = title,
          .format = QuantFormat::nvfp4,
          .codes = "weight",
          .code_dtype = "U8",
          .scales = "weight_scale",
          .scale_dtypes = {"F8_E4M3"},
          .global = "weight_scale_2",
          .global_is_inverse = true};
}

// Of what ModelOpt calls an algorithm, for the checkpoint or for a layer.
std::optional<LayoutNames> modelopt_names(const std::string& algorithm) {
  if (algorithm == "NVFP4" || algorithm == "W4A16_NVFP4") return modelopt_nvfp4(algorithm);
  if (algorithm == "FP8" || algorithm == "FP8_PER_CHANNEL_PER_TOKEN" || algorithm == "FP8_PB_WO") return fp8(algorithm);
  return std::nullopt;
}

bool is_mixed(const json& quantization) { return nn::text_at(quantization, "quant_algo") == "MIXED_PRECISION"; }

// {"quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}}; layers that are not there stay as they are.
FileLayout modelopt_layers(const json& quantization, const std::string& where) {
  HEDDLE_CHECK(!lacks_layers(quantization), where, ": quant_algo is MIXED_PRECISION, and there are no quantized_layers to say of what");
  FileLayout out{.common = {}, .is_mixed = true};
  const json layers = nn::member(quantization, "quantized_layers");
  for (const auto& [layer, form] : layers.items()) {
    const std::string algorithm = nn::text_at(form, "quant_algo");
    const auto names = modelopt_names(algorithm);
    HEDDLE_CHECK(names, where, ": quantized_layers has ", nn::printable(layer), " in \"", nn::printable(algorithm), "\"; heddle reads NVFP4 and FP8");
    out.layers.emplace(layer, *names);
  }
  return out;
}

// Eight-bit integers also come as naive-quantized.
bool has_fp8_weights(const json& quantization) {
  const json groups = nn::member(quantization, "config_groups");
  for (const json& group : groups) {
    const json weights = nn::member(group, "weights");
    if (nn::member(weights, "num_bits") != 8 || nn::member(weights, "type") != "float") return false;
  }
  return groups.is_object() && !groups.empty();
}

const char* strategy_of(ScaleGrain grain) {
  switch (grain) {
    case ScaleGrain::tensor: return "tensor";
    case ScaleGrain::channel: return "channel";
    case ScaleGrain::block: return "block";
  }
  return "";
}

// What a program that computes in FP8 is to do with activations: scales of the same grain, found as it runs.
json fp8_activations(ScaleGrain grain) {
  json out = {{"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"dynamic", true}, {"strategy", "token"}};
  if (grain == ScaleGrain::tensor) out["strategy"] = "tensor";
  if (grain == ScaleGrain::block) {
    out["strategy"] = "group";
    out["group_size"] = 128;
  }
  return out;
}

}  // namespace

const LayoutNames* FileLayout::of(const std::string& layer) const {
  if (!is_mixed) return &common;
  const auto found = layers.find(layer);
  return found == layers.end() ? nullptr : &found->second;
}

bool lacks_layers(const json& quantization) { return is_mixed(quantization) && !nn::member(quantization, "quantized_layers").is_object(); }

FileLayout parse_layout(const json& quantization, const std::string& where) {
  HEDDLE_CHECK(quantization.is_object(), where, ": there is no quantization_config in config.json and no hf_quant_config.json");
  const std::string method = nn::text_at(quantization, "quant_method"), format = nn::text_at(quantization, "format");
  if (method == "compressed-tensors") {
    if (format == "nvfp4-pack-quantized") return {compressed_nvfp4()};
    if (format == "mxfp4-pack-quantized") return {compressed_mxfp4()};
    if ((format == "float-quantized" || format == "naive-quantized") && has_fp8_weights(quantization)) return {fp8(format)};
  }
  const std::string algorithm = nn::text_at(quantization, "quant_algo");
  if (method == "modelopt" && is_mixed(quantization)) return modelopt_layers(quantization, where);
  if (method == "modelopt")
    if (const auto names = modelopt_names(algorithm)) return {*names};
  if (method == "fp8" && nn::member(quantization, "weight_block_size") == json({128, 128})) return {fp8("fp8", "weight_scale_inv")};
  throw Error(concat_text(where, ": quantised by method \"", nn::printable(method), "\", format \"", nn::printable(format + algorithm),
                          "\"; heddle reads compressed-tensors nvfp4-pack-quantized, mxfp4-pack-quantized and float-quantized of 8 bits, ModelOpt "
                          "NVFP4, FP8 and MIXED_PRECISION of the two, and fp8 with weight_block_size [128, 128]"));
}

bool has_layout(const QuantSpec& spec) { return spec.format != QuantFormat::fp8_e5m2 && spec.format != QuantFormat::fp4; }

LayoutNames written_layout(const QuantSpec& spec) {
  HEDDLE_CHECK(has_layout(spec), "quantize: there is no published file layout for ", name_of(spec.format), "; write fp8_e4m3, mxfp4 or nvfp4");
  if (spec.format == QuantFormat::nvfp4) return compressed_nvfp4();
  return spec.format == QuantFormat::mxfp4 ? compressed_mxfp4() : fp8("float-quantized");
}

json quantization_config(const QuantSpec& spec, const std::vector<std::string>& kept) {
  json weights = {{"num_bits", spec.is_fp8() ? 8 : 4}, {"type", "float"}, {"symmetric", true}, {"dynamic", false}};
  json activations;
  if (spec.format == QuantFormat::nvfp4) {
    weights.update({{"strategy", "tensor_group"}, {"group_size", 16}, {"scale_dtype", "torch.float8_e4m3fn"}});
  } else if (spec.format == QuantFormat::mxfp4) {
    weights.update({{"strategy", "group"}, {"group_size", 32}, {"scale_dtype", "torch.uint8"}});
  } else {
    weights["strategy"] = strategy_of(spec.grain);
    if (spec.grain == ScaleGrain::block) weights["block_structure"] = {128, 128};
    activations = fp8_activations(spec.grain);
  }
  const std::string format = written_layout(spec).title;
  const json group = {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", activations}, {"output_activations", nullptr}, {"format", format}};
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"quantization_status", "compressed"},
          {"config_groups", {{"group_0", group}}},
          {"ignore", kept},
          {"kv_cache_scheme", nullptr}};
}

}  // namespace heddle::quant
