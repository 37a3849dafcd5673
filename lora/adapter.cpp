#include "lora/adapter.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "autograd/ops.h"
#include "lora/name_pattern.h"
#include "lora/pissa.h"
#include "nn/posix_file.h"
#include "nn/transformer.h"

namespace heddle::lora {
namespace {

constexpr std::string_view kAllLinear = "all-linear";
constexpr std::string_view kFused = "c_attn";
constexpr std::string_view kFusedParts[] = {"q_proj", "k_proj", "v_proj"};
constexpr const char* kTargetsKey = "lora.target_modules";

// A layer that can be a target, or several that can be one together.
struct Candidate {
  std::string name;
  std::vector<std::string> parts;
  bool is_fused() const { return parts.size() > 1; }
};

// Every layer in order, and before the first of each group that can be one, the group.
std::vector<Candidate> candidates(const std::vector<std::string>& layers) {
  std::vector<Candidate> out;
  const std::set<std::string> known(layers.begin(), layers.end());
  for (const std::string& layer : layers) {
    if (layer.ends_with(kFusedParts[0])) {
      const std::string parent = layer.substr(0, layer.size() - kFusedParts[0].size());
      Candidate group = {parent + std::string(kFused), {}};
      for (const std::string_view part : kFusedParts) group.parts.push_back(parent + std::string(part));
      if (std::ranges::all_of(group.parts, [&](const std::string& part) { return known.contains(part); })) out.push_back(std::move(group));
    }
    out.push_back({layer, {layer}});
  }
  return out;
}

std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

bool matches(const std::string& target, const Candidate& candidate) {
  const std::string& name = candidate.name;
  if (candidate.is_fused() && last_part(target) != kFused) return false;  // no wildcard means it
  if (target == kAllLinear) return name != "lm_head";
  return fnmatch(target.c_str(), name.c_str(), 0) == 0 || fnmatch(("*." + target).c_str(), name.c_str(), 0) == 0;
}

[[noreturn]] void refuse_target(const std::string& target, const std::vector<Candidate>& all) {
  std::set<std::string> names;
  for (const Candidate& candidate : all) names.insert(last_part(candidate.name));
  const std::string wanted = last_part(target);
  const auto distance = [&](const std::string& name) { return nn::edit_distance(wanted, name); };
  const auto nearest = std::ranges::min_element(names, {}, distance);
  std::string expected = "names of layers, of which there are";
  for (const std::string& name : names) expected += (name == *names.begin() ? " " : ", ") + name;
  std::string got = nn::quoted_text(nn::shortened(target)) + ", which is none of them";
  const bool is_clear = nearest != names.end() && std::ranges::count(names, distance(*nearest), distance) == 1;  // c_proj is as near to all
  if (is_clear && distance(*nearest) <= 2) got += "; did you mean " + *nearest + "?";
  throw nn::BadValue(kTargetsKey, expected, got);
}

template <typename Value>
void check_patterns(const char* key, const nn::ByName<Value>& patterns, const std::vector<std::string>& adapted) {
  for (const auto& [pattern, value] : patterns)
    if (std::ranges::none_of(adapted, [&](const std::string& name) { return fits_ending(pattern, name); }))
      throw nn::BadValue(key, "patterns of names of adapted layers, such as " + adapted.front(),
                         nn::quoted_text(nn::shortened(pattern)) + ", which fits none");
}

// Hands out dense tensors that lie one after another in memory.
class Pool {
 public:
  Pool(std::int64_t size, DType dtype, Device device) : memory_(Tensor::empty({size}, dtype, device)) {}
  Tensor take(const Shape& shape) {
    const std::int64_t start = std::exchange(used_, used_ + shape.numel());
    return memory_.alias(shape, contiguous_strides(shape), start);
  }

