#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "autograd/grad_mode.h"
#include "autograd/node.h"
#include "autograd/ops.h"
#include "kernels/runtime/allocator.h"
#include "nn/transformer.h"
#include "tests/support/adapters.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace heddle::lora {
namespace {

using test::adapt, test::randomise, test::expect_gradients, test::CodedLinear;
using test::all_close, test::all_equal, test::error_of;
using test::random_leaf, test::random_tensor, test::tiny_config, test::tiny_model;

const std::vector<double> kIds = {1, 4, 2, 10, 0, 3, 3, 7, 5, 9};

Tensor ids() { return cast(Tensor::from_vector(kIds, {2, 5}), DType::i64); }

// Attention with adapters on some of its projections: a plain 6 query and 2 key heads, so that q, k and v differ in size.
struct AdaptedAttention {
  explicit AdaptedAttention(const std::vector<std::string>& targets, bool qk_norm = false) {
    Generator generator{.seed = 5};
    const nn::MultiHeadAttentionConfig config{
        .hidden_size = 12, .num_heads = 6, .num_kv_heads = 2, .head_dim = 4, .has_bias = true, .qk_norm = qk_norm, .initializer_range = 0.3, .output_range = 0.3};
    layer = std::make_shared<nn::MultiHeadAttention>(config, nn::ModuleOptions{.dtype = DType::f64}, generator);
    const LoraConfig lora{.r = 2, .lora_alpha = 3, .target_modules = targets};
    std::vector<LayerPlan> plan = plan_layers(linear_layers(*layer), lora);
    plan.back().r = 3;  // one rank that differs
    adapter.emplace(*layer, plan, lora, generator);
    randomise(*adapter);
    adapter->attach(*layer);
  }
  std::shared_ptr<nn::MultiHeadAttention> layer;
  std::optional<Adapter> adapter;
};

TEST(Adapter, GradientsOfAttentionAgreeWithFiniteDifferences) {
  for (const bool qk_norm : {false, true})
    for (const std::vector<std::string>& targets : {std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "v_proj"}, {"k_proj"}}) {
      if (qk_norm && targets.size() == 2) continue;
      const AdaptedAttention c(targets, qk_norm);
      const Tensor x = random_leaf({2, 5, 12}, 6);
      std::vector<Tensor> leaves = {x};
      for (const auto& [name, tensor] : c.adapter->parameters()) leaves.push_back(tensor);

      expect_gradients([&] { return c.layer->forward(x); }, leaves);
    }
}

TEST(Adapter, GradientsOfOneLayerForQueriesKeysAndValuesAgreeWithFiniteDifferences) {
  const AdaptedAttention c({"c_attn"}, false);
  const Tensor x = random_leaf({2, 5, 12}, 6);
  std::vector<Tensor> leaves = {x};
  for (const auto& [name, tensor] : c.adapter->parameters()) leaves.push_back(tensor);

  EXPECT_EQ(leaves.size(), 1u + 1 + 3);  // x, one A, three B
  expect_gradients([&] { return c.layer->forward(x); }, leaves);
}

// --- Fresh adapters ---
std::vector<nn::TransformerConfig> both_architectures() {
  return {tiny_config(nn::Architecture::gpt2), tiny_config(nn::Architecture::llama)};
}

// Adapters that start as nothing, of which every kind of layer has one.
std::vector<LoraConfig> fresh_kinds() {
  std::vector<LoraConfig> out;
  for (const std::vector<std::string>& targets : {std::vector<std::string>{"all-linear"}, {"c_attn", "o_proj"}, {"k_proj"}})
    for (const bool use_dora : {false, true}) {
      out.push_back({.r = 4, .target_modules = targets, .use_dora = use_dora});
      out.push_back({.r = 4, .lora_dropout = 0.5, .target_modules = targets, .init_lora_weights = InitLoraWeights::gaussian, .use_dora = use_dora});
    }
  return out;
}

// Biases start at zero, which would hide a bias taken off and added again.
void randomise_biases(const nn::CausalLM& model) {
  const NoGradGuard no_grad;
  Generator generator{3};
  for (const auto& [name, tensor] : model.parameters())
    if (name.ends_with(".bias")) tensor.copy_(normal(tensor.shape(), 0, 0.5, generator, tensor.dtype()));
}

