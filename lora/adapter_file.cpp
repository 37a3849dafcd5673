#include "lora/adapter_file.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "lora/name_pattern.h"
#include "lora/peft_config.h"
#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/fingerprint.h"
#include "nn/hf_names.h"
#include "nn/optim.h"
#include "nn/safetensors.h"

namespace heddle::lora {
namespace {

namespace fs = std::filesystem;
using nn::printable_path;

const char* const kFingerprintKey = "heddle_base_fingerprint";
const std::string kRanksKey = "heddle_ranks:";  // and the name of a layer: "4 0 4"
constexpr std::string_view kBaseLayer = ".base_layer";
// PEFT writes the weight of a head beside its adapter.
constexpr std::string_view kHead = "lm_head";
const char* const kBaseWeight = ".base_layer.weight";

// A linear layer of the model, under an adapter or not.
struct Part {
  std::string name;
  const nn::LinearBase* own = nullptr;
};

// A layer of the Hugging Face model and the layers of ours that it joins, in order.
struct HfLayer {
  std::string name;
  std::vector<Part> parts;

  std::string key(const char* tensor) const { return "base_model.model." + name + tensor; }
  std::vector<std::int64_t> sizes() const {
    std::vector<std::int64_t> out;
    for (const Part& part : parts) out.push_back(part.own->out_features());
    return out;
  }
};

std::vector<HfLayer> hf_layers(const nn::CausalLM& model) {
  std::vector<HfLayer> out;
  for (const auto& [name, module] : model.modules()) {
    const auto* linear = dynamic_cast<const nn::LinearBase*>(module.get());
    if (linear == nullptr || name.ends_with(kBaseLayer)) continue;
    const auto* adapted = dynamic_cast<const LoraLinear*>(linear);
    const nn::HfLinear hf = nn::hf_linear(model.config().architecture, name);
    if (hf.part == 0) out.push_back({hf.name, {}});
    out.back().parts.push_back({name, adapted != nullptr ? adapted->base_layer().get() : linear});
  }
  return out;
}

Tensor on_host(const Tensor& x) { return cast(x.detach(), DType::f32).to(kCpu); }

// Undefined if x is.
Tensor rows(const Tensor& x, std::int64_t start, std::int64_t end) { return x.defined() ? slice(x, 0, start, end) : x; }

// The factors of one of our layers, on the host.
struct Factors {
  Tensor a, b, magnitude;
  double alpha = 0, scale = 1;
  const AdaptedLayer* whole = nullptr;
};

// What keeps the scale when the rank doubles.
double rank_factor(const LoraConfig& config) { return config.use_rslora ? std::sqrt(2.0) : 2.0; }

// By name.
std::map<std::string, Factors> factors_of(const Adapter& adapter, const std::vector<HfLayer>& layers) {
  std::map<std::string, std::int64_t> sizes;
  for (const HfLayer& layer : layers)
    for (const Part& part : layer.parts) sizes[part.name] = part.own->out_features();
  std::map<std::string, Factors> out;
  for (const AdaptedLayer& layer : adapter.layers()) {
    Tensor a = on_host(layer.a), b = on_host(layer.b);
    double alpha = layer.alpha;
    if (layer.initial_a.defined()) {  // PiSSA: B A - B0 A0 as one product, of twice the rank
      a = concat({a, on_host(layer.initial_a)}, 0);
      b = concat({b, neg(on_host(layer.initial_b))}, 1);
      alpha *= rank_factor(adapter.config());
    }
    const Tensor magnitude = layer.magnitude.defined() ? on_host(layer.magnitude) : Tensor();
    std::int64_t start = 0;
    for (const std::string& name : layer.names) {
      const std::int64_t end = start + sizes.at(name);
      out[name] = {a, rows(b, start, end), rows(magnitude, start, end), alpha, layer.scale, &layer};
      start = end;
    }
  }
  return out;
}

// What the file holds of one layer.
struct FileLayer {
  Tensor a, b, magnitude;
  double alpha = 0;
  std::string ranks;  // of separate parts
};

// Nothing if no part is adapted.
std::optional<FileLayer> file_layer(const HfLayer& layer, const std::map<std::string, Factors>& adapted, const LoraConfig& config) {
  std::vector<const Factors*> parts;
  for (const Part& part : layer.parts) parts.push_back(adapted.contains(part.name) ? &adapted.at(part.name) : nullptr);
  const auto first = std::ranges::find_if(parts, [](const Factors* part) { return part != nullptr; });
  if (first == parts.end()) return std::nullopt;
  const Factors& lead = **first;
  const bool is_one = std::ranges::all_of(parts, [&](const Factors* part) { return part != nullptr && part->whole == lead.whole; });

  FileLayer out{.alpha = lead.alpha};
  std::vector<Tensor> as, bs, magnitudes;
  std::int64_t r = 0;
  for (const Factors* part : parts) r += part != nullptr ? part->a.size(0) : 0;
  std::int64_t column = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Factors* part = parts[i];
    const std::int64_t rank = part != nullptr ? part->a.size(0) : 0;
    if (config.use_dora) magnitudes.push_back(part != nullptr ? part->magnitude : on_host(row_norms(layer.parts[i].own->dense_weight())));
    if (is_one) {
      bs.push_back(part->b);
      continue;
    }
    out.ranks += concat_text(i == 0 ? "" : " ", rank);
    bs.push_back(Tensor::zeros({layer.parts[i].own->out_features(), r}));
    if (part == nullptr) continue;
    as.push_back(part->a);
    slice(bs.back(), 1, column, column + rank).copy_(part->scale == lead.scale ? part->b : scale(part->b, part->scale / lead.scale));
    column += rank;
  }
  out.a = is_one ? lead.a : concat(as, 0);
  out.b = concat(bs, 0);
  if (config.use_dora) out.magnitude = concat(magnitudes, 0);
  if (!is_one) out.alpha = lead.scale * rank_divisor(config, r);
  return out;
}

// Targets and patterns are the shortest names that say which layers the file holds.
PeftConfig peft_config(const LoraConfig& config, const std::map<std::string, bool>& is_target,
                       const std::map<std::string, std::int64_t>& ranks, const std::map<std::string, double>& alphas) {
  PeftConfig out{.r = config.r,
                 .lora_alpha = config.lora_alpha,
                 .lora_dropout = config.lora_dropout,
                 .use_rslora = config.use_rslora,
                 .use_dora = config.use_dora,
                 .init_lora_weights = std::string(nn::name_of(nn::EnumNames<InitLoraWeights>(kInitNames), config.init_lora_weights))};
  if (config.init_lora_weights == InitLoraWeights::pissa) {
    out.r *= 2;
    out.lora_alpha *= rank_factor(config);
    out.init_lora_weights = "true";
  }
  for (const auto& [ending, is_one] : by_ending(is_target))
    if (is_one) out.target_modules.push_back(ending);
  for (const auto& [ending, rank] : by_ending(ranks))
    if (rank != out.r) out.rank_pattern.emplace_back(ending, rank);
  for (const auto& [ending, alpha] : by_ending(alphas))
    if (alpha != out.lora_alpha) out.alpha_pattern.emplace_back(ending, alpha);
  return out;
}

LoraConfig lora_config(const PeftConfig& config) {
  LoraConfig out{.r = config.r,
                 .lora_alpha = config.lora_alpha,
                 .lora_dropout = config.lora_dropout,
                 .target_modules = {},
                 .use_rslora = config.use_rslora,
                 .use_dora = config.use_dora};
  for (const auto& [name, init] : kInitNames)
    if (name == config.init_lora_weights) out.init_lora_weights = init;
  return out;
}

// Reads the tensors of a file, and collects what does not fit.
class TensorReader {
 public:
  explicit TensorReader(const nn::SafetensorsFile& file) : file_(file) {}

