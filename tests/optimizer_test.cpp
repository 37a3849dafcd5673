#include "kernels/optimizer/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/ops.h"
#include "kernels/runtime/parallel.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_close;
using test::all_equal;
using test::error_of;

ExecContext& ctx() { return device_context(kCpu); }

// One weight with its gradient and moments.
struct State {
  Tensor weight, grad, first, second;

  explicit State(const std::vector<double>& weights, const std::vector<double>& grads)
      : weight(Tensor::from_vector(weights, {static_cast<std::int64_t>(weights.size())})),
        grad(Tensor::from_vector(grads, weight.shape())),
        first(Tensor::zeros(weight.shape(), DType::f64)),
        second(Tensor::zeros(weight.shape(), DType::f64)) {}

  AdamWParameter parameter(double weight_decay = 0.0) const {
    return {.weight = weight.mutable_view(),
            .grad = grad.view(),
            .first_moment = first.mutable_view(),
            .second_moment = second.mutable_view(),
            .rounded = {},
            .weight_decay = weight_decay};
  }
};

// Update number `t` with learning rate 0.1 and unscaled gradients.
void update(std::vector<AdamWParameter> parameters, std::int64_t t, double eps = 1e-8) {
  const Tensor rate = Tensor::full({}, 0.1, DType::f64), one = Tensor::full({}, 1, DType::f64), step = Tensor::full({}, static_cast<double>(t - 1), DType::i64);
  adamw({.parameters = std::move(parameters), .beta1 = 0.9, .beta2 = 0.99, .eps = eps, .learning_rate = rate.view(), .grad_scale = one.view(),
         .grad_norm = one.view(), .step = step.mutable_view()}, ctx());
}

double norm_of(const std::vector<Tensor>& tensors) {
  const Tensor out = Tensor::zeros({}, DType::f64);
  std::vector<ConstView> views;
  for (const Tensor& tensor : tensors) views.push_back(tensor.view());
  global_norm({.tensors = views, .out = out.mutable_view()}, ctx());
  return out.item();
}

TEST(AdamW, FirstStepMovesByTheLearningRateAgainstTheSign) {
  // m = 0.1 g, v = 0.01 g^2; corrected they are g and g^2: the step is 0.1 * g / |g|. Decay first: w *= 1 - 0.1 * 0.5.
  const State state({2.0, 2.0}, {3.0, -0.5});

  update({state.parameter(/*weight_decay=*/0.5)}, 1);

  EXPECT_TRUE(all_close(state.weight, {1.9 - 0.1, 1.9 + 0.1}, 1e-8));  // eps 1e-8 against |g| of at least 0.5
  EXPECT_TRUE(all_close(state.first, {0.3, -0.05}, 1e-15));
  EXPECT_TRUE(all_close(state.second, {0.09, 0.0025}, 1e-15));
}

TEST(AdamW, RateScaleMultipliesTheLearningRateOfStepAndDecay) {
  const State state({2.0, 2.0}, {3.0, -0.5});
  AdamWParameter parameter = state.parameter(/*weight_decay=*/0.5);
  parameter.rate_scale = 3;

  update({parameter}, 1);

  EXPECT_TRUE(all_close(state.weight, {1.7 - 0.3, 1.7 + 0.3}, 1e-8));  // eps 1e-8 against |g| of at least 0.5
}

TEST(AdamW, SecondStepUsesTheCorrectionsOfStepTwo) {
  // g = 1 then 3: m = 0.09 + 0.3 = 0.39, v = 0.0099 + 0.09 = 0.0999; corrections 1 - 0.81 = 0.19 and 1 - 0.9801 = 0.0199.
  const State state({0.0}, {1.0});
  update({state.parameter()}, 1);
  const double after_first = state.weight.item();
  state.grad.fill_(3.0);

  update({state.parameter()}, 2);

  EXPECT_NEAR(state.weight.item(), after_first - 0.1 * (0.39 / 0.19) / (std::sqrt(0.0999 / 0.0199) + 1e-8), 1e-15);
}