TEST(Adapter, FreshOneLeavesTheModelsOutputBitForBit) {
  std::vector<nn::TransformerConfig> configs = both_architectures();
  configs.push_back(configs.back());
  configs.back().qk_norm = true;
  for (const nn::TransformerConfig& config : configs)
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      nn::CausalLM model = tiny_model(config, 1, dtype);
      randomise_biases(model);
      const std::vector<double> before = model.forward(ids()).to_doubles();
      for (const LoraConfig& lora : fresh_kinds()) {
        const Adapter adapter = adapt(model, lora);
        Generator dropout{4};
        adapter.attach(model);

        EXPECT_TRUE(all_equal(model.forward(ids(), &dropout), before)) << dtype << lora.use_dora << lora.target_modules[0];
        adapter.detach(model);
      }
    }
}

TEST(Adapter, FirstStepReachesBAndNotA) {
  nn::CausalLM model = tiny_model(tiny_config());
  const Adapter adapter = adapt(model, {.r = 4});
  adapter.attach(model);

  sum(model.forward(ids())).backward();

  for (const auto& [name, tensor] : adapter.parameters()) {
    double largest = 0;
    for (const double value : tensor.grad().to_doubles()) largest = std::max(largest, std::abs(value));
    EXPECT_EQ(largest > 0, name.ends_with("lora_B.weight")) << name;
  }
}

TEST(Adapter, KaimingFillsItsIntervalAndGaussianHasItsDeviation) {
  nn::CausalLM model = tiny_model(tiny_config());
  double largest = 0, squares = 0;
  const LoraConfig kaiming{.r = 50, .target_modules = {"q_proj"}}, gaussian{.r = 50, .target_modules = {"q_proj"}, .init_lora_weights = InitLoraWeights::gaussian};

  for (const double value : adapt(model, kaiming).layers()[0].a.to_doubles()) largest = std::max(largest, std::abs(value));
  const std::vector<double> drawn = adapt(model, gaussian).layers()[0].a.to_doubles();
  for (const double value : drawn) squares += value * value;

  // 600 draws: the largest of |u| misses the bound by more than 3 % with probability 0.97^600 = 1e-8, and the deviation of the estimate
  // of a standard deviation from n draws is 1/sqrt(2n) = 3 %.
  EXPECT_LE(largest, 1 / std::sqrt(12.0));
  EXPECT_GT(largest, 0.97 / std::sqrt(12.0));
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(drawn.size())), 1.0 / 50, 0.15 / 50);
}

TEST(Adapter, PissaStartsAsTheBaseAndAdaptsWhatIsLeftOfIt) {
  for (const std::vector<std::string>& targets : {std::vector<std::string>{"all-linear"}, {"c_attn"}}) {
    nn::CausalLM model = tiny_model(tiny_config(), 1, DType::f64);
    const std::vector<double> before = model.forward(ids()).to_doubles();
    Adapter adapter = adapt(model, {.r = 3, .lora_alpha = 5, .target_modules = targets, .init_lora_weights = InitLoraWeights::pissa});
    adapter.attach(model);

    EXPECT_TRUE(all_close(model.forward(ids()), before, 1e-12));
    EXPECT_NE(adapter.layers()[0].b.to_doubles(), std::vector<double>(adapter.layers()[0].b.numel(), 0.0));
    EXPECT_EQ(model.trainable_parameters().size(), adapter.parameters().size());
    randomise(adapter);
    const std::vector<double> changed = model.forward(ids()).to_doubles();
    EXPECT_NE(changed, before);
    adapter.merge(model);
    EXPECT_TRUE(all_close(model.forward(ids()), changed, 1e-12));
    adapter.detach(model);
    EXPECT_TRUE(all_equal(model.forward(ids()), before));
  }
}

// --- What is trained ---
TEST(Adapter, EverythingButItsOwnIsFrozenAndModesDoNotChangeThat) {
  nn::CausalLM model = tiny_model(tiny_config(nn::Architecture::llama));
  const Adapter adapter = adapt(model, {.r = 2, .use_dora = true});
  adapter.attach(model);
  const auto names = [](const std::vector<nn::NamedTensor>& tensors) {
    std::vector<std::string> out;
    for (const auto& named : tensors) out.push_back(named.name);
    return out;
  };
  const std::vector<std::string> expected = names(adapter.parameters());

  EXPECT_EQ(expected.size(), 2u * 4 * 3);
  EXPECT_EQ(names(model.trainable_parameters()), expected);
  model.eval();
  EXPECT_EQ(names(model.trainable_parameters()), expected);
  model.train();
  EXPECT_EQ(names(model.trainable_parameters()), expected);
}

