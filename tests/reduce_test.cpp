#include <gtest/gtest.h>

#include <limits>

#include "autograd/ops.h"
#include "kernels/reduce/reduce.h"
#include "kernels/runtime/parallel.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_close;
using test::all_equal;
using test::error_of;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor doubles(const std::vector<double>& values, const Shape& shape) { return Tensor::from_vector(values, shape); }
Tensor ones(const Shape& shape) { return Tensor::full(shape, 1.0, DType::f64); }

// Sum over the dimensions of a bit mask, one element at a time.
std::vector<double> naive_sum(const Tensor& x, unsigned mask) {
  Shape kept = x.shape();
  for (int d = 0; d < x.rank(); ++d)
    if (mask >> d & 1u) kept[d] = 1;
  const Shape strides = contiguous_strides(kept);
  std::vector<double> sums(static_cast<std::size_t>(kept.numel()));
  const std::vector<double> values = x.to_doubles();
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i), at = 0;
    for (int d = x.rank() - 1; d >= 0; --d) {
      at += (mask >> d & 1u) ? 0 : rest % x.shape()[d] * strides[d];
      rest /= x.shape()[d];
    }
    sums[static_cast<std::size_t>(at)] += values[i];
  }
  return sums;
}

TEST(Sum, EverySubsetOfDimensionsAndLayoutEqualsTheNaiveSum) {
  Generator generator{.seed = 7};
  const Tensor base = normal({3, 130, 5, 2}, 0.0, 1.0, generator, DType::f64);
  const std::vector<Tensor> layouts = {base, transpose(base, 0, 3), permute(base, {2, 0, 3, 1}), slice(base, 1, 3, 100),
                                       expand(slice(base, 2, 1, 2), {3, 130, 4, 2})};
  // 3900 additions in each of the two sums, to partial sums below 200: at most 2 * 3900 * 200 * 2^-53 < 2e-10.
  constexpr double kBound = 2e-10;

  for (const Tensor& x : layouts) {
    for (unsigned mask = 1; mask < 16; ++mask) {
      std::vector<int> dims;
      for (int d = 0; d < 4; ++d)
        if (mask >> d & 1u) dims.push_back(d);

      EXPECT_TRUE(all_close(sum(x, dims), naive_sum(x, mask), kBound)) << "dims mask " << mask << " of strides " << x.strides();
    }
  }
}

TEST(Sum, BitsDoNotDependOnTheThreadCount) {
  Generator generator{.seed = 8};
  const Tensor x = normal({2048, 128}, 0.0, 1.0, generator);
  const int threads_before = num_threads();

  set_num_threads(1);
  const std::vector<double> columns = sum(x, {0}).to_doubles(), all = sum(x).to_doubles();
  set_num_threads(3);
  EXPECT_TRUE(all_equal(sum(x, {0}), columns));
  EXPECT_TRUE(all_equal(sum(x), all));
  set_num_threads(threads_before);
}

TEST(Sum, OfHalfPrecisionIsAccumulatedInFloat) {
  const Tensor x = Tensor::full({4096}, 1.0, DType::bf16);

  EXPECT_EQ(sum(x).item(), 4096.0);  // bfloat16 accumulation would stop at 256, where 256 + 1 rounds to 256
}

TEST(Sum, KernelAccumulatesIntoAFloatOutputOfHalfInput) {
  const Tensor x = Tensor::full({3, 2}, 1.5, DType::bf16), out = Tensor::full({1, 2}, 10.0);

  sum({.x = x.view(), .out = out.mutable_view(), .write = Write::accumulate}, device_context(kCpu));

  EXPECT_TRUE(all_equal(out, {14.5, 14.5}));
}

TEST(Sum, ShapesOfScalarsAndOneElementTensorsStayApart) {
  const Tensor scalar = Tensor::scalar(3.0), five = Tensor::full({5}, 2.0), one = Tensor::full({1}, 4.0);

  EXPECT_EQ(sum(scalar).shape(), Shape{});
  EXPECT_EQ(sum(five).shape(), Shape{});
  EXPECT_EQ(sum(five).item(), 10.0);
  EXPECT_EQ(sum(five, {}, true).shape(), Shape{1});
  EXPECT_EQ(sum(one, {0}).shape(), Shape{});
  EXPECT_EQ(sum(one, {0}).item(), 4.0);
}

TEST(Sum, OfNothingIsZero) {
  EXPECT_TRUE(all_equal(sum(Tensor::zeros({0, 3}), {0}), {0.0, 0.0, 0.0}));
  EXPECT_TRUE(all_equal(sum(Tensor::zeros({0, 3})), {0.0}));
  EXPECT_EQ(sum(Tensor::zeros({0, 3}), {1}).shape(), Shape{0});
}

TEST(Sum, GradientIsRepeatedWithoutACopyAndReachesOpsBelow) {
  Tensor x = doubles({1, 2, 3, 4, 5, 6}, {2, 3});
  x.set_requires_grad(true);

  sum(mul(x, x)).backward();

  EXPECT_TRUE(all_equal(x.grad(), {2, 4, 6, 8, 10, 12}));
}