TEST(AdamW, ZeroGradientLeavesTheWeight) {
  const State state({2.0}, {0.0});

  update({state.parameter()}, 1);

  EXPECT_EQ(state.weight.item(), 2.0);  // 0 / (0 + eps), not 0 / 0
}

TEST(AdamW, EpsilonIsAddedOutsideTheRoot) {
  const State state({0.0}, {1.0});

  update({state.parameter()}, 1, /*eps=*/1.0);

  EXPECT_NEAR(state.weight.item(), -0.1 / 2.0, 1e-15);
}

TEST(AdamW, WritesTheRoundedCopyOfFloatMasterWeights) {
  const Tensor weight = Tensor::full({3}, 1.0), grad = Tensor::full({3}, 1.0);
  const Tensor first = Tensor::zeros({3}), second = Tensor::zeros({3}), rounded = Tensor::zeros({3}, DType::bf16);

  update({{.weight = weight.mutable_view(),
           .grad = grad.view(),
           .first_moment = first.mutable_view(),
           .second_moment = second.mutable_view(),
           .rounded = rounded.mutable_view()}},
         1);

  EXPECT_TRUE(all_close(weight, {0.9, 0.9, 0.9}, 1e-7));
  EXPECT_TRUE(all_equal(rounded, cast(weight, DType::bf16).to_doubles()));
}

TEST(AdamW, RefusesBadArgumentsByName) {
  State state({1.0}, {1.0});
  state.grad = Tensor::zeros({1});
  EXPECT_EQ(error_of([&] { update({state.parameter()}, 1); }),
            "adamw: gradient and moments must be dense float64 [1] like the weight; the gradient is float32 [1]");
}

TEST(GlobalNorm, IsThatOfAllTensorsTogether) {
  EXPECT_EQ(norm_of({Tensor::full({3}, 2.0), Tensor::full({2, 2}, 1.0, DType::f64)}), 4.0);  // sqrt(12 + 4)
  EXPECT_EQ(norm_of({}), 0.0);
}

TEST(GlobalNorm, OfLargeFloatsDoesNotOverflow) {
  EXPECT_EQ(norm_of({Tensor::full({4}, 0x1p100)}), 0x1p101);  // the squares, 2^200, are beyond float32
}

TEST(GlobalNorm, NonFiniteValuesShowInTheResult) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    const Tensor tensor = Tensor::full({100}, 1.0);
    slice(tensor, 0, 57, 58).fill_(bad);

    EXPECT_FALSE(std::isfinite(norm_of({Tensor::full({3}, 1.0), tensor}))) << bad;
  }
}

TEST(GlobalNorm, BitsDoNotDependOnTheThreadCount) {
  Generator generator{.seed = 12};
  const Tensor tensor = normal({300, 401}, 0.0, 1.0, generator);
  const int threads_before = num_threads();

  set_num_threads(1);
  const double one = norm_of({tensor});
  set_num_threads(3);
  const double three = norm_of({tensor});
  set_num_threads(threads_before);

  EXPECT_EQ(one, three);
}

TEST(GlobalNorm, NamesTheFirstTensorThatIsNotFinite) {
  const Tensor fine = Tensor::full({3}, 1.0), bad = Tensor::full({2}, std::nan("")), out = Tensor::zeros({}, DType::f64), first = Tensor::zeros({}, DType::f64);
  const auto index_of = [&](const std::vector<Tensor>& tensors) {
    GlobalNormArgs args{.tensors = {}, .out = out.mutable_view(), .first_nonfinite = first.mutable_view()};
    for (const Tensor& tensor : tensors) args.tensors.push_back(tensor.view());
    global_norm(args, ctx());
    return first.item();
  };

  EXPECT_EQ(index_of({fine, fine}), -1);
  EXPECT_EQ(index_of({fine, bad, fine, bad}), 1);
}

}  // namespace
}  // namespace heddle
