#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/gemm/gemm.h"
#include "kernels/runtime/parallel.h"
#include "tests/support/tensors.h"

namespace heddle {
namespace {

using test::error_of;
using test::random_leaf;
using test::random_tensor;

// The same at most 6 terms, of normal numbers or products of two, added in another order: 6 roundings of sums below 30.
constexpr double kReordered = 6 * 16 * std::numeric_limits<double>::epsilon();

// sum over k of a[i, k] b[k, j], and the same of the absolute values, for two matrices.
struct Naive {
  std::vector<double> sums, magnitudes;
};

Naive naive_product(const Tensor& a, const Tensor& b) {
  const std::int64_t M = a.size(0), K = a.size(1), N = b.size(1);
  const std::vector<double> left = a.to_doubles(), right = b.to_doubles();
  Naive out{std::vector<double>(M * N), std::vector<double>(M * N)};
  for (std::int64_t i = 0; i < M; ++i)
    for (std::int64_t j = 0; j < N; ++j)
      for (std::int64_t k = 0; k < K; ++k) {
        const double term = left[i * K + k] * right[k * N + j];
        out.sums[i * N + j] += term;
        out.magnitudes[i * N + j] += std::abs(term);
      }
  return out;
}

// A sum of K rounded products of unit roundoff u differs from the exact one by at most about K u sum |a b|, in any order
// (Higham 2002, section 3.1); a result of a narrower dtype is rounded once more.
void expect_product(const Tensor& product, const Tensor& a, const Tensor& b) {
  const double compute_unit = a.dtype() == DType::f64 ? 0x1p-53 : 0x1p-24;
  const double round_unit = product.dtype() == DType::bf16 ? 0x1p-8 : product.dtype() == DType::f16 ? 0x1p-11 : 0.0;
  const Naive expected = naive_product(a, b);
  const std::vector<double> got = product.to_doubles();
  ASSERT_EQ(got.size(), expected.sums.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], expected.sums[i],
                (static_cast<double>(a.size(1)) + 1.0) * compute_unit * expected.magnitudes[i] + round_unit * std::abs(expected.sums[i]))
        << "element " << i;
}

// The same matrix dense, transposed in memory, as a slice of a wider one, and with no unit stride at all.
std::vector<Tensor> layouts_of(const Tensor& dense) {
  const std::int64_t rows = dense.size(0), cols = dense.size(1);
  const Tensor columns = Tensor::empty({cols, rows}, dense.dtype());
  const Tensor wide = Tensor::full({rows, cols + 3}, NAN, dense.dtype());
  const Tensor sparse = Tensor::full({rows, cols, 2}, NAN, dense.dtype());
  const std::vector<Tensor> views = {dense, transpose(columns, 0, 1), slice(wide, 1, 2, cols + 2), select_index(sparse, 2, 1)};
  for (std::size_t i = 1; i < views.size(); ++i) views[i].copy_(dense);
  return views;
}

TEST(Matmul, EveryLayoutMatchesTheNaiveProduct) {
  const Tensor a = random_tensor({7, 13}, DType::f64, 1), b = random_tensor({13, 5}, DType::f64, 2);
  for (const Tensor& left : layouts_of(a))
    for (const Tensor& right : layouts_of(b)) expect_product(matmul(left, right), a, b);
}

TEST(Matmul, EverySizeMatchesTheNaiveProduct) {
  // Around 1, the vector width, blocks of 6 x 16, the few columns that are summed apart, and blocks of 96 rows, 256 terms and
  // 512 columns.
  for (const auto& [M, K, N] : {std::array<std::int64_t, 3>{1, 1, 1}, {1, 9, 4}, {9, 1, 4}, {4, 9, 1}, {1, 300, 1}, {63, 65, 2},
                                {6, 64, 16}, {7, 64, 17}, {65, 3, 129}, {97, 257, 31}, {95, 512, 9}, {9, 513, 8}, {10, 20, 530}})
    for (DType dtype : {DType::f64, DType::f32}) {
      SCOPED_TRACE(concat_text(M, " x ", K, " x ", N, " ", dtype));
      const Tensor a = random_tensor({M, K}, dtype, 1), b = random_tensor({K, N}, dtype, 2), columns = random_tensor({N, K}, dtype, 2);
      expect_product(matmul(a, b), a, b);
      expect_product(matmul(a, transpose(columns, 0, 1)), a, transpose(columns, 0, 1));
    }
}

TEST(Matmul, SixteenBitInputsAccumulateInFloat) {
  for (DType dtype : {DType::bf16, DType::f16}) {
    SCOPED_TRACE(dtype_name(dtype));
    const Tensor a = random_tensor({5, 500}, dtype, 1), b = random_tensor({500, 3}, dtype, 2);
    expect_product(matmul(a, b), a, b);
    // 1024 ones and 1024 terms of 1/1024: a 16-bit accumulator would lose the small ones.
    const Tensor small = Tensor::full({1024, 1}, 0x1p-10, dtype), one = Tensor::full({1024, 1}, 1.0, dtype);
    const Tensor row = Tensor::full({1, 2048}, 1.0, dtype);
    EXPECT_EQ(cast(matmul(row, concat({one, small}, 0)), DType::f64).item(), dtype == DType::f16 ? 1025.0 : 1024.0);
  }
}

TEST(Matmul, BatchDimensionsBroadcast) {
  const Tensor a = random_tensor({3, 1, 4, 5}, DType::f64, 1), b = random_tensor({2, 5, 6}, DType::f64, 2);

  const Tensor c = matmul(a, b);  // [3, 2, 4, 6]

  ASSERT_EQ(c.shape(), (Shape{3, 2, 4, 6}));
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 2; ++j)
      expect_product(select_index(select_index(c, 0, i), 0, j), select_index(select_index(a, 0, i), 0, 0), select_index(b, 0, j));
}

