#include "nn/optim.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"

namespace heddle::nn {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename T = double>
NamedTensor parameter(const std::string& name, const std::vector<T>& values, const Shape& shape) {
  Tensor leaf = Tensor::from_vector(values, shape);
  leaf.set_requires_grad(true);
  return {name, leaf};
}

template <typename T = double>
void set_grad(const NamedTensor& named, const std::vector<T>& values) {
  named.tensor.set_grad(Tensor::from_vector(values, named.tensor.shape()));
}

std::vector<std::vector<double>> snapshot(const std::vector<NamedTensor>& tensors) {
  std::vector<std::vector<double>> out;
  for (const NamedTensor& named : tensors) out.push_back(named.tensor.to_doubles());
  return out;
}

// The gradients after scale and clipping of the first update of an optimiser with beta1 = 0: its first moments.
std::vector<std::vector<double>> gradients_used(const AdamW& optimizer) {
  std::vector<std::vector<double>> out;
  for (const NamedTensor& named : optimizer.state())
    if (named.name.starts_with("exp_avg.")) out.push_back(named.tensor.to_doubles());
  return out;
}

// With g constant, m / (1 - beta1^t) = g and v / (1 - beta2^t) = g^2 at every t, so each update is
// lr * g / (|g| + eps): decay first, 1 * (1 - 0.1 * 0.5) = 0.95, then minus 0.1 * 2 / (2 + 1).
TEST(AdamW, UpdatesByHand) {
  const NamedTensor w = parameter("w", {1.0}, {1, 1});
  AdamW optimizer({w}, {.eps = 1, .weight_decay = 0.5});

  set_grad(w, {2.0});
  optimizer.update({.learning_rate = 0.1});
  const double first = 0.95 - 0.2 / 3;
  EXPECT_NEAR(w.tensor.item(), first, 1e-15);
  set_grad(w, {2.0});
  optimizer.update({.learning_rate = 0.1});

  EXPECT_NEAR(w.tensor.item(), 0.95 * first - 0.2 / 3, 1e-15);
  EXPECT_EQ(optimizer.updates(), 2);
}

TEST(AdamW, DecayTouchesMatricesOnly) {
  const NamedTensor matrix = parameter<float>("matrix", {1, -2, 3, 4, 5, 6}, {2, 3});
  const NamedTensor norm = parameter<float>("input_layernorm.weight", {0.1f, 0.2f, 0.3f}, {3});
  const NamedTensor bias = parameter<float>("bias", {-7, 8}, {2});
  AdamW optimizer({matrix, norm, bias}, {.weight_decay = 0.1});
  set_grad<float>(matrix, std::vector<float>(6, 0.0f));
  set_grad<float>(norm, std::vector<float>(3, 0.0f));
  set_grad<float>(bias, std::vector<float>(2, 0.0f));

  optimizer.update({.learning_rate = 0.1});

  const std::vector<double> before = {1, -2, 3, 4, 5, 6}, after = matrix.tensor.to_doubles();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_FLOAT_EQ(after[i], 0.99 * before[i]);
  EXPECT_EQ(norm.tensor.to_vector<float>(), (std::vector<float>{0.1f, 0.2f, 0.3f}));
  EXPECT_EQ(bias.tensor.to_vector<float>(), (std::vector<float>{-7, 8}));
}

TEST(AdamW, GroupsAreToldByDimension) {
  const AdamW optimizer({parameter("a.weight", std::vector<double>(6), {2, 3}), parameter("a.bias", std::vector<double>(2), {2}),
                         parameter("norm.weight", std::vector<double>(3), {3})},
                        {.weight_decay = 0.1});

  EXPECT_EQ(optimizer.describe_groups(), "weight decay 0.1: 1 tensors, 6 parameters; no decay: 2 tensors, 5 parameters");
}

TEST(AdamW, ClipsToTheGlobalNormAsTorchDoes) {
  const NamedTensor a = parameter("a", {0.0, 0.0}, {2}), b = parameter("b", {0.0}, {1});
  AdamW optimizer({a, b}, {.beta1 = 0});
  set_grad(a, {2.0, 4.0});
  set_grad(b, {4.0});

  const UpdateResult result = optimizer.update({.learning_rate = 0, .max_grad_norm = 3});

  EXPECT_EQ(result.grad_norm, 6);
  const double factor = 3 / (6 + 1e-6);
  EXPECT_EQ(gradients_used(optimizer), (std::vector<std::vector<double>>{{2 * factor, 4 * factor}, {4 * factor}}));
}

TEST(AdamW, NormBelowTheLimitLeavesGradientsAlone) {
  const NamedTensor a = parameter("a", {0.0, 0.0}, {2});
  AdamW optimizer({a}, {.beta1 = 0});
  set_grad(a, {0.3, 0.4});

  const UpdateResult result = optimizer.update({.learning_rate = 0, .max_grad_norm = 1});

  EXPECT_EQ(result.grad_norm, 0.5);
  EXPECT_EQ(gradients_used(optimizer), (std::vector<std::vector<double>>{{0.3, 0.4}}));
}

TEST(AdamW, GradScaleComesBeforeNormAndClipping) {
  const NamedTensor a = parameter("a", {0.0, 0.0}, {2});
  AdamW optimizer({a}, {.beta1 = 0});
  set_grad(a, {30.0, 40.0});

  const UpdateResult result = optimizer.update({.learning_rate = 0, .grad_scale = 0.1, .max_grad_norm = 10});

  EXPECT_EQ(result.grad_norm, 5);
  EXPECT_EQ(gradients_used(optimizer), (std::vector<std::vector<double>>{{3, 4}}));
}

TEST(AdamW, NonFiniteGradientChangesNothingAndNamesTheParameter) {
  for (const std::vector<double>& bad : {std::vector<double>{1, 1, kNan}, {1, kInf, 1}, {-kInf, 1, 1}}) {
    const NamedTensor fine = parameter("fine", {1.0, 2.0}, {2}), broken = parameter("broken", {1.0, 2.0, 3.0}, {3, 1});
    AdamW optimizer({fine, broken}, {});
    set_grad(fine, {0.5, 0.5});
    set_grad(broken, {1.0, 1.0, 1.0});
    optimizer.update({.learning_rate = 0.1, .max_grad_norm = 1});
    const auto weights = snapshot({fine, broken}), state = snapshot(optimizer.state());

    set_grad(broken, bad);
    const UpdateResult result = optimizer.update({.learning_rate = 0.1, .max_grad_norm = 1});

    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.nonfinite, "broken");
    EXPECT_EQ(snapshot({fine, broken}), weights);
    EXPECT_EQ(snapshot(optimizer.state()), state);
  }
}

