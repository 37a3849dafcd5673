#include <gtest/gtest.h>

#include <limits>

#include "autograd/ops.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_close;
using test::all_equal;
using test::error_of;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kFourDecimals = 5e-5;  // half a unit of the last digit written

Tensor doubles(const std::vector<double>& values, const Shape& shape) { return Tensor::from_vector(values, shape); }

TEST(Softmax, OfOneTwoThreeSixTwoOne) {
  // exp(x - 6) = [e^-5 e^-4 e^-3 1 e^-4 e^-5], whose sum is 1.0999.
  const Tensor x = doubles({1, 2, 3, 6, 2, 1}, {6});

  EXPECT_TRUE(all_close(softmax(x), {0.0061, 0.0167, 0.0453, 0.9092, 0.0167, 0.0061}, kFourDecimals));
}

TEST(Softmax, OfLargeHalfLogitsDoesNotOverflow) {
  // e^12 = 162754.8 is above the largest float16, 65504; exp(x - 12) / sum = [4.5e-5, 3.35e-4, 0.99962].
  const Tensor x = cast(doubles({2, 4, 12}, {3}), DType::f16);

  const std::vector<double> y = softmax(x).to_doubles();

  EXPECT_NEAR(y[0], 0.000045, 5e-7);
  EXPECT_NEAR(y[1], 0.000335, 5e-7);
  EXPECT_NEAR(y[2], 0.99962, 0x1p-12);  // half a float16 step below 1
}

TEST(Softmax, SliceOfMinusInfinityGivesZeroAndZeroGradient) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Tensor x = cast(doubles({-kInf, -kInf, 1, 1}, {2, 2}), dtype);
    x.set_requires_grad(true);

    const Tensor y = softmax(x);
    y.backward(cast(doubles({3, 5, 1, 2}, {2, 2}), dtype));

    EXPECT_TRUE(all_equal(y, {0, 0, 0.5, 0.5})) << dtype;
    EXPECT_TRUE(all_equal(x.grad(), {0, 0, -0.25, 0.25})) << dtype;  // 0.5 * (dout - 1.5)
  }
}

TEST(Softmax, MinusInfinityWeighsExactlyZero) {
  std::vector<double> logits(40, -kInf);
  logits[17] = -3.0;
  std::vector<double> expected(40, 0.0);
  expected[17] = 1.0;

  EXPECT_TRUE(all_equal(softmax(doubles(logits, {40})), expected));
  EXPECT_TRUE(all_equal(softmax(cast(doubles(logits, {40}), DType::f32)), expected));
}

TEST(Softmax, NanIsNotHiddenByMinusInfinity) {
  for (const std::vector<double>& row : {std::vector<double>{-kInf, kNan, -kInf}, {kNan, -kInf, -kInf}}) {
    EXPECT_TRUE(std::isnan(sum(softmax(doubles(row, {3}))).item()));
    EXPECT_TRUE(std::isnan(sum(softmax(cast(doubles(row, {3}), DType::f32))).item()));
  }
}

TEST(Softmax, AlongAnyDimensionOfAnyLayoutEqualsTheLastDimension) {
  Generator generator{.seed = 3};
  const Tensor base = normal({3, 5, 4, 2}, 0.0, 2.0, generator, DType::f64);
  constexpr double kBound = 1e-15;  // values up to 1; one rounding of a different summation order
  for (const Tensor& x : {base, permute(base, {3, 1, 0, 2}), slice(base, 1, 1, 4)}) {
    for (int dim = 0; dim < 4; ++dim) {
      const Tensor last = contiguous(transpose(x, dim, 3));

      EXPECT_TRUE(all_close(softmax(x, dim), transpose(softmax(last), dim, 3).to_doubles(), kBound)) << "dim " << dim;
      EXPECT_TRUE(all_close(log_softmax(x, dim), transpose(log_softmax(last), dim, 3).to_doubles(), 16 * kBound)) << "dim " << dim;
    }
  }
}

TEST(LogSoftmax, OfLogarithmsIsTheirNormalisedLogarithm) {
  // exp of the input is 1, 3, 4, whose sum is 8.
  const Tensor x = doubles({0.0, std::log(3.0), std::log(4.0)}, {3});

  EXPECT_TRUE(all_close(log_softmax(x), {-std::log(8.0), std::log(3.0 / 8.0), -std::log(2.0)}, 1e-15));
}

TEST(LogSoftmax, FarAwayLogitsStayFinite) {
  EXPECT_TRUE(all_equal(log_softmax(Tensor::from_vector<float>({0.0f, -1000.0f}, {2})), {0.0, -1000.0}));
  EXPECT_TRUE(all_equal(log_softmax(doubles({-kInf, -kInf}, {2})), {-kInf, -kInf}));
}

TEST(Softmax, NoRowsWorkAndEmptyRowsAreRefused) {
  EXPECT_EQ(softmax(Tensor::zeros({0, 4})).shape(), Shape({0, 4}));
  EXPECT_EQ(error_of([] { softmax(Tensor::zeros({4, 0})); }), "softmax: dimension 1 of [4, 0] has no elements");
  EXPECT_EQ(error_of([] { softmax(Tensor::scalar(1.0)); }), "softmax: dimension -1 is out of range for rank 0");
}

}  // namespace
}  // namespace heddle