TEST(Matmul, BroadcastGradientsHaveTheOperandsShape) {
  const Tensor a = random_leaf({3, 1, 4, 5}, 1), b = random_leaf({5, 6}, 2);

  sum(matmul(a, b)).backward();

  EXPECT_EQ(a.grad().shape(), a.shape());
  EXPECT_EQ(b.grad().shape(), b.shape());
  const std::vector<double> row_sums = sum(b.detach(), {1}).to_doubles(), da = a.grad().to_doubles();
  for (std::size_t i = 0; i < da.size(); ++i) EXPECT_NEAR(da[i], row_sums[i % 5], kReordered);
}

TEST(Matmul, EmptyInnerDimensionGivesZero) {
  const Tensor a = random_leaf({2, 3, 0}, 1), b = random_leaf({2, 0, 4}, 2);
  const Tensor c = matmul(a, b);

  sum(c).backward();

  EXPECT_EQ(c.to_doubles(), std::vector<double>(24, 0.0));
  EXPECT_EQ(a.grad().shape(), a.shape());
}

TEST(Matmul, ZeroSizesWork) {
  EXPECT_EQ(matmul(Tensor::zeros({0, 3}), Tensor::zeros({3, 2})).shape(), (Shape{0, 2}));
  EXPECT_EQ(matmul(Tensor::zeros({2, 3}), Tensor::zeros({3, 0})).shape(), (Shape{2, 0}));
  EXPECT_EQ(matmul(Tensor::zeros({0, 2, 3}), Tensor::zeros({3, 4})).shape(), (Shape{0, 2, 4}));
  const Tensor a = random_leaf({0, 3}, 1), b = random_leaf({3, 2}, 2);
  sum(matmul(a, b)).backward();
  EXPECT_EQ(b.grad().to_doubles(), std::vector<double>(6, 0.0));
}

TEST(Matmul, ErrorsNameTheShapes) {
  EXPECT_EQ(error_of([] { matmul(Tensor::zeros({3}), Tensor::zeros({3, 2})); }),
            "matmul: both operands need at least 2 dimensions, got [3] and [3, 2]");
  EXPECT_EQ(error_of([] { matmul(Tensor::zeros({2, 3}), Tensor::zeros({2, 3})); }),
            "matmul: inner sizes differ, [2, 3] x [2, 3]");
  EXPECT_EQ(error_of([] { matmul(Tensor::zeros({2, 3}), Tensor::zeros({3, 2}, DType::f64)); }),
            "matmul: operands differ, float32 [2, 3] on cpu and float64 [3, 2] on cpu; cast or move one");
  EXPECT_EQ(error_of([] { matmul(Tensor::zeros({2, 2, 3}), Tensor::zeros({4, 3, 2})); }),
            "matmul: shapes [2] and [4] do not broadcast; sizes must be equal or 1, aligned on the right");
  EXPECT_EQ(error_of([] { matmul(Tensor::zeros({2, 2}, DType::i64), Tensor::zeros({2, 2}, DType::i64)); }),
            "gemm: no product of int64 into int64; cast the operands first");
}