TEST(AdamW, NonFiniteLossChangesNothing) {
  for (const double bad : {kNan, kInf}) {
    const NamedTensor w = parameter("w", {1.0, 2.0}, {2});
    AdamW optimizer({w}, {});
    set_grad(w, {0.5, 0.5});

    const UpdateResult result = optimizer.update({.learning_rate = 0.1, .loss = Tensor::full({}, bad, DType::f64)});

    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.nonfinite, "");
    EXPECT_EQ(w.tensor.to_doubles(), (std::vector<double>{1, 2}));
    EXPECT_EQ(optimizer.updates(), 0);
  }
}

TEST(AdamW, HalfPrecisionParameterWithZeroGradientStaysPut) {
  for (const DType half : {DType::bf16, DType::f16}) {
    Tensor leaf = Tensor::full({2, 3}, 0.75, half);
    leaf.set_requires_grad(true);
    AdamW optimizer({{"w", leaf}}, {.eps = 1e-8, .weight_decay = 0});
    leaf.set_grad(Tensor::zeros({2, 3}, DType::f32));

    optimizer.update({.learning_rate = 0.1});

    EXPECT_EQ(leaf.to_doubles(), std::vector<double>(6, 0.75)) << half;
  }
}

// bfloat16 has 8 bits, so 1 - 1e-3 rounds back to 1; 20 such updates reach 0.98, which bfloat16 rounds to 0.98046875.
TEST(AdamW, MasterWeightsKeepUpdatesThatBfloat16WouldLose) {
  Tensor leaf = Tensor::full({1}, 1.0, DType::bf16);
  leaf.set_requires_grad(true);
  AdamW optimizer({{"w", leaf}}, {});

  for (int i = 0; i < 20; ++i) {
    leaf.set_grad(Tensor::full({1}, 1.0, DType::f32));
    optimizer.update({.learning_rate = 1e-3});
  }

  EXPECT_EQ(leaf.item(), 0.98046875);
}

TEST(AdamW, HalfPrecisionGradientsAccumulateInFloat32) {
  Tensor leaf = Tensor::full({1}, 1.0, DType::bf16);
  leaf.set_requires_grad(true);
  AdamW optimizer({{"w", leaf}}, {});

  sum(scale(leaf, 256)).backward();
  sum(leaf).backward();  // 257 needs 9 bits

  EXPECT_EQ(leaf.grad().dtype(), DType::f32);
  EXPECT_EQ(leaf.grad().item(), 257);
}

TEST(AdamW, StateHasOneEntryAParameterAndTheStep) {
  Tensor half = Tensor::full({2}, 1.0, DType::bf16);
  half.set_requires_grad(true);
  const AdamW optimizer({parameter("w", {1.0}, {1}), {"h", half}}, {});

  std::vector<std::string> names;
  for (const NamedTensor& named : optimizer.state()) names.push_back(named.name);

  EXPECT_EQ(names, (std::vector<std::string>{"exp_avg.w", "exp_avg_sq.w", "exp_avg.h", "exp_avg_sq.h", "master.h", "step"}));
}

TEST(AdamW, ParameterWithoutGradientIsLeftAlone) {
  const NamedTensor used = parameter("used", {1.0}, {1, 1}), unused = parameter("unused", {1.0}, {1, 1});
  AdamW optimizer({used, unused}, {.weight_decay = 0.5});
  set_grad(used, {1.0});

  optimizer.update({.learning_rate = 0.1});

  EXPECT_NE(used.tensor.item(), 1);
  EXPECT_EQ(unused.tensor.item(), 1);
}

TEST(AdamW, FrozenParameterIsRefusedByName) {
  try {
    AdamW optimizer({{"frozen", Tensor::zeros({2})}}, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "adamw: parameter 'frozen' must be a dense leaf that requires a gradient");
  }
}

}  // namespace
}  // namespace heddle::nn