  // Undefined if it does not fit.
  Tensor take(const std::string& key, const Shape& shape) {
    known_.insert(key);
    if (!file_.contains(key)) return problem("missing ", key, " ", shape);
    const nn::SafetensorsInfo& info = file_.info(key);
    if (info.shape != shape) return problem(key, " is ", info.shape, ", expected ", shape);
    if (info.dtype != "F32" && info.dtype != "BF16" && info.dtype != "F16")
      return problem(key, " is ", info.dtype, ", expected F32, BF16 or F16");
    const Tensor tensor = cast(file_.read(key), DType::f32);
    return nn::first_nonfinite({{key, tensor}}).empty() ? tensor : problem(key, " holds NaN or infinity");
  }

  template <typename... Parts>
  Tensor problem(const Parts&... parts) {
    problems_ += concat_text("\n  ", nn::kAdapterFile, ": ", parts...);
    return {};
  }

  void finish(const fs::path& folder) {
    for (const std::string& name : file_.names())
      if (!known_.contains(name)) problem("unexpected ", nn::printable(name));
    HEDDLE_CHECK(problems_.empty(), printable_path(folder), " does not fit this model; nothing was loaded:", problems_);
  }

 private:
  const nn::SafetensorsFile& file_;
  std::set<std::string> known_;
  std::string problems_;
};

// Whether a dtype holds the float32 values of x.
bool holds(DType dtype, const Tensor& x) { return cast(cast(x, dtype), DType::f32).to_doubles() == x.to_doubles(); }

// What is to be made of an adapter's file: plans, and the values of their factors.
struct Contents {
  std::vector<LayerPlan> plans;
  std::vector<FileLayer> values;

