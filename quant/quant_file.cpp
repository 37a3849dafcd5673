#include "quant/quant_file.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "nn/atomic_file.h"
#include "nn/json_text.h"
#include "nn/optim.h"
#include "nn/posix_file.h"
#include "nn/safetensors.h"
#include "nn/tensor_files.h"
#include "quant/quant_linear.h"
#include "quant/quant_layout.h"

namespace heddle::quant {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const char* const kConfigFile = "config.json";
const char* const kModelOptFile = "hf_quant_config.json";

// What the folder says about its layout; null if it says nothing.
json quantization_of(const fs::path& folder) {
  json found;
  if (fs::exists(folder / kConfigFile)) found = nn::member(nn::read_json(folder / kConfigFile), "quantization_config");
  if ((!found.is_null() && !lacks_layers(found)) || !fs::exists(folder / kModelOptFile)) return found;
  json quantization = nn::member(nn::read_json(folder / kModelOptFile), "quantization");
  if (!quantization.is_object()) return found;
  quantization["quant_method"] = "modelopt";
  return quantization;
}

// Tensors that say how to quantise activations and caches.
bool is_activation_scale(const std::string& name) {
  for (const char* end : {".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale"})
    if (name.ends_with(end)) return true;
  return false;
}

Shape without_ones(const Shape& shape) {
  Shape out;
  for (const std::int64_t size : shape)
    if (size != 1) out.push_back(size);
  return out;
}

// The grain that the shape of an FP8 layer's scales stands for: layouts differ in dimensions of size 1.
ScaleGrain grain_of(const Shape& scales, QuantSpec spec, std::int64_t out, std::int64_t in) {
  for (const bool is_exact : {true, false})
    for (const ScaleGrain grain : {ScaleGrain::tensor, ScaleGrain::channel, ScaleGrain::block}) {
      spec.grain = grain;
      const Shape shape = quant_layout(spec, out, in).scales;
      if (is_exact ? scales == shape : without_ones(scales) == without_ones(shape)) return grain;
    }
  throw Error(concat_text("scales ", scales, " fit no grain of [", out, ", ", in, "]"));
}

class Loading {
 public:
  Loading(const fs::path& folder, nn::CausalLM& model, std::optional<QuantCompute> compute)
      : model_(model), compute_(compute), where_(nn::printable_path(folder)), layout_(parse_layout(quantization_of(folder), where_)),
        file_(nn::TensorFiles::of_model(folder)) {}

  std::vector<std::string> run() {
    std::set<std::string> linear;
    for (const auto& [name, module] : model_.modules())
      if (const auto layer = std::dynamic_pointer_cast<nn::Linear>(module); layer != nullptr) {
        linear.insert(name);
        attempt([&] { load_layer(name, *layer); });
      }
    for (const auto& [name, names] : layout_.layers)
      if (linear.count(name) == 0) problems_ += concat_text("\n  quantized_layers has ", nn::printable(name), ", which is no linear layer of the model");
    for (const nn::NamedTensor& parameter : model_.parameters())
      if (replaced_.count(parameter.name) == 0) attempt([&] { load_dense(parameter); });
    std::vector<std::string> ignored;
    for (const std::string& name : file_.names()) {
      if (used_.count(name) > 0 || (name == "lm_head.weight" && model_.config().tied())) continue;
      if (is_activation_scale(name)) ignored.push_back(name);
      else problems_ += concat_text("\n  unexpected ", nn::printable(name));
    }
    HEDDLE_CHECK(problems_.empty(), where_, " does not fit this model; nothing was loaded:", problems_);
    const NoGradGuard no_grad;
    for (const auto& [target, source] : copies_) target.copy_(source);
    for (const auto& [name, layer] : layers_) model_.replace_child(name, layer);
    return ignored;
  }

 private:
  template <typename Fn>
  void attempt(const Fn& fn) {
    try {
      fn();
    } catch (const nn::BadValue&) {  // of the config, and nothing the file could change
      throw;
    } catch (const Error& error) {
      problems_ += concat_text("\n  ", error.what());
    }
  }