// The leaves that the graph of a loss sends gradients to, each once: one product (or sum) of a backward each.
std::size_t count_leaves(const Tensor& loss) {
  std::set<const Node*> seen;
  std::vector<std::shared_ptr<Node>> stack = {loss.gradient_edge().node};
  std::size_t leaves = 0;
  while (!stack.empty()) {
    const std::shared_ptr<Node> node = stack.back();
    stack.pop_back();
    if (!seen.insert(node.get()).second) continue;
    leaves += dynamic_cast<const AccumulateGrad*>(node.get()) != nullptr;
    for (const Edge& edge : node->edges())
      if (edge) stack.push_back(edge.node);
  }
  return leaves;
}

TEST(Adapter, NoWeightGradientOfTheFrozenBaseIsComputedOrKept) {
  for (const nn::TransformerConfig& config : both_architectures()) {
    nn::CausalLM model = tiny_model(config);
    const Adapter adapter = adapt(model, {.r = 2});
    adapter.attach(model);

    const Tensor loss = sum(model.forward(ids()));
    const std::size_t leaves = count_leaves(loss);
    loss.backward();

    EXPECT_EQ(leaves, adapter.parameters().size());
    for (const auto& [name, tensor] : model.parameters()) EXPECT_EQ(tensor.grad().defined(), name.find("lora_") != std::string::npos) << name;
  }
}

// Bytes a backward needs at most above what was there before the forward.
std::int64_t peak_of_step(const nn::CausalLM& model, const Tensor& tokens) {
  const std::int64_t before = memory_stats(kCpu).current_bytes;
  reset_peak_memory(kCpu);
  sum(model.forward(tokens)).backward();
  return memory_stats(kCpu).peak_bytes - before;
}

TEST(Adapter, StepNeedsNoMemoryForTheFrozenBasesGradients) {
  nn::TransformerConfig config = tiny_config();
  config.hidden_size = 240;  // 5.5 MB of weights; the activations of ten tokens and a product's scratch memory are under 2 MB
  config.intermediate_size = 960;
  nn::CausalLM model = tiny_model(config);
  std::int64_t weights = 0;
  for (const auto& [name, tensor] : model.parameters()) weights += tensor.nbytes();
  const std::int64_t full = peak_of_step(model, ids());

  adapt(model, {.r = 1}).attach(model);
  const std::int64_t adapted = peak_of_step(model, ids());

  EXPECT_GT(full, weights);
  EXPECT_LT(adapted, weights / 2);
}

TEST(Adapter, FrozenProjectionsKeepNoInputs) {
  nn::TransformerConfig config = tiny_config();
  nn::CausalLM model = tiny_model(config);
  const Tensor many = Tensor::zeros({16, 9}, DType::i64);
  const auto kept = [&] {
    const std::int64_t before = memory_stats(kCpu).current_bytes;
    const Tensor out = model.forward(many);
    return memory_stats(kCpu).current_bytes - before;
  };
  const std::int64_t full = kept();
  adapt(model, {.r = 1, .target_modules = {"o_proj"}}).attach(model);

  // The second layer's projections and MLP, the first's MLP: at least two inputs of width 12 and two of width 20 stay away, in float32.
  EXPECT_LT(kept(), full - 16 * 9 * (2 * 12 + 2 * 20) * 4 + 16 * 9 * 2 * 4);
}

// --- Fused and partial projections (queries 12, keys and values 4 wide) ---
TEST(Adapter, EverySubsetOfTheProjectionsMergesToWhatItComputes) {
  const std::vector<std::string> all = {"q_proj", "k_proj", "v_proj"};
  for (int mask = 1; mask < 8; ++mask) {
    std::vector<std::string> targets;
    for (int i = 0; i < 3; ++i)
      if ((mask >> i) & 1) targets.push_back(all[static_cast<std::size_t>(i)]);
    nn::CausalLM model = tiny_model(tiny_config(nn::Architecture::llama), 1, DType::f64);
    std::map<std::string, std::vector<double>> before;
    for (const auto& [name, tensor] : model.parameters()) before[name] = tensor.to_doubles();
    Adapter adapter = adapt(model, {.r = 4, .target_modules = targets});
    randomise(adapter);
    adapter.attach(model);
    const std::vector<double> unmerged = model.forward(ids()).to_doubles();

    adapter.merge(model);

    EXPECT_TRUE(all_close(model.forward(ids()), unmerged, 1e-12)) << mask;
    for (const auto& [name, tensor] : model.parameters()) {
      const bool is_target = std::ranges::any_of(targets, [&](const std::string& target) { return name.find(target) != std::string::npos; });
      EXPECT_EQ(tensor.to_doubles() != before.at(name), is_target) << name;
    }
  }
}

