#include "quant/fp8_training.h"

#include <map>
#include <memory>
#include <vector>

#include "quant/fp8_linear.h"

namespace heddle::quant {
namespace {

constexpr std::int64_t kMultiple = 16;
constexpr std::int64_t kWideBlocks = 2;  // the first and the last, whose errors cost most

// The slots of a block whose layers share an input.
std::vector<std::vector<std::string>> shared_inputs(const nn::TransformerConfig& model) {
  std::vector<std::vector<std::string>> out;
  // The norms of queries and keys want dense heads, not columns of a wider matrix.
  if (model.qk_norm) out = {{"self_attn.q_proj"}, {"self_attn.k_proj"}, {"self_attn.v_proj"}};
  else out = {{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}};
  out.push_back({"self_attn.o_proj"});
  if (model.is_llama()) out.push_back({"mlp.gate_proj", "mlp.up_proj"});
  else out.push_back({"mlp.up_proj"});
  out.push_back({"mlp.down_proj"});
  return out;
}

}  // namespace

std::string fp8_obstacle(const nn::TransformerConfig& model, Device device) {
  if (const DeviceSupport support = fp8_support(device); !support.ok) return support.reason;
  if (model.num_hidden_layers <= kWideBlocks)
    return concat_text("the first and the last block stay in bfloat16, and model.num_hidden_layers is ", model.num_hidden_layers);
  const std::pair<const char*, std::int64_t> sizes[] = {{"model.hidden_size", model.hidden_size},
                                                        {"model.intermediate_size", model.ffn_size()},
                                                        {"the width of all heads", model.num_attention_heads * model.head_size()},
                                                        {"the width of all key heads", model.kv_heads() * model.head_size()}};
  for (const auto& [name, size] : sizes)
    if (size % kMultiple != 0) return concat_text("FP8 products need multiples of ", kMultiple, ", and ", name, " is ", size);
  return {};
}

std::int64_t use_fp8(nn::CausalLM& model, std::int64_t history) {
  const std::string obstacle = fp8_obstacle(model.config(), model.device());
  HEDDLE_CHECK(obstacle.empty(), "fp8: ", obstacle);
  std::map<std::string, std::shared_ptr<nn::Module>> modules;
  for (const auto& [name, module] : model.modules()) modules[name] = module;
  std::int64_t count = 0;
  for (std::int64_t block = 1; block + 1 < model.config().num_hidden_layers; ++block)
    for (const std::vector<std::string>& slots : shared_inputs(model.config())) {
      std::vector<std::string> names;
      std::vector<Tensor> weights, biases;
      for (const std::string& slot : slots) {
        names.push_back(concat_text("model.layers.", block, ".", slot));
        const auto layer = std::dynamic_pointer_cast<nn::Linear>(modules.at(names.back()));
        HEDDLE_CHECK(layer != nullptr, "fp8: '", names.back(), "' is quantised or has an adapter; only plain layers are trained in FP8");
        weights.push_back(layer->weight());
        biases.push_back(layer->bias());
      }
      const auto projections = std::make_shared<Fp8Projections>(weights, biases, history);
      for (std::size_t i = 0; i < names.size(); ++i, ++count) model.replace_child(names[i], std::make_shared<Fp8Linear>(projections, i));
    }
  return count;
}

std::string describe_fp8(const nn::TransformerConfig& model, const nn::TrainConfig& train) {
  const std::int64_t blocks = model.num_hidden_layers - kWideBlocks;
  std::size_t layers = 0;
  for (const auto& slots : shared_inputs(model)) layers += slots.size();
  return concat_text("FP8 in ", blocks * static_cast<std::int64_t>(layers), " linear layers, those of blocks 2 to ", blocks + 1, " of ",
                     model.num_hidden_layers, ": values E4M3, gradients E5M2, ",
                     train.fp8_scaling == nn::Fp8Scaling::current ? std::string("current scaling")
                                                                  : concat_text("delayed scaling over ", train.fp8_history, " steps"),
                     "; all else bfloat16");
}

}  // namespace heddle::quant