TEST(Matmul, ResultDoesNotDependOnTheNumberOfThreads) {
  const int threads = num_threads();
  for (const auto& [M, N] : {std::array<std::int64_t, 2>{250, 70}, {70, 250}, {1500, 5}}) {
    const Tensor a = random_tensor({M, 300}, DType::f32, 1), b = transpose(random_tensor({N, 300}, DType::f32, 2), 0, 1);
    set_num_threads(1);
    const Tensor one = matmul(a, b);
    set_num_threads(3);
    const Tensor three = matmul(a, b);
    set_num_threads(threads);

    EXPECT_EQ(one.to_vector<float>(), three.to_vector<float>()) << M << " x " << N;
  }
}

// --- The kernel itself ---

TEST(Gemm, AccumulateAddsToWhatIsThere) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor a = Tensor::full({3, 2}, 2.0, dtype), b = Tensor::full({2, 70}, 3.0, dtype), c = Tensor::full({3, 70}, 1.0, dtype);

    gemm({.a = a.view(), .b = b.view(), .c = c.mutable_view(), .write = Write::accumulate}, device_context(kCpu));

    EXPECT_EQ(c.to_doubles(), std::vector<double>(210, 13.0));
  }
}

TEST(Gemm, ScaleMultipliesTheProductAlone) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (std::int64_t N : {3, 70}) {
      const Tensor a = Tensor::full({20, 2}, 2.0, dtype), b = Tensor::full({2, N}, 3.0, dtype), one = Tensor::full({N}, 1.0, dtype);
      const Tensor added = Tensor::full({20, N}, 1.0, dtype), biased = Tensor::empty({20, N}, dtype);
      for (const Tensor& right : {b, transpose(contiguous(transpose(b, 0, 1)), 0, 1)}) {
        added.fill_(1);
        gemm({.a = a.view(), .b = right.view(), .c = added.mutable_view(), .write = Write::accumulate, .scale = 0.25}, device_context(kCpu));
        gemm({.a = a.view(), .b = right.view(), .c = biased.mutable_view(), .bias = one.view(), .scale = 0.25}, device_context(kCpu));

        EXPECT_EQ(added.to_doubles(), std::vector<double>(static_cast<std::size_t>(20 * N), 4.0)) << dtype << ' ' << N;
        EXPECT_EQ(biased.to_doubles(), std::vector<double>(static_cast<std::size_t>(20 * N), 4.0)) << dtype << ' ' << N;
      }
    }
}

TEST(Gemm, HalfProductsCanBeAddedToAFloatOutput) {
  const Tensor a = Tensor::full({2, 2}, 1.0, DType::bf16), c = Tensor::full({2, 2}, 256.0, DType::f32);

  gemm({.a = a.view(), .b = a.view(), .c = c.mutable_view(), .write = Write::accumulate}, device_context(kCpu));

  EXPECT_EQ(c.to_doubles(), std::vector<double>(4, 258.0));
}

TEST(Gemm, TransposedOutputIsWrittenInPlace) {
  const Tensor a = random_tensor({70, 4}, DType::f64, 1), b = random_tensor({4, 130}, DType::f64, 2);
  const Tensor c = transpose(Tensor::empty({130, 70}, DType::f64), 0, 1);

  gemm({.a = a.view(), .b = b.view(), .c = c.mutable_view()}, device_context(kCpu));

  expect_product(c, a, b);
}

TEST(Gemm, BiasIsAddedToEveryRowWhateverTheLayout) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (std::int64_t N : {3, 35}) {
      SCOPED_TRACE(concat_text(dtype, " N ", N));
      const Tensor a = Tensor::full({20, 2}, 2.0, dtype), b = Tensor::full({2, N}, 3.0, dtype), bias = test::counting({N}, dtype);
      const Tensor rows = Tensor::empty({20, N}, dtype), columns = transpose(Tensor::empty({N, 20}, dtype), 0, 1);
      for (const Tensor& c : {rows, columns}) {
        gemm({.a = a.view(), .b = b.view(), .c = c.mutable_view(), .bias = bias.view()}, device_context(kCpu));

        const std::vector<double> got = c.to_doubles();
        for (std::int64_t i = 0; i < c.numel(); ++i) ASSERT_EQ(got[i], 12.0 + static_cast<double>(i % N)) << "element " << i;
      }
    }
}

// --- linear ---

TEST(Linear, AddsTheBiasToEveryRow) {
  const Tensor x = random_tensor({2, 3, 5}, DType::f64, 1), w = random_tensor({4, 5}, DType::f64, 2);
  const Tensor bias = random_tensor({4}, DType::f64, 3);

  const Tensor y = linear(x, w, bias);

  ASSERT_EQ(y.shape(), (Shape{2, 3, 4}));
  const std::vector<double> expected = add(matmul(x, transpose(w, 0, 1)), bias).to_doubles(), got = y.to_doubles();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], kReordered);
}