TEST(Sum, ScalarFactorGetsAScalarGradient) {
  Tensor v = Tensor::scalar(3.0, DType::f64);
  v.set_requires_grad(true);

  sum(mul(ones({2}), v)).backward();

  EXPECT_EQ(v.grad().shape(), Shape{});
  EXPECT_EQ(v.grad().item(), 2.0);
}

TEST(Sum, RefusesRepeatedAndMissingDimensions) {
  EXPECT_EQ(error_of([] { sum(ones({2, 3}), {1, -1}); }), "sum: dimension 1 is given twice");
  EXPECT_EQ(error_of([] { sum(ones({2, 3}), {2}); }), "sum: dimension 2 is out of range for rank 2");
  EXPECT_EQ(error_of([] { sum(Tensor::zeros({2}, DType::i64)); }), "sum: needs a floating-point tensor, got int64 [2] on cpu");
}

TEST(Mean, DividesByTheElementsThatWereReduced) {
  Tensor x = doubles({1, 2, 3, 4, 5, 9}, {2, 3});
  x.set_requires_grad(true);

  const Tensor y = mean(x, {1});
  y.backward(doubles({3, 6}, {2}));

  EXPECT_TRUE(all_equal(y, {2.0, 6.0}));
  EXPECT_TRUE(all_equal(x.grad(), {1, 1, 1, 2, 2, 2}));
}

TEST(Mean, RefusesToAverageNothing) {
  EXPECT_EQ(error_of([] { mean(Tensor::zeros({0, 3}), {0}); }), "mean: float32 [0, 3] on cpu has no elements to average");
  EXPECT_EQ(mean(Tensor::zeros({0, 3}), {1}).shape(), Shape{0});
}

TEST(Max, TakesTheFirstOfEqualsAndSendsTheGradientThere) {
  Tensor x = doubles({1, 7, 7, 4, -2, -5}, {2, 3});
  x.set_requires_grad(true);

  const Tensor y = max(x, 1);
  y.backward(doubles({10, 20}, {2}));

  EXPECT_TRUE(all_equal(y, {7, 4}));
  EXPECT_TRUE(all_equal(x.grad(), {0, 10, 0, 20, 0, 0}));
}

TEST(Max, WorksAlongTheFirstDimensionOfATransposedTensor) {
  const Tensor x = transpose(doubles({1, 8, 3, 4, 5, 6}, {2, 3}), 0, 1);  // [[1, 4], [8, 5], [3, 6]]

  EXPECT_TRUE(all_equal(max(x, 0), {8, 6}));
  EXPECT_EQ(max(x, 0, true).shape(), Shape({1, 2}));
}

TEST(Max, NanWinsAndMinusInfinityIsAValue) {
  EXPECT_TRUE(all_equal(max(doubles({1, kNan, 3, kNan}, {4}), 0), {kNan}));
  EXPECT_TRUE(all_equal(max(doubles({-kInf, -kInf}, {2}), 0), {-kInf}));
}

TEST(Max, RefusesAnEmptyDimension) {
  EXPECT_EQ(error_of([] { max(Tensor::zeros({2, 0}), 1); }), "max: dimension 1 of [2, 0] has no elements");
  EXPECT_EQ(max(Tensor::zeros({0, 2}), 1).shape(), Shape{0});
}

// Every way in which an operand can be broadcast: its gradient has its own shape and sums what was repeated.
TEST(SumTo, BroadcastOperandsGetGradientsOfTheirOwnShape) {
  struct Broadcast {
    Shape a, b;
    double per_a, per_b;  // how often each element of an operand is used
  };
  const std::vector<Broadcast> cases = {{{2, 1, 4, 64}, {2, 1, 4, 1}, 1, 64}, {{3, 4}, {4}, 1, 3}, {{1, 4}, {3, 1}, 3, 4},
                                        {{2, 3}, {}, 1, 6},                   {{}, {}, 1, 1},      {{1}, {}, 1, 1},
                                        {{5, 1, 3}, {2, 1}, 2, 15}};
  for (const auto& [a_shape, b_shape, per_a, per_b] : cases) {
    Tensor a = ones(a_shape), b = ones(b_shape);
    a.set_requires_grad(true);
    b.set_requires_grad(true);

    sum(mul(a, b)).backward();

    EXPECT_EQ(a.grad().shape(), a_shape);
    EXPECT_EQ(b.grad().shape(), b_shape);
    EXPECT_TRUE(all_equal(a.grad(), std::vector<double>(static_cast<std::size_t>(a_shape.numel()), per_a))) << a_shape << b_shape;
    EXPECT_TRUE(all_equal(b.grad(), std::vector<double>(static_cast<std::size_t>(b_shape.numel()), per_b))) << a_shape << b_shape;
  }
}

TEST(SumTo, RefusesAShapeThatDoesNotBroadcast) {
  EXPECT_EQ(error_of([] { sum_to(ones({2, 3}), {5, 2, 3}); }), "sum_to: [5, 2, 3] does not broadcast to [2, 3]");
}

}  // namespace
}  // namespace heddle