 private:
  Tensor memory_;
  std::int64_t used_ = 0;
};

// The weights of layers, their rows one after another.
Tensor joined_weight(const std::vector<std::shared_ptr<nn::LinearBase>>& layers) {
  std::vector<Tensor> weights;
  for (const auto& layer : layers) weights.push_back(layer->dense_weight());
  return concat(weights, 0);
}

// Takes A and B from the weights, and gives the layers that are adapted in place of these.
std::vector<std::shared_ptr<nn::LinearBase>> take_principal_part(AdaptedLayer& layer, const std::vector<std::shared_ptr<nn::LinearBase>>& parts,
                                                                 Pool& memory) {
  const Tensor weight = joined_weight(parts);
  const auto [a, b] = principal_part(weight, layer.a.size(0), layer.scale);
  layer.a.copy_(a);
  layer.b.copy_(b);
  layer.initial_a = layer.a.clone();
  layer.initial_b = layer.b.clone();
  const Tensor residual = memory.take(weight.shape());
  residual.copy_(sub(wide(weight), scale(matmul(wide(layer.b), wide(layer.a)), layer.scale)));
  std::vector<std::shared_ptr<nn::LinearBase>> out;
  std::int64_t row = 0;
  for (const auto& part : parts) {
    out.push_back(std::make_shared<nn::Linear>(slice(residual, 0, row, row + part->out_features()), part->bias()));
    out.back()->freeze();
    row += part->out_features();
  }
  return out;
}

void initialise(const AdaptedLayer& layer, const LoraConfig& config, Generator& generator) {
  const Tensor& a = layer.a;
  const auto r = static_cast<double>(a.size(0)), bound = 1 / std::sqrt(static_cast<double>(a.size(1)));
  const bool is_gaussian = config.init_lora_weights == InitLoraWeights::gaussian;
  a.copy_(is_gaussian ? normal(a.shape(), 0, 1 / r, generator, a.dtype(), a.device())
                      : uniform(a.shape(), -bound, bound, generator, a.dtype(), a.device()));
  layer.b.zero_();
}

std::map<std::string, std::shared_ptr<nn::LinearBase>> layers_of(const nn::Module& model) {
  std::map<std::string, std::shared_ptr<nn::LinearBase>> out;
  for (const auto& [name, module] : model.modules())
    if (auto layer = std::dynamic_pointer_cast<nn::LinearBase>(module)) out.emplace(name, std::move(layer));
  return out;
}

}  // namespace

std::vector<std::string> linear_layers(const nn::Module& model) {
  std::vector<std::string> out;
  for (const auto& [name, module] : model.modules()) {
    HEDDLE_CHECK(dynamic_cast<const LoraLinear*>(module.get()) == nullptr, "lora: ", name, " has an adapter already; detach it first");
    if (dynamic_cast<const nn::LinearBase*>(module.get()) != nullptr) out.push_back(name);
  }
  return out;
}

std::vector<std::string> linear_layers(const nn::TransformerConfig& config) {
  nn::TransformerConfig small = config.resolved();  // names depend on neither widths nor vocabulary
  small.vocab_size = 1;
  small.hidden_size = small.num_attention_heads = 2;
  small.num_key_value_heads = small.intermediate_size = small.max_position_embeddings = 1;
  small.head_dim = 2;
  Generator generator;
  return linear_layers(nn::CausalLM(small, {}, generator));
}

std::vector<LayerPlan> plan_layers(const std::vector<std::string>& layers, const LoraConfig& config) {
  const std::vector<Candidate> all = candidates(layers);
  for (const std::string& target : config.target_modules)
    if (std::ranges::none_of(all, [&](const Candidate& candidate) { return matches(target, candidate); })) refuse_target(target, all);
  std::vector<LayerPlan> out;
  std::vector<std::string> adapted;
  std::set<std::string> taken;
  for (const Candidate& candidate : all) {
    if (std::ranges::none_of(config.target_modules, [&](const std::string& target) { return matches(target, candidate); })) continue;
    for (const std::string& part : candidate.parts)
      if (!taken.insert(part).second)
        throw nn::BadValue(kTargetsKey, "each layer once", concat_text(part, " by itself and as part of ", kFused));
    out.push_back({candidate.parts, rank_of(config, candidate.name), alpha_of(config, candidate.name), scale_of(config, candidate.name)});
    adapted.push_back(candidate.name);
  }
  check_patterns("lora.rank_pattern", config.rank_pattern, adapted);
  check_patterns("lora.alpha_pattern", config.alpha_pattern, adapted);
  return out;
}

Adapter::Adapter(nn::Module& model, const std::vector<LayerPlan>& plan, const LoraConfig& config, Generator& generator,
                 std::optional<DType> dtype)
    : config_(config) {
  HEDDLE_CHECK(!plan.empty(), "lora: there is no layer to adapt");
  linear_layers(model);  // throws for an adapter that is attached
  const std::map<std::string, std::shared_ptr<nn::LinearBase>> found = layers_of(model);
  const auto layer = [&](const std::string& name) {
    const auto at = found.find(name);
    HEDDLE_CHECK(at != found.end(), "lora: the model has no linear layer '", name, "'");
    return at->second;
  };
  const bool is_pissa = config.init_lora_weights == InitLoraWeights::pissa;
  std::int64_t a_size = 0, b_size = 0, weight_size = 0;
  for (const LayerPlan& item : plan) {
    a_size += item.r * layer(item.names.front())->in_features();
    for (const std::string& name : item.names) {
      HEDDLE_CHECK(!is_pissa || dynamic_cast<const nn::Linear*>(layer(name).get()) != nullptr, "lora: ", name,
                   " is quantised, and init_lora_weights pissa takes weights apart; choose true or gaussian, or leave the layer unquantised");
      b_size += item.r * layer(name)->out_features();
      weight_size += layer(name)->in_features() * layer(name)->out_features();
    }
  }
  model.freeze();
  const Tensor like = layer(plan.front().names.front())->dense_weight();
  const DType factor_dtype = dtype.value_or(like.dtype());
  Pool as(a_size, factor_dtype, like.device()), bs(b_size, factor_dtype, like.device());
  Pool residuals(is_pissa ? weight_size : 0, like.dtype(), like.device());
  for (const LayerPlan& item : plan) {
    std::vector<std::shared_ptr<nn::LinearBase>> parts;
    std::int64_t rows = 0;
    for (const std::string& name : item.names) {
      parts.push_back(layer(name));
      rows += parts.back()->out_features();
    }
    AdaptedLayer out = {item.names, as.take({item.r, parts[0]->in_features()}), bs.take({rows, item.r}), {}, item.alpha, item.scale};
    std::vector<std::shared_ptr<nn::LinearBase>> residual(parts.size());
    if (is_pissa) residual = take_principal_part(out, parts, residuals);
    else initialise(out, config, generator);
    if (config.use_dora) {
      std::vector<Tensor> norms;
      for (const auto& part : parts) norms.push_back(row_norms(part->dense_weight()));
      out.magnitude = concat(norms, 0);
    }
    std::int64_t row = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::int64_t end = row + parts[i]->out_features();
      const LoraFactors factors = {.a = out.a,
                                   .b = slice(out.b, 0, row, end),
                                   .scale = item.scale,
                                   .dropout = config.lora_dropout,
                                   .magnitude = config.use_dora ? slice(out.magnitude, 0, row, end) : Tensor()};
      slots_.push_back({item.names[i], parts[i], std::make_shared<LoraLinear>(parts[i], factors, residual[i]), nullptr});
      row = end;
    }
    layers_.push_back(std::move(out));
  }
}