TEST(Adapter, JoinedAndSeparateProjectionsAgree) {
  const AdaptedAttention joined({"q_proj", "k_proj", "v_proj"});
  const Tensor x = random_tensor({2, 5, 12}, DType::f64, 6);
  const auto slot = [&](const char* name) {
    for (const auto& [found, module] : joined.layer->modules())
      if (found == name) return std::dynamic_pointer_cast<LoraLinear>(module);
    return std::shared_ptr<LoraLinear>();
  };
  const std::vector<Tensor> together = nn::forward_all({slot("q_proj").get(), slot("k_proj").get(), slot("v_proj").get()}, x);

  std::size_t i = 0;
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) EXPECT_TRUE(all_close(together[i++], slot(name)->forward(x).to_doubles(), 1e-13)) << name;
  EXPECT_EQ(together[0].storage(), together[2].storage());  // still columns of one matrix
}

// --- Merging and switching ---
TEST(Adapter, DetachingRestoresTheBaseItself) {
  nn::CausalLM model = tiny_model(tiny_config(), 1, DType::bf16);
  const std::vector<nn::NamedTensor> before = model.parameters();
  const std::vector<double> output = model.forward(ids()).to_doubles();
  Adapter adapter = adapt(model, {.r = 4, .lora_alpha = 30});
  randomise(adapter);

  adapter.merge(model);
  adapter.merge(model);  // again, of the same weights
  EXPECT_FALSE(all_equal(model.forward(ids()), output));
  EXPECT_TRUE(model.trainable_parameters().empty());
  adapter.detach(model);

  const std::vector<nn::NamedTensor> after = model.parameters();
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i].tensor.impl_ptr(), before[i].tensor.impl_ptr()) << after[i].name;
  EXPECT_TRUE(all_equal(model.forward(ids()), output));
}

TEST(Adapter, MergedWeightsAreCopiesThatDetachingDoesNotReach) {
  nn::CausalLM model = tiny_model(tiny_config());
  Adapter adapter = adapt(model, {.r = 4, .target_modules = {"q_proj"}});
  randomise(adapter);
  adapter.merge(model);
  const nn::NamedTensor merged = model.parameters()[2];
  ASSERT_TRUE(merged.name.ends_with("bias") || merged.name.ends_with("weight"));
  const std::vector<double> values = merged.tensor.to_doubles();

  adapter.detach(model);
  randomise(adapter, 9);

  EXPECT_TRUE(all_equal(merged.tensor, values));
}

TEST(Adapter, SeveralTakeTurnsOnOneBaseBitForBit) {
  nn::CausalLM model = tiny_model(tiny_config(nn::Architecture::llama), 1, DType::bf16);
  const Adapter first = adapt(model, {.r = 4}, 1), second = adapt(model, {.r = 2, .target_modules = {"all-linear"}, .use_dora = true}, 2);
  randomise(first, 3);
  randomise(second, 4);
  const std::vector<double> alone = model.forward(ids()).to_doubles();
  const auto with = [&](const Adapter& adapter) {
    adapter.attach(model);
    const std::vector<double> out = model.forward(ids()).to_doubles();
    adapter.detach(model);
    return out;
  };
  const std::vector<double> a = with(first), b = with(second);

  EXPECT_NE(a, alone);
  EXPECT_NE(a, b);
  EXPECT_EQ(with(first), a);
  EXPECT_EQ(with(second), b);
  EXPECT_TRUE(all_equal(model.forward(ids()), alone));
}

TEST(Adapter, AdaptsAQuantisedLayerAndMergesItOnlyWhenAsked) {
  nn::CausalLM model = tiny_model(tiny_config(), 1, DType::f64);
  const std::string name = "model.layers.1.self_attn.k_proj";
  model.replace_child(name, std::make_shared<CodedLinear>(random_tensor({12, 12}, DType::f64)));
  Adapter adapter = adapt(model, {.r = 4});
  randomise(adapter);
  adapter.attach(model);
  const std::vector<double> output = model.forward(ids()).to_doubles();

  EXPECT_EQ(error_of([&] { adapter.merge(model); }),
            "lora: " + name + " is quantised; merging would decode it to float64: ask for that, or keep the adapter beside it");
  EXPECT_TRUE(all_equal(model.forward(ids()), output));
  adapter.merge(model, Quantised::decoded);
  EXPECT_TRUE(all_close(model.forward(ids()), output, 1e-12));
}