  void expect(const std::string& name, const std::vector<std::string>& dtypes, const LayoutNames& names) const {
    HEDDLE_CHECK(file_.contains(name), "missing ", name);
    const std::string& dtype = file_.info(name).dtype;
    HEDDLE_CHECK(std::ranges::find(dtypes, dtype) != dtypes.end(), name, " is ", dtype, ", in ", names.title, " it is ", dtypes[0]);
  }

  void load_layer(const std::string& name, const nn::Linear& layer) {
    const LayoutNames* found = layout_.of(name);
    if (found == nullptr) return;
    const LayoutNames& names = *found;
    const std::string codes = name + "." + names.codes;
    const bool is_there = file_.contains(codes) && (names.codes != "weight" || file_.info(codes).dtype == names.code_dtype);
    if (!is_there && !layout_.is_mixed) return;
    replaced_.insert(name + ".weight");
    for (const std::string& part : {names.codes, names.scales, names.global}) used_.insert(name + "." + part);
    expect(codes, {names.code_dtype}, names);
    const std::string scales = name + "." + names.scales;
    expect(scales, names.scale_dtypes, names);
    QuantSpec spec{.format = names.format};
    const std::int64_t out = layer.out_features(), in = layer.in_features();
    QuantizedWeight::Parts parts = {file_.read_bytes(codes), {}, {}};
    if (spec.is_fp8()) spec.grain = grain_of(file_.info(scales).shape, spec, out, in);
    parts.scales = spec.is_fp8() ? reshape(cast(file_.read(scales), DType::f32), quant_layout(spec, out, in).scales) : file_.read_bytes(scales);
    if (!names.global.empty()) {
      const std::string global = name + "." + names.global;
      expect(global, {"F32"}, names);
      HEDDLE_CHECK(file_.info(global).shape.numel() == 1, global, " must be one number, got ", file_.info(global).shape);
      const float value = file_.read(global).to_vector<float>()[0];
      parts.global = Tensor::from_vector(std::vector<float>{names.global_is_inverse ? 1.0f / value : value}, {1});
    }
    const QuantizedWeight weight(name, spec, out, in, parts);
    layers_.emplace_back(name, std::make_shared<QuantLinear>(weight.to(layer.weight().device()), layer.bias(), layer.weight().dtype(), compute_));
  }

  void load_dense(const nn::NamedTensor& parameter) {
    HEDDLE_CHECK(file_.contains(parameter.name), "missing ", parameter.name);
    used_.insert(parameter.name);
    const Tensor source = file_.read(parameter.name);
    HEDDLE_CHECK(source.shape() == parameter.tensor.shape() && is_floating(source.dtype()), parameter.name, " is ", source.dtype(), " ",
                 source.shape(), ", expected ", parameter.tensor.dtype(), " ", parameter.tensor.shape());
    HEDDLE_CHECK(nn::first_nonfinite({{parameter.name, source}}).empty(), parameter.name, " holds NaN or infinity");
    copies_.emplace_back(parameter.tensor, source);
  }

  nn::CausalLM& model_;
  std::optional<QuantCompute> compute_;
  std::string where_;
  FileLayout layout_;
  nn::TensorFiles file_;
  std::set<std::string> used_, replaced_;
  std::vector<std::pair<Tensor, Tensor>> copies_;
  std::vector<std::pair<std::string, std::shared_ptr<QuantLinear>>> layers_;
  std::string problems_;
};

// config.json of a model whose layers other programs know by our names.
json model_config(const nn::TransformerConfig& c, DType dtype) {
  if (!c.is_llama()) return json::object();
  return {{"architectures", {c.qk_norm ? "Qwen3ForCausalLM" : "LlamaForCausalLM"}},
          {"model_type", c.qk_norm ? "qwen3" : "llama"},
          {"vocab_size", c.vocab_size},
          {"hidden_size", c.hidden_size},
          {"num_hidden_layers", c.num_hidden_layers},
          {"num_attention_heads", c.num_attention_heads},
          {"num_key_value_heads", c.kv_heads()},
          {"head_dim", c.head_size()},
          {"intermediate_size", c.ffn_size()},
          {"max_position_embeddings", c.max_position_embeddings},
          {"tie_word_embeddings", c.tied()},
          {"hidden_act", "silu"},
          {"rms_norm_eps", c.rms_norm_eps},
          {"rope_theta", c.rope_theta},
          {"attention_bias", c.has_attention_bias()},
          {"mlp_bias", c.has_mlp_bias()},
          {"torch_dtype", std::string(dtype_name(dtype))}};
}

}  // namespace

