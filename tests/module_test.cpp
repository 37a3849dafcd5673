#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "nn/checkpoint.h"
#include "nn/safetensors.h"
#include "nn/transformer.h"
#include "tests/support/pytorch.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"

// Each module's result and gradients against the float64 numbers of PyTorch in data/modules.safetensors (layout:
// data/README.md), and the module tree.

namespace heddle::nn {
namespace {

using test::expect_near_pytorch;

struct Case {
  std::string name;
  std::function<std::shared_ptr<Module>(const ModuleOptions&, Generator&)> make;
  std::function<Tensor(const Module&, const Tensor&)> run;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

template <typename T>
Case make_case(std::string name, std::function<std::shared_ptr<T>(const ModuleOptions&, Generator&)> make) {
  return {std::move(name), make,
          [](const Module& module, const Tensor& x) { return dynamic_cast<const T&>(module).forward(x); }};
}

Case attention_case(std::string name, MultiHeadAttentionConfig config) {
  config.hidden_size = 48;
  config.num_heads = 6;
  config.head_dim = 8;
  return {std::move(name),
          [config](const ModuleOptions& options, Generator& generator) {
            return std::make_shared<MultiHeadAttention>(config, options, generator);
          },
          [](const Module& module, const Tensor& x) { return dynamic_cast<const MultiHeadAttention&>(module).forward(x); }};
}

const std::vector<Case>& cases() {
  static const auto linear = [](bool bias) {
    return [bias](const ModuleOptions& options, Generator& generator) {
      return std::make_shared<Linear>(LinearConfig{12, 7, bias}, options, generator);
    };
  };
  static const auto mlp = [](bool is_gated) {
    const MlpConfig config = {.hidden_size = 12,
                              .intermediate_size = 20,
                              .activation = is_gated ? Activation::silu : Activation::gelu_tanh,
                              .is_gated = is_gated,
                              .has_bias = !is_gated};
    return [config](const ModuleOptions& options, Generator& generator) {
      return std::make_shared<Mlp>(config, options, generator);
    };
  };
  static const std::vector<Case> all = {
      make_case<Linear>("linear", linear(true)),
      make_case<Linear>("linear_no_bias", linear(false)),
      make_case<Embedding>("embedding",
                           [](const ModuleOptions& options, Generator& generator) {
                             return std::make_shared<Embedding>(9, 12, 0.02, options, generator);
                           }),
      make_case<LayerNorm>("layer_norm",
                           [](const ModuleOptions& options, Generator&) { return std::make_shared<LayerNorm>(12, 1e-5, options); }),
      make_case<RMSNorm>("rms_norm",
                         [](const ModuleOptions& options, Generator&) { return std::make_shared<RMSNorm>(12, 1e-6, options); }),
      make_case<Mlp>("mlp_gelu", mlp(false)),
      make_case<Mlp>("mlp_swiglu", mlp(true)),
      attention_case("mha", {.num_kv_heads = 6, .has_bias = true}),
      attention_case("mha_gqa_rope", {.num_kv_heads = 2, .rope_theta = 10000.0}),
      attention_case("mha_qk_norm", {.num_kv_heads = 2, .rope_theta = 10000.0, .qk_norm = true}),
      attention_case("mha_full", {.num_kv_heads = 2, .has_bias = true, .is_causal = false}),
  };
  return all;
}

const SafetensorsFile& reference() {
  static const SafetensorsFile file(HEDDLE_SOURCE_DIR "/tests/data/modules.safetensors");
  return file;
}

// The longest path, attention backward with q/k norms, is five sums of at most 48 terms one after another: 240 roundings
// of half an epsilon each, of values not above the largest one expected, or 1.
constexpr double kEpsilons = 120;

class ModuleParity : public testing::TestWithParam<std::tuple<Case, DType>> {};

TEST_P(ModuleParity, ResultAndGradientsEqualPyTorch) {
  const auto& [c, dtype] = GetParam();
  const double epsilon = dtype == DType::f64 ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const auto stored = [&](const std::string& key) { return reference().read(c.name + "/" + key); };
  Generator generator{.seed = 1};
  const auto module = c.make({.dtype = dtype}, generator);
  for (const auto& [name, tensor] : module->parameters()) {
    const NoGradGuard no_grad;
    tensor.copy_(stored("weight/" + name));
  }
  Tensor x = stored("x");
  if (is_floating(x.dtype())) x = cast(x, dtype).set_requires_grad(true);

  const Tensor y = c.run(*module, x);
  y.backward(cast(stored("dy"), dtype));

  expect_near_pytorch(y, stored("y"), kEpsilons * epsilon, "y");
  if (x.requires_grad()) expect_near_pytorch(x.grad(), stored("dx"), kEpsilons * epsilon, "dx");
  for (const auto& [name, tensor] : module->parameters()) expect_near_pytorch(tensor.grad(), stored("grad/" + name), kEpsilons * epsilon, name);
}

INSTANTIATE_TEST_SUITE_P(Modules, ModuleParity,
                         testing::Combine(testing::ValuesIn(cases()), testing::Values(DType::f32, DType::f64)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + (std::get<1>(info.param) == DType::f64 ? "_f64" : "_f32");
                         });

TransformerConfig small_config(Architecture architecture) {
  TransformerConfig config;
  config.architecture = architecture;
  config.vocab_size = 11;
  config.hidden_size = 12;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 3;
  config.num_key_value_heads = 1;
  config.intermediate_size = 20;
  config.max_position_embeddings = 8;
  return config;
}

std::set<std::string> parameter_names(const Module& module) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : module.parameters()) names.insert(name);
  return names;
}

TEST(CausalLM, ParametersCarryHuggingFaceNames) {
  Generator generator{.seed = 1};
  const CausalLM llama(small_config(Architecture::llama), {}, generator);

  const auto names = parameter_names(llama);

  for (const char* name : {"model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight",
                           "model.layers.0.mlp.gate_proj.weight", "model.layers.1.post_attention_layernorm.weight",
                           "model.norm.weight", "lm_head.weight"})
    EXPECT_TRUE(names.count(name)) << name;
  EXPECT_EQ(names.size(), 3u + 2 * 9);
}

TEST(CausalLM, TiedHeadIsOneParameterThatGathersBothGradients) {
  Generator generator{.seed = 1};
  const CausalLM model(small_config(Architecture::gpt2), {.dtype = DType::f64}, generator);
  EXPECT_EQ(parameter_names(model).count("lm_head.weight"), 0u);
  const Tensor ids = Tensor::from_vector<std::int64_t>({3, 4}, {1, 2});

  sum(pow(model.forward(ids), 2.0)).backward();

  // Row 7 is not looked up, so only the head reaches it; row 3 is reached by both.
  const Tensor grad = model.parameters()[0].tensor.grad();
  EXPECT_NE(slice(grad, 0, 7, 8).to_doubles()[0], 0.0);
  EXPECT_NE(slice(grad, 0, 3, 4).to_doubles()[0], 0.0);
}

TEST(CausalLM, LaterTokensNeverReachEarlierLogits) {
  for (const Architecture architecture : {Architecture::gpt2, Architecture::llama}) {
    Generator generator{.seed = 2};
    const CausalLM model(small_config(architecture), {.dtype = DType::f64}, generator);

    const Tensor a = model.forward(Tensor::from_vector<std::int64_t>({1, 2, 3, 4}, {1, 4}));
    const Tensor b = model.forward(Tensor::from_vector<std::int64_t>({1, 2, 9, 5}, {1, 4}));

    EXPECT_EQ(slice(a, 1, 0, 2).to_doubles(), slice(b, 1, 0, 2).to_doubles());
    EXPECT_NE(slice(a, 1, 2, 3).to_doubles(), slice(b, 1, 2, 3).to_doubles());
  }
}

TEST(CausalLM, ResidualProjectionsStartSmallerByTheRootOfTwiceTheLayers) {
  TransformerConfig config = small_config(Architecture::gpt2);
  config.hidden_size = 96;
  config.intermediate_size = 384;
  Generator generator{.seed = 3};
  const CausalLM model(config, {}, generator);

  for (const auto& [name, tensor] : model.parameters()) {
    if (name.find("mlp") == std::string::npos || tensor.rank() != 2) continue;
    double square = 0.0;
    for (double value : tensor.to_doubles()) square += value * value;
    const double deviation = std::sqrt(square / static_cast<double>(tensor.numel()));
    const double expected = name.find("down_proj") == std::string::npos ? 0.02 : 0.02 / std::sqrt(4.0);
    // 36,864 draws: the sample deviation is within 5 / sqrt(2 * 36864) = 1.8 % but for one in a million.
    EXPECT_NEAR(deviation, expected, 0.018 * expected) << name;
  }
}

TEST(Module, FreezeLeavesNothingTrainableAndTrainDoesNotUndoIt) {
  Generator generator{.seed = 1};
  CausalLM model(small_config(Architecture::llama), {}, generator);
  EXPECT_EQ(model.trainable_parameters().size(), model.parameters().size());

  model.freeze();
  model.eval();
  model.train();

  EXPECT_TRUE(model.trainable_parameters().empty());
}

TEST(Module, ReplaceChildSwapsAProjectionAndRefusesWrongNamesAndKinds) {
  Generator generator{.seed = 1};
  CausalLM model(small_config(Architecture::llama), {}, generator);
  const auto other = std::make_shared<Linear>(LinearConfig{12, 12, true}, ModuleOptions{}, generator);

  model.replace_child("model.layers.1.self_attn.q_proj", other);

  EXPECT_TRUE(parameter_names(model).count("model.layers.1.self_attn.q_proj.bias"));
  const auto message = [&](const std::string& name, const std::shared_ptr<Module>& module) -> std::string {
    try {
      model.replace_child(name, module);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message("model.layers.1.self_attn.q", other), "replace_child: there is no child named 'q'");
  EXPECT_EQ(message("model.layers.1.mlp", other), "replace_child: the slot 'mlp' takes another kind of module");
}

class LayerWithState final : public LinearBase {
 public:
  LayerWithState() { register_state("seen", seen); }
  Tensor forward(const Tensor& x, Generator*) const override { return x; }
  std::int64_t in_features() const override { return 0; }
  std::int64_t out_features() const override { return 0; }
  Tensor dense_weight() const override { return {}; }
  const Tensor& bias() const override { return none; }

  Tensor seen = Tensor::zeros({2}), none;
};

TEST(Module, TrainingStateIsInCheckpointsAndNoParameter) {
  const test::TempFolder folder;
  CausalLM model = test::tiny_model(test::tiny_config());
  const auto layer = std::make_shared<LayerWithState>();
  model.replace_child("model.layers.1.mlp.up_proj", layer);
  layer->seen.fill_(3);
  const AdamW optimizer(model.trainable_parameters(), {});
  const auto saved = save_checkpoint(folder.path(), model, optimizer, {.step = 1}, "train: {}\n");
  layer->seen.fill_(5);

  load_checkpoint(saved, model, optimizer);

  EXPECT_EQ(layer->seen.to_doubles(), (std::vector<double>{3, 3}));
  ASSERT_EQ(model.training_state().size(), 1u);
  EXPECT_EQ(model.training_state()[0].name, "model.layers.1.mlp.up_proj.seen");
  for (const NamedTensor& parameter : model.parameters()) EXPECT_EQ(parameter.name.find("layers.1.mlp.up_proj"), std::string::npos);
}

TEST(CausalLM, SequenceLongerThanItsPositionsIsRefused) {
  Generator generator{.seed = 1};
  const CausalLM model(small_config(Architecture::gpt2), {}, generator);

  EXPECT_THROW(
      try { model.forward(Tensor::zeros({1, 9}, DType::i64)); } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "causal_lm: ids must be [B, S] with S in 1..8, got [1, 9]");
        throw;
      },
      Error);
}

TEST(CausalLM, DropoutNeedsAGeneratorInTrainingAndIsOffInEvaluation) {
  TransformerConfig config = small_config(Architecture::gpt2);
  config.resid_pdrop = 0.5;
  Generator generator{.seed = 1}, masks{.seed = 2};
  CausalLM model(config, {}, generator);
  const Tensor ids = Tensor::from_vector<std::int64_t>({1, 2, 3}, {1, 3});

  EXPECT_THROW(model.forward(ids), Error);
  EXPECT_NE(model.forward(ids, &masks).to_doubles(), model.forward(ids, &masks).to_doubles());
  model.eval();
  EXPECT_EQ(model.forward(ids, &masks).to_doubles(), model.forward(ids).to_doubles());
}

}  // namespace
}  // namespace heddle::nn