TEST(Adapter, PissaOfAQuantisedLayerIsRefusedAndChangesNothing) {
  nn::CausalLM model = tiny_model(tiny_config());
  model.replace_child("model.layers.1.self_attn.k_proj", std::make_shared<CodedLinear>(random_tensor({12, 12}, DType::f32)));
  const std::size_t trainable = model.trainable_parameters().size();

  EXPECT_EQ(error_of([&] { adapt(model, {.init_lora_weights = InitLoraWeights::pissa}); }),
            "lora: model.layers.1.self_attn.k_proj is quantised, and init_lora_weights pissa takes weights apart; choose true or gaussian, or leave "
            "the layer unquantised");
  EXPECT_EQ(model.trainable_parameters().size(), trainable);
}

TEST(Adapter, NamesItsLayersOfZeros) {
  nn::CausalLM model = tiny_model(tiny_config(), 1, DType::bf16);
  {
    const NoGradGuard no_grad;
    for (const auto& [name, tensor] : model.parameters())
      if (name.find("layers.1.self_attn.v_proj") != std::string::npos || name.find("layers.0.mlp") != std::string::npos) tensor.zero_();
  }

  EXPECT_EQ(adapt(model, {}).zero_layers(), std::vector<std::string>{"model.layers.1.self_attn.v_proj"});
}

TEST(Adapter, OfNoLayerIsRefused) {
  nn::CausalLM model = tiny_model(tiny_config());
  Generator generator;

  EXPECT_EQ(error_of([&] { Adapter(model, {}, {}, generator); }), "lora: there is no layer to adapt");
  EXPECT_EQ(model.trainable_parameters().size(), model.parameters().size());
}

TEST(Adapter, OneALayerAtATime) {
  nn::CausalLM model = tiny_model(tiny_config());
  const Adapter first = adapt(model, {.r = 4}), second = adapt(model, {.r = 4, .target_modules = {"q_proj"}});
  first.attach(model);

  EXPECT_EQ(error_of([&] { second.attach(model); }),
            "lora: 'model.layers.0.self_attn.q_proj' of this model is not the layer the adapter was made for; detach what is attached or merged there");
  EXPECT_EQ(error_of([&] { adapt(model, {}); }), "lora: model.layers.0.self_attn.q_proj has an adapter already; detach it first");
}

TEST(Adapter, IsNotMadeForAModelThatHasOneAttached) {
  nn::CausalLM model = tiny_model(tiny_config());
  const std::vector<LayerPlan> plan = plan_layers(linear_layers(model), {});
  const Adapter first = adapt(model, {});
  first.attach(model);
  Generator generator;

  EXPECT_EQ(error_of([&] { Adapter(model, plan, {}, generator); }), "lora: model.layers.0.self_attn.q_proj has an adapter already; detach it first");
  EXPECT_EQ(model.trainable_parameters().size(), first.parameters().size());
}

TEST(Adapter, DoraStartsAsTheBase) {
  nn::CausalLM model = tiny_model(tiny_config(), 1, DType::f64);
  const std::vector<double> before = model.forward(ids()).to_doubles();

  adapt(model, {.r = 4, .target_modules = {"all-linear"}, .use_dora = true}).attach(model);

  EXPECT_TRUE(all_close(model.forward(ids()), before, 1e-13));
}

TEST(Adapter, DropoutIsOfTheAdaptersInputAndOffInEval) {
  nn::CausalLM model = tiny_model(tiny_config());
  const Adapter adapter = adapt(model, {.r = 4, .lora_dropout = 0.5});
  randomise(adapter);
  adapter.attach(model);
  const auto run = [&](std::uint64_t seed) {
    Generator generator{seed};
    return model.forward(ids(), &generator).to_doubles();
  };

  model.train();
  const std::vector<double> dropped = run(1);
  EXPECT_NE(dropped, run(2));
  EXPECT_EQ(dropped, run(1));
  EXPECT_EQ(error_of([&] { model.forward(ids()); }), "linear: an adapter has dropout; give a generator or call eval()");
  model.eval();
  EXPECT_EQ(run(1), run(2));
  EXPECT_TRUE(all_equal(model.forward(ids()), run(1)));
}

}  // namespace
}  // namespace heddle::lora
