#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "kernels/runtime/allocator.h"
#include "lora/name_pattern.h"
#include "lora/pissa.h"
#include "nn/transformer.h"
#include "tests/support/adapters.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"
#include "tests/support/threads_guard.h"
#include "tests/support/tiny_run.h"

namespace heddle::lora {
namespace {

using test::all_close, test::all_equal, test::error_of, test::expect_gradients;
using test::random_leaf, test::random_tensor, test::tiny_config;

std::shared_ptr<nn::Linear> frozen_linear(const Tensor& weight, const Tensor& bias = {}) {
  auto out = std::make_shared<nn::Linear>(weight, bias);
  out->freeze();
  return out;
}

// --- By hand. The numbers have at most two decimals, so float64 differs from them by some roundings of values up to 31. ---
constexpr double kByHand = 1e-13;

struct ByHand {
  std::shared_ptr<nn::Linear> base = frozen_linear(Tensor::from_vector<double>({0.8, 0.1, 0.3, 0.2, 0.7, 0.5}, {2, 3}));
  Tensor a = Tensor::from_vector<double>({0.25, -0.5, 0.1}, {1, 3});
  Tensor b = Tensor::from_vector<double>({0.4, 0.2}, {2, 1});
  Tensor x = Tensor::from_vector<double>({10, 20, 30}, {1, 3}).set_requires_grad(true);
  LoraLinear layer{base, {.a = a, .b = b, .scale = 1}};
};

TEST(LoraLinear, ForwardAddsTheScaledLowRankTerm) {
  const ByHand c;

  EXPECT_TRUE(all_close(c.layer.forward(c.x), {17.2, 30.1}, kByHand));
}

TEST(LoraLinear, GradientsReachTheFactorsAndNotTheBase) {
  const ByHand c;

  c.layer.forward(c.x).backward(Tensor::from_vector<double>({0.5, -0.2}, {1, 2}));

  EXPECT_TRUE(all_close(c.b.grad(), {-2.25, 0.9}, kByHand));
  EXPECT_TRUE(all_close(c.a.grad(), {1.6, 3.2, 4.8}, kByHand));
  EXPECT_FALSE(c.base->weight().grad().defined());
  // W^T dy + A^T (B . dy): B . dy = 0.16.
  EXPECT_TRUE(all_close(c.x.grad(), {0.36 + 0.04, -0.09 - 0.08, 0.05 + 0.016}, kByHand));
}

TEST(LoraLinear, MergedWeightIsTheSum) {
  const ByHand c;

  const auto merged = c.layer.merged();

  EXPECT_TRUE(all_close(merged->weight(), {0.9, -0.1, 0.34, 0.25, 0.6, 0.52}, kByHand));
  EXPECT_TRUE(all_close(merged->forward(c.x), {17.2, 30.1}, kByHand));
  EXPECT_TRUE(all_equal(c.base->weight(), {0.8, 0.1, 0.3, 0.2, 0.7, 0.5}));
}

TEST(LoraLinear, QueryProjectionByHand) {
  const auto base = frozen_linear(Tensor::from_vector<double>({.1, .8, .2, .4, .5, .3, .7, .1, .9, .2, .3, .6}, {3, 4}));
  const Tensor a = Tensor::from_vector<double>({.2, -.1, .4, .3}, {1, 4}), b = Tensor::from_vector<double>({.5, -.2, .1}, {3, 1});
  const LoraLinear layer(base, {.a = a, .b = b});
  const Tensor x = Tensor::from_vector<double>({2, 1, .5, 1.5}, {1, 4});

  const Tensor q = layer.forward(x);
  q.backward(Tensor::from_vector<double>({.8, .1, -.4}, {1, 3}));

  EXPECT_TRUE(all_close(q, {2.175, 1.61, 3.145}, kByHand));
  EXPECT_TRUE(all_close(b.grad(), {0.76, 0.095, -0.38}, kByHand));
  EXPECT_TRUE(all_close(a.grad(), {0.68, 0.34, 0.17, 0.51}, kByHand));
}

// --- Against finite differences ---
TEST(LoraLinear, GradientsAgreeWithFiniteDifferences) {
  const auto base = frozen_linear(random_tensor({5, 4}, DType::f64, 2), random_tensor({5}, DType::f64, 3));
  const Tensor a = random_tensor({2, 4}, DType::f64, 4), b = random_tensor({5, 2}, DType::f64, 5), x = random_leaf({2, 3, 4}, 6);
  const LoraLinear layer(base, {.a = a, .b = b, .scale = 0.7});

  expect_gradients([&] { return layer.forward(x); }, {x, a, b});
}

TEST(LoraLinear, DoraGradientsAgreeWithFiniteDifferences) {
  const auto base = frozen_linear(random_tensor({5, 4}, DType::f64, 2), random_tensor({5}, DType::f64, 3));
  const Tensor a = random_tensor({2, 4}, DType::f64, 4), b = random_tensor({5, 2}, DType::f64, 5), x = random_leaf({2, 3, 4}, 6);
  const Tensor magnitude = random_tensor({5}, DType::f64, 7);
  const LoraLinear layer(base, {.a = a, .b = b, .scale = 0.7, .magnitude = magnitude});

  // Not A and B: gradients do not go through the norms, which differences see.
  expect_gradients([&] { return layer.forward(x); }, {x, magnitude});
}

// --- DoRA, dtypes, dropout ---
TEST(LoraLinear, DoraByHand) {
  // W + BA = [[3, 4], [6, 8]]: norms 5 and 10; magnitudes 10 and 5 double the first row and halve the second.
  const auto base = frozen_linear(Tensor::from_vector<double>({3, 4, 5, 8}, {2, 2}), Tensor::from_vector<double>({0.5, -1}, {2}));
  const LoraLinear layer(base, {.a = Tensor::from_vector<double>({1, 0}, {1, 2}),
                                .b = Tensor::from_vector<double>({0, 0.5}, {2, 1}),
                                .scale = 2,
                                .magnitude = Tensor::from_vector<double>({10, 5}, {2})});

  EXPECT_TRUE(all_close(layer.forward(Tensor::from_vector<double>({1, 2}, {1, 2})), {22 + 0.5, 11 - 1}, kByHand));
  EXPECT_TRUE(all_close(layer.merged()->weight(), {6, 8, 3, 4}, kByHand));
}

TEST(LoraLinear, Float32FactorsBesideA16BitLayerAreAppliedInFloat32AndRoundedOnce) {
  // A x = 2^22 lies beyond float16; with any 16-bit step in between the result is infinite.
  const auto base = frozen_linear(cast(Tensor::from_vector<double>({-256, -256}, {1, 2}), DType::f16));
  const LoraLinear layer(base, {.a = Tensor::from_vector<float>({65536, 0}, {1, 2}), .b = Tensor::from_vector<float>({0.00390625f}, {1, 1})});

  const Tensor y = layer.forward(cast(Tensor::from_vector<double>({64, 64}, {1, 2}), DType::f16));

  EXPECT_EQ(y.dtype(), DType::f16);
  EXPECT_TRUE(all_equal(y, {-32768 + 16384}));
}

TEST(LoraLinear, MergedWeightOfA16BitLayerIsSummedInFloat32AndRoundedOnce) {
  // 256 + BA = 257 + 2^-8, of which bfloat16 has 256 and 258. BA in bfloat16 would be 1, and 257 a tie that goes to 256.
  const auto base = frozen_linear(cast(Tensor::from_vector<double>({256}, {1, 1}), DType::bf16));
  const LoraLinear layer(base, {.a = cast(Tensor::from_vector<double>({1, 0.0625}, {2, 1}), DType::bf16),
                                .b = cast(Tensor::from_vector<double>({1, 0.0625}, {1, 2}), DType::bf16)});

  const auto merged = layer.merged();

  EXPECT_EQ(merged->weight().dtype(), DType::bf16);
  EXPECT_TRUE(all_equal(merged->weight(), {258}));
}

TEST(LoraLinear, NoStepFormsAMatrixOfTheWeightsSize) {
  const test::ThreadsGuard guard;
  set_num_threads(1);  // each thread has 0.6 MB of its own for parts of products
  const std::int64_t size = 700;
  const LoraLinear layer(frozen_linear(random_tensor({size, size}, DType::f32)), {.a = random_tensor({2, size}, DType::f32), .b = random_tensor({size, 2}, DType::f32)});
  const Tensor x = random_leaf({3, size}, 1, DType::f32);
  const std::int64_t before = memory_stats(kCpu).current_bytes;
  reset_peak_memory(kCpu);

  sum(layer.forward(x)).backward();

  EXPECT_LT(memory_stats(kCpu).peak_bytes - before, size * size * 4 / 2);
}

// --- PiSSA ---
TEST(PrincipalPart, IsThatOfTheLargestSingularValues) {
  // Rotations by 3-4-5 triangles around diag(9, 4, 1): the part of 9 is 9 u v^T with u = (0.6, 0.8, 0), v = (0.8, 0, 0.6).
  const Tensor u = Tensor::from_vector<double>({0.6, -0.8, 0, 0.8, 0.6, 0, 0, 0, 1}, {3, 3});
  const Tensor v = Tensor::from_vector<double>({0.8, 0, -0.6, 0, 1, 0, 0.6, 0, 0.8}, {3, 3});
  const Tensor diagonal = Tensor::from_vector<double>({9, 0, 0, 0, 4, 0, 0, 0, 1}, {3, 3});

  const auto [a, b] = principal_part(matmul(matmul(u, diagonal), transpose(v, 0, 1)), 1, 4);

  EXPECT_TRUE(all_close(scale(matmul(b, a), 4), {4.32, 0, 3.24, 5.76, 0, 4.32, 0, 0, 0}, 1e-13));
  EXPECT_TRUE(all_close(sum(mul(a, a)), {9.0 / 4}, 1e-13));  // shared evenly: |a|^2 = |b|^2 = S / scale
}

TEST(PrincipalPart, LeavesNothingOfAMatrixOfItsRank) {
  const Tensor weight = matmul(random_tensor({40, 3}, DType::f64, 1), random_tensor({3, 30}, DType::f64, 2));

  const auto [a, b] = principal_part(weight, 5, 0.5);

  EXPECT_EQ(a.shape(), (Shape{5, 30}));
  EXPECT_TRUE(all_close(scale(matmul(b, a), 0.5), weight.to_doubles(), 1e-11));
}

// --- Plans ---
std::string plan_error(const LoraConfig& config) {
  return error_of([&] { plan_layers(linear_layers(tiny_config()), config); });
}

TEST(PlanLayers, TargetThatMatchesNothingNamesTheNearest) {
  EXPECT_EQ(plan_error({.target_modules = {"q_proj", "v_proj", "k_porj"}}),
            "lora.target_modules: expected names of layers, of which there are c_attn, down_proj, k_proj, o_proj, q_proj, up_proj, v_proj, "
            "got \"k_porj\", which is none of them; did you mean k_proj?");
  EXPECT_EQ(plan_error({.target_modules = {"lm_head"}}),  // tied to the embedding, which an adapter must not change
            "lora.target_modules: expected names of layers, of which there are c_attn, down_proj, k_proj, o_proj, q_proj, up_proj, v_proj, "
            "got \"lm_head\", which is none of them");
  EXPECT_EQ(plan_error({.target_modules = {"c_proj"}}),  // as near to four names
            "lora.target_modules: expected names of layers, of which there are c_attn, down_proj, k_proj, o_proj, q_proj, up_proj, v_proj, "
            "got \"c_proj\", which is none of them");
  EXPECT_EQ(plan_error({.target_modules = {"q_proj", "c_attn"}}),
            "lora.target_modules: expected each layer once, got model.layers.0.self_attn.q_proj by itself and as part of c_attn");
  EXPECT_EQ(plan_error({.rank_pattern = {{"up_proj", 3}}}),
            "lora.rank_pattern: expected patterns of names of adapted layers, such as model.layers.0.self_attn.q_proj, got \"up_proj\", which fits none");
}

std::vector<std::string> planned(const std::vector<std::string>& targets, nn::TransformerConfig config = tiny_config()) {
  std::vector<std::string> out;
  for (const LayerPlan& plan : plan_layers(linear_layers(config), {.target_modules = targets}))
    for (const std::string& name : plan.names) out.push_back(name);
  return out;
}

TEST(PlanLayers, TakesEndsOfNamesWildcardsAndAllLinear) {
  nn::TransformerConfig untied = tiny_config(nn::Architecture::llama);
  untied.tie_word_embeddings = false;
  using Names = std::vector<std::string>;

  EXPECT_EQ(planned({"mlp.up_proj"}), (Names{"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}));
  EXPECT_EQ(planned({"layers.1.*.[qk]_proj"}), (Names{"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"}));
  EXPECT_EQ(planned({"c_attn"}).size(), 6u);
  EXPECT_EQ(planned({"all-linear"}).size(), 12u);
  EXPECT_EQ(planned({"all-linear"}, untied).size(), 14u);
  EXPECT_EQ(planned({"lm_head"}, untied), Names{"lm_head"});
}

TEST(LoraConfig, ScaleIsAlphaOverRankOrItsRoot) {
  const LoraConfig config{.r = 4, .lora_alpha = 6, .rank_pattern = {{"layers.1.self_attn.q_proj", 16}, {".*q_proj", 9}}, .alpha_pattern = {{"k_proj", 2}}};
  LoraConfig rs = config;
  rs.use_rslora = true;

  EXPECT_EQ(scale_of(config, "model.layers.0.self_attn.v_proj"), 1.5);
  EXPECT_EQ(scale_of(config, "model.layers.0.self_attn.k_proj"), 0.5);
  EXPECT_EQ(rank_of(config, "model.layers.1.self_attn.q_proj"), 16);
  EXPECT_EQ(rank_of(config, "model.layers.0.self_attn.q_proj"), 9);
  EXPECT_EQ(scale_of(rs, "model.layers.0.self_attn.q_proj"), 2);
}

TEST(LoraLinear, FactorsThatDoNotFitAreRefused) {
  const auto base = frozen_linear(random_tensor({5, 4}, DType::f32));
  const auto make = [&](const Shape& a, const Shape& b, DType dtype = DType::f32) {
    return error_of([&] { LoraLinear(base, {.a = Tensor::zeros(a, dtype), .b = Tensor::zeros(b, dtype)}); });
  };

  EXPECT_EQ(make({2, 3}, {5, 2}), "lora: a layer [5, 4] needs A [r, 4] and B [5, r], got [2, 3] and [5, 2]");
  EXPECT_EQ(make({8, 4}, {5, 4}), "lora: a layer [5, 4] needs A [r, 4] and B [5, r], got [8, 4] and [5, 4]");
  EXPECT_EQ(error_of([] {
              LoraLinear(frozen_linear(random_tensor({5, 4}, DType::bf16)), {.a = Tensor::zeros({2, 4}, DType::bf16),
                                                                             .b = Tensor::zeros({5, 2}, DType::bf16),
                                                                             .magnitude = Tensor::zeros({5}, DType::bf16)});
            }),
            "lora: the magnitude of a bfloat16 layer must be float32, got bfloat16");
  EXPECT_EQ(make({2, 4}, {5, 2}, DType::f64), "lora: A and B of a float32 layer must both be float32, or float32 beside a 16-bit layer, got float64 and float64");
}

}  // namespace
}  // namespace heddle::lora
