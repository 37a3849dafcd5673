#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/ops.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_close;
using test::all_equal;
using test::error_of;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kExact = 1e-15;  // a few roundings of values near 1

Tensor logits_of(const std::vector<double>& values, const Shape& shape) {
  return Tensor::from_vector(values, shape).set_requires_grad(true);
}
Tensor labels_of(const std::vector<std::int64_t>& labels) {
  return Tensor::from_vector(labels, {static_cast<std::int64_t>(labels.size())});
}

const double kLog3 = std::log(3.0);

TEST(CrossEntropy, OfKnownProbabilities) {
  // Row 0: probabilities 1/4, 3/4, label 1. Row 1: 1/2, 1/2, label 0. Losses ln(4/3) and ln 2.
  const Tensor logits = logits_of({0, kLog3, 5, 5}, {2, 2});

  const Tensor loss = cross_entropy(logits, labels_of({1, 0}));
  loss.backward();

  EXPECT_EQ(loss.shape(), Shape{});
  EXPECT_NEAR(loss.item(), (std::log(4.0 / 3.0) + std::log(2.0)) / 2, kExact);
  EXPECT_TRUE(all_close(logits.grad(), {0.125, -0.125, -0.25, 0.25}, kExact));  // (p - onehot) / 2
}

TEST(CrossEntropy, SumIsTheMeanTimesTheValidLabels) {
  const Tensor logits = logits_of({0, kLog3, 7, -7, 5, 5}, {3, 2});
  const Tensor labels = labels_of({1, -100, 0});

  const double sum_loss = cross_entropy(logits, labels, {.reduction = LossReduction::sum}).item();

  EXPECT_NEAR(sum_loss, std::log(4.0 / 3.0) + std::log(2.0), kExact);
  EXPECT_NEAR(cross_entropy(logits, labels).item(), sum_loss / 2, kExact);
}

TEST(CrossEntropy, IgnoredRowsHaveExactlyZeroGradient) {
  for (const std::int64_t ignored : {-100, 0, 9}) {  // no class, a class, beyond the classes
    const Tensor logits = logits_of({0, kLog3, 7, -7, 5, 5}, {3, 2});
    const Tensor labels = labels_of({1, ignored, 1});

    scale(cross_entropy(logits, labels, {.reduction = LossReduction::sum, .ignore_index = ignored}), 2.0).backward();

    EXPECT_TRUE(all_close(logits.grad(), {0.5, -0.5, 0, 0, 1, -1}, 2 * kExact)) << ignored;
    EXPECT_TRUE(all_equal(slice(logits.grad(), 0, 1, 2), {0, 0})) << ignored;
  }
}

TEST(CrossEntropy, AllLabelsIgnoredIsZeroWithZeroGradient) {
  for (const LossReduction reduction : {LossReduction::mean, LossReduction::sum}) {
    const Tensor logits = Tensor::full({1, 5, 10}, 3.0).set_requires_grad(true);

    const Tensor loss = cross_entropy(logits, Tensor::full({1, 5}, -100, DType::i64), {.reduction = reduction});
    loss.backward();

    EXPECT_EQ(loss.item(), 0.0);
    EXPECT_TRUE(all_equal(logits.grad(), std::vector<double>(50, 0.0)));
  }
}

TEST(CrossEntropy, SurvivesALongRowOfMinusInfinityButOne) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    constexpr std::int64_t V = 100000;
    std::vector<double> values(V, -kInf);
    values[50000] = 10.0;
    const Tensor logits = cast(Tensor::from_vector(values, {1, V}), dtype).set_requires_grad(true);

    const Tensor loss = cross_entropy(logits, labels_of({50000}));
    loss.backward();

    EXPECT_EQ(loss.item(), 0.0) << dtype;
    EXPECT_TRUE(all_equal(logits.grad(), std::vector<double>(V, 0.0))) << dtype;
  }
}

TEST(CrossEntropy, LabelOnAnImpossibleClassIsInfiniteWithAFiniteGradient) {
  const Tensor logits = logits_of({0, -kInf, 0, -kInf, -kInf, -kInf}, {2, 3});

  const Tensor loss = cross_entropy(logits, labels_of({1, 2}), {.reduction = LossReduction::sum});
  loss.backward();

  EXPECT_EQ(loss.item(), kInf);
  EXPECT_TRUE(all_close(logits.grad(), {0.5, -1, 0.5, 0, 0, -1}, kExact));  // p - onehot, with p = 0 where nothing is possible
}

TEST(CrossEntropy, HalfLogitsGiveAFloatLoss) {
  const Tensor logits = cast(Tensor::from_vector<double>({0, 0, 100, 0}, {2, 2}), DType::bf16).set_requires_grad(true);

  const Tensor loss = cross_entropy(logits, labels_of({0, 1}));
  loss.backward();

  EXPECT_EQ(loss.dtype(), DType::f32);
  EXPECT_NEAR(loss.item(), (std::log(2.0) + 100.0) / 2, 4e-6);  // one float32 rounding of 50.3
  EXPECT_TRUE(all_equal(logits.grad(), {-0.25, 0.25, 0.5, -0.5}));
}

TEST(CrossEntropy, ReadsTransposedLogits) {
  const Tensor base = logits_of({0, 5, kLog3, 5}, {2, 2});

  cross_entropy(transpose(base, 0, 1), labels_of({1, 0})).backward();

  EXPECT_TRUE(all_close(base.grad(), {0.125, -0.25, -0.125, 0.25}, kExact));  // that of OfKnownProbabilities, transposed
}

TEST(CrossEntropy, RefusesLabelsOutsideTheClassesNamingLabelAndPosition) {
  const Tensor logits = Tensor::zeros({2, 3});
  EXPECT_EQ(error_of([&] { cross_entropy(logits, labels_of({2, 3})); }),
            "cross_entropy: label 3 at position 1 is outside [0, 3) and is not ignore_index -100");
  EXPECT_EQ(error_of([&] { cross_entropy(logits, labels_of({-1, 0})); }),
            "cross_entropy: label -1 at position 0 is outside [0, 3) and is not ignore_index -100");
  EXPECT_EQ(error_of([&] { cross_entropy(logits, labels_of({0, 1, 2})); }),
            "cross_entropy: labels must be int64 [2] on cpu for logits [2, 3], got int64 [3] on cpu");
}

TEST(CrossEntropy, NoRowsIsZero) {
  EXPECT_EQ(cross_entropy(Tensor::zeros({0, 3}), labels_of({})).item(), 0.0);
  EXPECT_EQ(error_of([] { cross_entropy(Tensor::zeros({2, 0}), labels_of({0, 0})); }),
            "cross_entropy: logits must be floating point [..., V] with V >= 1, got float32 [2, 0] on cpu");
}

}  // namespace
}  // namespace heddle