std::vector<nn::NamedTensor> Adapter::parameters() const {
  std::vector<nn::NamedTensor> out;
  for (const Slot& slot : slots_)
    for (const auto& [name, tensor] : slot.adapted->trainable_parameters()) {
      const auto is_same = [&](const nn::NamedTensor& seen) { return seen.tensor.impl_ptr() == tensor.impl_ptr(); };
      if (std::ranges::none_of(out, is_same)) out.push_back({slot.name + "." + name, tensor});
    }
  return out;
}

double Adapter::rate_scale(const nn::NamedTensor& parameter) const {
  return parameter.name.ends_with(".lora_A.weight") ? 1 : config_.loraplus_lr_ratio;
}

void Adapter::check_slots(const nn::Module& model, bool may_be_merged) const {
  const std::map<std::string, std::shared_ptr<nn::LinearBase>> found = layers_of(model);
  for (const Slot& slot : slots_) {
    const auto at = found.find(slot.name);
    const bool is_mine = at != found.end() && (at->second == slot.own || at->second == slot.adapted || (may_be_merged && at->second == slot.merged));
    HEDDLE_CHECK(is_mine, "lora: '", slot.name, "' of this model is not the layer the adapter was made for; detach what is attached or merged there");
  }
}

void Adapter::check_base(const nn::Module& model) const { check_slots(model, /*may_be_merged=*/false); }

void Adapter::fill_slots(nn::Module& model, std::shared_ptr<nn::LinearBase> (*choose)(const Slot&)) const {
  check_slots(model, /*may_be_merged=*/true);
  for (const Slot& slot : slots_) model.replace_child(slot.name, choose(slot));
}

std::vector<std::string> Adapter::zero_layers() const {
  std::vector<Tensor> largest;  // of the rows' norms, one a layer
  for (const Slot& slot : slots_) largest.push_back(max(row_norms(slot.own->dense_weight()), 0, /*keepdim=*/true));
  const std::vector<double> values = concat(largest, 0).to_doubles();
  std::vector<std::string> out;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] == 0) out.push_back(slots_[i].name);
  return out;
}

void Adapter::attach(nn::Module& model) const {
  fill_slots(model, [](const Slot& slot) -> std::shared_ptr<nn::LinearBase> { return slot.adapted; });
}

void Adapter::detach(nn::Module& model) const {
  fill_slots(model, [](const Slot& slot) { return slot.own; });
}

void Adapter::merge(nn::Module& model, Quantised quantised) {
  for (const Slot& slot : slots_)
    HEDDLE_CHECK(quantised == Quantised::decoded || dynamic_cast<const nn::Linear*>(slot.own.get()) != nullptr, "lora: ", slot.name,
                 " is quantised; merging would decode it to ", slot.own->dense_weight().dtype(),
                 ": ask for that, or keep the adapter beside it");
  detach(model);  // whatever an earlier merge put there
  for (Slot& slot : slots_) slot.merged = slot.adapted->merged();
  fill_slots(model, [](const Slot& slot) -> std::shared_ptr<nn::LinearBase> { return slot.merged; });
}

}  // namespace heddle::lora