void save_quantized(const fs::path& folder, const nn::CausalLM& model) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::map<std::string, std::string> byte_dtypes;
  std::vector<std::string> kept;
  std::optional<QuantSpec> spec;
  LayoutNames names;
  for (const auto& [name, module] : model.modules()) {
    if (std::dynamic_pointer_cast<nn::Linear>(module) != nullptr) kept.push_back(name);
    const auto layer = std::dynamic_pointer_cast<QuantLinear>(module);
    if (layer == nullptr) continue;
    const QuantizedWeight& weight = layer->weight();
    if (!spec) {
      spec = weight.spec();
      names = written_layout(*spec);
    }
    HEDDLE_CHECK(weight.spec().format == spec->format && (!spec->is_fp8() || weight.spec().grain == spec->grain), "save_quantized: '", name,
                 "' has another format than the layers before it; quantise all alike");
    tensors.emplace_back(name + "." + names.codes, weight.parts().codes);
    tensors.emplace_back(name + "." + names.scales, weight.parts().scales);
    if (names.code_dtype != "U8") byte_dtypes[tensors[tensors.size() - 2].first] = names.code_dtype;
    if (!spec->is_fp8() && names.scale_dtypes[0] != "U8") byte_dtypes[tensors.back().first] = names.scale_dtypes[0];
    if (!names.global.empty()) tensors.emplace_back(name + "." + names.global, weight.parts().global);
  }
  HEDDLE_CHECK(spec, "save_quantized: no layer of the model is quantised");
  DType dtype = DType::f32;
  for (const nn::NamedTensor& parameter : model.parameters()) {
    dtype = parameter.tensor.dtype();
    tensors.emplace_back(parameter.name, parameter.tensor);
  }
  json config = model_config(model.config(), dtype);
  config["quantization_config"] = quantization_config(*spec, kept);
  nn::write_safetensors(folder / nn::kWeightsFile, tensors, {{"format", "pt"}}, byte_dtypes);
  nn::write_file(folder / kConfigFile, config.dump(2) + "\n");
}

bool has_quantized(const fs::path& folder) { return !quantization_of(folder).is_null(); }

std::vector<StoredLayer> stored_layers(const fs::path& folder) {
  const FileLayout layout = parse_layout(quantization_of(folder), nn::printable_path(folder));
  const nn::TensorFiles file = nn::TensorFiles::of_model(folder);
  std::vector<StoredLayer> out;
  for (const std::string& codes : file.names()) {
    const std::string layer = codes.substr(0, codes.rfind('.'));
    const LayoutNames* names = layout.of(layer);
    const nn::SafetensorsInfo& info = file.info(codes);
    if (names == nullptr || codes != layer + "." + names->codes || info.dtype != names->code_dtype || info.shape.rank() != 2) continue;
    const std::string scales = layer + "." + names->scales;
    HEDDLE_CHECK(file.contains(scales), "missing ", nn::printable(scales));
    StoredLayer stored{.spec = {.format = names->format}, .out_features = info.shape[0], .in_features = info.shape[1]};
    if (stored.spec.is_fp8()) stored.spec.grain = grain_of(file.info(scales).shape, stored.spec, stored.out_features, stored.in_features);
    else stored.in_features *= 2;
    out.push_back(stored);
  }
  return out;
}

std::vector<std::string> load_quantized(const fs::path& folder, nn::CausalLM& model, std::optional<QuantCompute> compute) {
  return Loading(folder, model, compute).run();
}

}  // namespace heddle::quant
