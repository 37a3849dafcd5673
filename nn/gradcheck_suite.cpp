#include "nn/gradcheck_suite.h"

#include <memory>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "nn/transformer.h"

namespace heddle::nn {
namespace {

constexpr ModuleOptions kDouble{.dtype = DType::f64};
const Shape kActivations{2, 5, 12};  // [B, S, C] of the modules that map activations

// Weights large enough that every gradient is far above the checker's floor; biases away from 0 and norms away from 1.
void randomise(const Module& module, Generator& generator) {
  const NoGradGuard no_grad;
  for (const NamedTensor& parameter : module.parameters())
    parameter.tensor.copy_(normal(parameter.tensor.shape(), 0.0, 0.3, generator, DType::f64));
}

// Checks fn(x) with respect to x, unless undefined, and every parameter of `module`.
GradcheckResult check_module(const Module& module, const Tensor& x, const std::function<Tensor(const Tensor&)>& fn,
                             Generator& generator) {
  randomise(module, generator);
  std::vector<Tensor> leaves;
  if (x.requires_grad()) leaves.push_back(x);
  for (const NamedTensor& parameter : module.parameters()) leaves.push_back(parameter.tensor);
  return gradcheck([&](const std::vector<Tensor>&) { return fn(x); }, leaves);
}

// A module that maps activations [2, 5, 12], made by `make(generator)`.
template <typename Make>
GradcheckCase activation_case(const char* name, const std::string& variant, const Make& make) {
  return {name, "", concat_text(kActivations, ", ", variant), [make] {
            Generator generator{.seed = 5};
            const auto module = make(generator);
            const Tensor x = normal(kActivations, 0.0, 1.0, generator, DType::f64).set_requires_grad(true);
            return check_module(*module, x, [&](const Tensor& in) { return module->forward(in); }, generator);
          }};
}

MultiHeadAttentionConfig attention_config() {
  return {.hidden_size = 12, .num_heads = 6, .num_kv_heads = 2, .head_dim = 4, .has_bias = true};
}

TransformerConfig model_config(Architecture architecture) {
  TransformerConfig config{.architecture = architecture, .vocab_size = 7};
  config.hidden_size = kActivations[2];
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 2;
  config.intermediate_size = 7;
  config.max_position_embeddings = 6;
  return config;
}

GradcheckCase block_case(Architecture architecture, const char* variant) {
  return {"TransformerBlock", "", concat_text(kActivations, ", ", variant), [architecture] {
            Generator generator{.seed = 5};
            const TransformerBlock block(model_config(architecture), "auto", kDouble, generator);
            const Tensor x = normal(kActivations, 0.0, 1.0, generator, DType::f64).set_requires_grad(true);
            const ForwardState state{.positions = position_ids(0, kActivations[1], kCpu)};
            return check_module(block, x, [&](const Tensor& in) {
              Residual stream = {in};
              block.forward(stream, state);
              return add(stream.x, stream.branch);
            }, generator);
          }};
}

GradcheckCase model_case(Architecture architecture, const char* variant) {
  return {"CausalLM", "", concat_text("ids [2, 3], loss, ", variant), [architecture] {
            Generator generator{.seed = 5};
            const CausalLM model(model_config(architecture), kDouble, generator);
            const Tensor ids = Tensor::from_vector<std::int64_t>({4, 0, 4, 2, 6, 1}, {2, 3});
            const Tensor labels = Tensor::from_vector<std::int64_t>({0, 4, -100, 6, 1, 3}, {2, 3});
            return check_module(model, ids, [&](const Tensor& in) { return cross_entropy(model.forward(in), labels); }, generator);
          }};
}

std::vector<GradcheckCase> layer_cases() {
  const auto linear = [](Generator& g) {
    return std::make_unique<Linear>(LinearConfig{.in_features = 12, .out_features = 7, .bias = true}, kDouble, g);
  };
  const auto mlp = [](bool is_gated, Activation activation) {
    return [=](Generator& g) {
      const MlpConfig config{.hidden_size = 12, .intermediate_size = 10, .activation = activation, .is_gated = is_gated, .has_bias = true};
      return std::make_unique<Mlp>(config, kDouble, g);
    };
  };
  const auto attention = [](bool rotary, bool qk_norm) {
    return [=](Generator& g) {
      MultiHeadAttentionConfig config = attention_config();
      if (rotary) config.rope_theta = 10000.0;
      config.qk_norm = qk_norm;
      return std::make_unique<MultiHeadAttention>(config, kDouble, g);
    };
  };
  return {
      activation_case("Linear", "bias", linear),
      activation_case("LayerNorm", "", [](Generator&) { return std::make_unique<LayerNorm>(12, 1e-5, kDouble); }),
      activation_case("RMSNorm", "", [](Generator&) { return std::make_unique<RMSNorm>(12, 1e-6, kDouble); }),
      activation_case("Mlp", "gelu", mlp(false, Activation::gelu)),
      activation_case("Mlp", "gelu_tanh", mlp(false, Activation::gelu_tanh)),
      activation_case("Mlp", "SwiGLU", mlp(true, Activation::silu)),
      activation_case("MultiHeadAttention", "6 query and 2 key heads", attention(false, false)),
      activation_case("MultiHeadAttention", "rotary, q/k norms", attention(true, true)),
  };
}

GradcheckCase embedding_case() {
  return {"Embedding", "", "ids [2, 3]", [] {
            Generator generator{.seed = 5};
            const Embedding module(7, 4, 0.02, kDouble, generator);
            const Tensor ids = Tensor::from_vector<std::int64_t>({4, 0, 4, 2, 6, 1}, {2, 3});
            return check_module(module, ids, [&](const Tensor& in) { return module.forward(in); }, generator);
          }};
}

}  // namespace

std::vector<GradcheckCase> module_gradcheck_cases() {
  std::vector<GradcheckCase> cases = layer_cases();
  cases.push_back(embedding_case());
  cases.push_back(block_case(Architecture::gpt2, "gpt2"));
  cases.push_back(block_case(Architecture::llama, "llama"));
  cases.push_back(model_case(Architecture::gpt2, "gpt2"));
  cases.push_back(model_case(Architecture::llama, "llama"));
  return cases;
}

std::vector<GradcheckCase> gradcheck_cases() {
  std::vector<GradcheckCase> cases = op_gradcheck_cases();
  for (GradcheckCase& module : module_gradcheck_cases()) cases.push_back(std::move(module));
  return cases;
}

}  // namespace heddle::nn