  void add(LayerPlan plan, FileLayer value) {
    plans.push_back(std::move(plan));
    values.push_back(std::move(value));
  }
};

// The parts of a layer that have their own ranks (Note: Adapter files).
void add_separate_parts(Contents& out, const HfLayer& layer, const FileLayer& whole, const std::string& ranks, const PeftConfig& config,
                        TensorReader& reader) {
  std::istringstream in(ranks);
  const double scale = scale_of(config, layer.name);
  const std::int64_t total = whole.a.size(0);
  std::int64_t column = 0, row = 0;
  std::size_t i = 0;
  for (std::int64_t r = 0; i < layer.parts.size() && in >> r && r >= 0 && r <= total - column; ++i) {
    const std::int64_t row_end = row + layer.parts[i].own->out_features();
    const Tensor block = rows(whole.b, row, row_end);
    const auto is_zero = [](const Tensor& x) { return std::ranges::all_of(x.to_doubles(), [](double value) { return value == 0; }); };
    if (!is_zero(slice(block, 1, 0, column)) || !is_zero(slice(block, 1, column + r, total))) break;
    const double alpha = scale * rank_divisor(config, r);
    if (r > 0)
      out.add({{layer.parts[i].name}, r, alpha, scale},
              {rows(whole.a, column, column + r), slice(block, 1, column, column + r), rows(whole.magnitude, row, row_end)});
    column += r;
    row = row_end;
  }
  if (std::string rest; i != layer.parts.size() || column != total || in >> rest)
    reader.problem("the metadata give ", layer.name, " the ranks ", start_of(ranks), ", which its tensors do not have");
}

// It counts as rounded to bfloat16, as in base_fingerprint.
void check_base_weight(const HfLayer& layer, TensorReader& reader) {
  const std::string key = layer.key(kBaseWeight);
  const Tensor own = cast(on_host(layer.parts[0].own->dense_weight()), DType::bf16), given = reader.take(key, own.shape());
  if (given.defined() && cast(given, DType::bf16).to_doubles() != own.to_doubles()) reader.problem(key, " is not the weight of this model");
}

Contents read_contents(const nn::SafetensorsFile& file, const PeftConfig& config, const std::vector<HfLayer>& layers,
                       const fs::path& folder) {
  Contents out;
  TensorReader reader(file);
  std::set<std::string> targets;
  for (const HfLayer& layer : layers) {
    if (!config.targets(layer.name)) continue;
    targets.insert(layer.name);
    const std::int64_t r = rank_of(config, layer.name);
    std::int64_t out_features = 0;
    for (const std::int64_t size : layer.sizes()) out_features += size;
    FileLayer whole{.a = reader.take(layer.key(".lora_A.weight"), {r, layer.parts[0].own->in_features()}),
                    .b = reader.take(layer.key(".lora_B.weight"), {out_features, r}),
                    .alpha = alpha_of(config, layer.name)};
    if (config.use_dora) whole.magnitude = reader.take(layer.key(".lora_magnitude_vector"), {out_features});
    if (layer.name == kHead && file.contains(layer.key(kBaseWeight))) check_base_weight(layer, reader);
    if (!whole.a.defined() || !whole.b.defined()) continue;
    if (const auto ranks = file.metadata().find(kRanksKey + layer.name); ranks != file.metadata().end()) {
      add_separate_parts(out, layer, whole, ranks->second, config, reader);
      continue;
    }
    LayerPlan plan{{}, r, whole.alpha, scale_of(config, layer.name)};
    for (const Part& part : layer.parts) plan.names.push_back(part.name);
    out.add(std::move(plan), std::move(whole));
  }
  HEDDLE_CHECK(!targets.empty(), printable_path(folder), ": target_modules names no layer of this model; 0 of ", file.names().size(),
               " tensors could be applied");
  for (const auto& [key, ranks] : file.metadata())
    if (key.starts_with(kRanksKey) && !targets.contains(key.substr(kRanksKey.size())))
      reader.problem("the metadata give ranks of ", start_of(key.substr(kRanksKey.size())), ", which is not adapted");
  reader.finish(folder);
  return out;
}

}  // namespace