TEST(Linear, GradientsEqualThoseOfTheSeparateOps) {
  const Tensor x = random_leaf({2, 3, 5}, 1), w = random_leaf({4, 5}, 2), bias = random_leaf({4}, 3);
  const Tensor cotangent = random_tensor({2, 3, 4}, DType::f64, 4);
  linear(x, w, bias).backward(cotangent);
  std::vector<std::vector<double>> fused;
  for (const Tensor& leaf : {x, w, bias}) fused.push_back(leaf.grad().to_doubles()), leaf.set_grad({});

  add(matmul(x, transpose(w, 0, 1)), bias).backward(cotangent);

  int i = 0;
  for (const Tensor& leaf : {x, w, bias}) {
    const std::vector<double> apart = leaf.grad().to_doubles();
    for (std::size_t e = 0; e < apart.size(); ++e) EXPECT_NEAR(fused[i][e], apart[e], kReordered);
    ++i;
  }
}

TEST(Linear, WeightThatIsNotALeafReceivesItsGradient) {
  const Tensor x = random_tensor({3, 5}, DType::f64, 1), w = random_leaf({4, 5}, 2), bias = random_leaf({4}, 3);

  sum(linear(x, scale(w, 2.0), scale(bias, 3.0))).backward();

  EXPECT_EQ(bias.grad().to_doubles(), std::vector<double>(4, 9.0));
  const std::vector<double> columns = sum(x, {0}).to_doubles(), dw = w.grad().to_doubles();
  for (std::size_t i = 0; i < dw.size(); ++i) EXPECT_NEAR(dw[i], 2.0 * columns[i % 5], kReordered);
}

TEST(Linear, FrozenInputsReceiveNothing) {
  const Tensor x = random_leaf({3, 5}, 1), w = random_tensor({4, 5}, DType::f64, 2);

  sum(linear(x, w)).backward();

  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(w.grad().defined());
}

TEST(Linear, VectorsAndZeroRowsWork) {
  const Tensor w = random_leaf({4, 5}, 2), bias = random_leaf({4}, 3);
  EXPECT_EQ(linear(random_tensor({5}), w, bias).shape(), Shape{4});

  const Tensor y = linear(Tensor::zeros({0, 5}, DType::f64), w, bias);
  sum(y).backward();

  EXPECT_EQ(y.shape(), (Shape{0, 4}));
  EXPECT_EQ(w.grad().to_doubles(), std::vector<double>(20, 0.0));
  EXPECT_EQ(bias.grad().to_doubles(), std::vector<double>(4, 0.0));
  EXPECT_EQ(linear(Tensor::zeros({3, 0}), Tensor::zeros({2, 0}), Tensor::full({2}, 1.5)).to_doubles(), std::vector<double>(6, 1.5));
}

TEST(Linear, ErrorsNameTheShapes) {
  EXPECT_EQ(error_of([] { linear(Tensor::zeros({2, 3}), Tensor::zeros({3, 2})); }),
            "linear: x [2, 3] does not fit weight [3, 2]; the last size of x must be the second of weight");
  EXPECT_EQ(error_of([] { linear(Tensor::zeros({2, 3}), Tensor::zeros({4, 3}), Tensor::zeros({3})); }),
            "linear: bias must be float32 [4], got float32 [3] on cpu");
}

// Products of the same numbers, in one matrix or in two: a few roundings of values near 1 apart.
TEST(Linears, JoinedWeightsGiveWhatSeparateOnesDo) {
  Generator generator{.seed = 8};
  const Tensor all = normal({9, 4}, 0.0, 1.0, generator, DType::f64), cotangent = normal({2, 3, 9}, 0.0, 1.0, generator, DType::f64);
  const Tensor values = normal({2, 3, 4}, 0.0, 1.0, generator, DType::f64);
  const auto run = [&](bool is_joined) {
    std::vector<Tensor> weights = {slice(all, 0, 0, 5), slice(all, 0, 5, 9)};
    if (!is_joined) weights = {weights[0].clone(), weights[1].clone()};
    const Tensor x = values.clone().set_requires_grad(true);
    const std::vector<Tensor> out = linears(x, weights, {Tensor(), Tensor()});
    EXPECT_EQ(out[0].storage() == out[1].storage(), is_joined);
    concat(out, 2).backward(cotangent);
    return std::vector{concat(out, 2).to_doubles(), x.grad().to_doubles()};
  };

  const auto joined = run(true), separate = run(false);

  for (std::size_t i = 0; i < joined.size(); ++i)
    for (std::size_t j = 0; j < joined[i].size(); ++j) EXPECT_NEAR(joined[i][j], separate[i][j], 1e-14);
}

}  // namespace
}  // namespace heddle
