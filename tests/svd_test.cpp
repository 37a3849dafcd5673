#include "kernels/svd/svd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "autograd/ops.h"
#include "tests/support/error_of.h"

namespace heddle {
namespace {

struct Svd {
  Tensor u, s, v;
};

Svd svd(const Tensor& w, std::int64_t r) {
  const Svd out = {Tensor::empty({w.size(0), r}, DType::f64), Tensor::empty({r}, DType::f64), Tensor::empty({w.size(1), r}, DType::f64)};
  largest_singular_values({w.view(), out.u.mutable_view(), out.s.mutable_view(), out.v.mutable_view()});
  return out;
}

// U diag(s) V^T.
Tensor product(const Svd& x) { return matmul(mul(x.u, x.s), transpose(x.v, 0, 1)); }

void expect_near(const Tensor& actual, const Tensor& expected, double bound) {
  ASSERT_EQ(actual.shape(), expected.shape());
  const auto a = actual.to_doubles(), e = expected.to_doubles();
  for (std::size_t i = 0; i < e.size(); ++i) ASSERT_NEAR(a[i], e[i], bound) << i;
}

// Values up to 5, errors near 1e-16 times their squares' ratio, which is below 1e3 here.
constexpr double kBound = 1e-12;

// [[0, -2], [3, 0], [0, 0]]: the rows are orthogonal, with lengths 2 and 3.
TEST(Svd, OfOrthogonalRowsAreTheirLengths) {
  const Tensor w = Tensor::from_vector<double>({0, -2, 3, 0, 0, 0}, {3, 2});

  const Svd all = svd(w, 2), one = svd(w, 1);

  expect_near(all.s, Tensor::from_vector<double>({3, 2}, {2}), kBound);
  expect_near(product(all), w, kBound);
  expect_near(product(one), Tensor::from_vector<double>({0, 0, 3, 0, 0, 0}, {3, 2}), kBound);
}

TEST(Svd, VectorsAreOrthonormalAndGiveTheMatrixBack) {
  Generator generator{1};
  for (const Shape& shape : {Shape{7, 4}, Shape{4, 7}, Shape{5, 5}, Shape{1, 6}}) {
    const Tensor w = normal(shape, 0, 1, generator, DType::f64);
    const std::int64_t r = std::min(shape[0], shape[1]);

    const Svd all = svd(w, r);

    const Tensor eye = matmul(transpose(all.u, 0, 1), all.u);
    expect_near(product(all), w, kBound);
    expect_near(matmul(transpose(all.v, 0, 1), all.v), eye, kBound);
    for (std::int64_t i = 0; i < r; ++i) EXPECT_NEAR(eye.to_doubles()[static_cast<std::size_t>(i * r + i)], 1, kBound);
  }
}

TEST(Svd, OfAMatrixOfLowRankEndsInZeros) {
  const Tensor w = matmul(Tensor::from_vector<double>({1, 2, -2}, {3, 1}), Tensor::from_vector<double>({3, 0, 4, 0}, {1, 4}));

  const Svd all = svd(w, 3);

  expect_near(all.s, Tensor::from_vector<double>({15, 0, 0}, {3}), kBound);
  expect_near(product(all), w, kBound);
  expect_near(svd(Tensor::zeros({2, 3}, DType::f64), 2).s, Tensor::zeros({2}, DType::f64), 0);
}

TEST(Svd, WhatCannotBeSolvedIsRefused) {
  EXPECT_EQ(test::error_of([] { svd(Tensor::zeros({2, 3}, DType::f64), 3); }),
            "svd: 3 values of [2, 3] need u [2, 3] and v [3, 3] with r <= 2, got [2, 3] and [3, 3]");
  EXPECT_EQ(test::error_of([] { svd(Tensor::zeros({2, 3}), 1); }), "svd: operands must be dense float64 on the CPU, got float32 [2, 3] on cpu");
  EXPECT_EQ(test::error_of([] { svd(Tensor::full({2, 3}, std::numeric_limits<double>::infinity(), DType::f64), 1); }),
            "svd: the matrix [2, 3] holds NaN or infinity");
}

}  // namespace
}  // namespace heddle