void save_adapter(const fs::path& folder, const nn::CausalLM& model, const Adapter& adapter, const std::string& base_path,
                  const std::string& fingerprint) {
  const NoGradGuard no_grad;
  adapter.check_base(model);
  const std::vector<HfLayer> layers = hf_layers(model);
  const std::map<std::string, Factors> adapted = factors_of(adapter, layers);
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::map<std::string, std::string> metadata = {{"format", "pt"}, {kFingerprintKey, fingerprint.empty() ? base_fingerprint(model) : fingerprint}};
  std::map<std::string, bool> is_target;
  std::map<std::string, std::int64_t> ranks;
  std::map<std::string, double> alphas;
  for (const HfLayer& layer : layers) {
    const auto written = file_layer(layer, adapted, adapter.config());
    is_target[layer.name] = written.has_value();
    if (!written) continue;
    ranks[layer.name] = written->a.size(0);
    alphas[layer.name] = written->alpha;
    if (!written->ranks.empty()) metadata[kRanksKey + layer.name] = written->ranks;
    tensors.emplace_back(layer.key(".lora_A.weight"), written->a);
    tensors.emplace_back(layer.key(".lora_B.weight"), written->b);
    if (written->magnitude.defined()) tensors.emplace_back(layer.key(".lora_magnitude_vector"), written->magnitude);
    if (layer.name == kHead) tensors.emplace_back(layer.key(kBaseWeight), on_host(layer.parts[0].own->dense_weight()));
  }
  HEDDLE_CHECK(!tensors.empty(), printable_path(folder), ": not written, the adapter has no layers");
  for (const auto& [name, tensor] : tensors)
    HEDDLE_CHECK(nn::first_nonfinite({{name, tensor}}).empty(), printable_path(folder), ": not written, ", name, " holds NaN or infinity");

  PeftConfig config = peft_config(adapter.config(), is_target, ranks, alphas);
  config.base_model_name_or_path = base_path;
  // Where layers differ PEFT notes what the last one needs: the head's weight is [out, in] also in GPT-2.
  config.fan_in_fan_out = !model.config().is_llama() && !is_target[std::string(kHead)];
  nn::AtomicFolder out(folder);
  nn::write_file(out.path() / nn::kAdapterConfigFile, peft_config_text(config));
  nn::write_safetensors(out.path() / nn::kAdapterFile, tensors, metadata);
  out.commit();
}

Adapter load_adapter(const fs::path& folder, nn::CausalLM& model) {
  const NoGradGuard no_grad;
  const PeftConfig config = read_peft_config(folder / nn::kAdapterConfigFile);
  const nn::SafetensorsFile file(folder / nn::kAdapterFile);
  if (const auto found = file.metadata().find(kFingerprintKey); found != file.metadata().end()) {
    const std::string own = base_fingerprint(model);
    HEDDLE_CHECK(found->second == own, printable_path(folder), " was trained on another base than this model (fingerprint ",
                 nn::printable(found->second), ", this one has ", own, "); use it with its own",
                 config.base_model_name_or_path.empty() ? "" : ", then at " + nn::printable(config.base_model_name_or_path));
  }
  const Contents contents = read_contents(file, config, hf_layers(model), folder);
  const DType own = model.parameters().front().tensor.dtype();
  const bool is_exact = std::ranges::all_of(contents.values, [own](const FileLayer& value) {
    return holds(own, value.a) && holds(own, value.b);
  });
  Generator generator{0};
  Adapter out(model, contents.plans, lora_config(config), generator, is_exact ? own : DType::f32);
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    const AdaptedLayer& layer = out.layers()[i];
    layer.a.copy_(contents.values[i].a);
    layer.b.copy_(contents.values[i].b);
    if (layer.magnitude.defined()) layer.magnitude.copy_(contents.values[i].magnitude);
  }
  return out;
}

std::string base_fingerprint(const nn::CausalLM& model) {
  const NoGradGuard no_grad;
  nn::Fingerprint fingerprint;
  Tensor host;  // one for all tensors of a device: fresh memory takes longer to come by than to fill
  const auto add = [&](std::string name, const Tensor& tensor) {
    if (const std::size_t at = name.find(kBaseLayer); at != std::string::npos) name.erase(at, kBaseLayer.size());
    const std::string head = concat_text(name, " ", tensor.shape());
    Tensor values = reshape(contiguous(cast(tensor.detach(), DType::bf16)), {tensor.numel()});
    if (values.device().is_cuda()) {
      if (!host.defined() || host.numel() < values.numel()) host = Tensor::empty({values.numel()}, DType::bf16);
      values = slice(host, 0, 0, values.numel()).copy_(values);
    }
    fingerprint.add(head);
    fingerprint.add(values.view().data, static_cast<std::size_t>(values.nbytes()));
  };
  for (const auto& [name, tensor] : model.parameters())
    if (name.find(".lora_") == std::string::npos) add(name, tensor);
  for (const auto& [name, module] : model.modules()) {
    const auto* layer = dynamic_cast<const nn::LinearBase*>(module.get());
    if (layer == nullptr || dynamic_cast<const nn::Linear*>(layer) != nullptr || dynamic_cast<const LoraLinear*>(layer) != nullptr) continue;
    add(name, layer->dense_weight());
  }
  return fingerprint.text();
}

}  // namespace heddle::lora
