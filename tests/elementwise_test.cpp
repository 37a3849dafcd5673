#include "kernels/elementwise/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numbers>

#include "tests/support/tensors.h"

namespace heddle {
namespace {

using test::counting;
using test::error_of;
using test::random_leaf;
using test::random_tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::vector<DType> kFloats = {DType::f64, DType::f32, DType::bf16, DType::f16};

// Relative distance of 1 to the next value of the type the op is rounded to.
double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-52;
    case DType::f32: return 0x1p-23;
    case DType::f16: return 0x1p-10;
    default: return 0x1p-7;
  }
}

// Half the spacing of the subnormal numbers, where rounding has an absolute error.
double smallest(DType dtype) { return dtype == DType::f16 ? 0x1p-25 : 0.0; }

// --- Values ---

struct UnaryCase {
  const char* name;
  std::function<Tensor(const Tensor&)> op;
  std::function<double(double)> reference;
  bool positive_only = false;
};

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }

const std::vector<UnaryCase>& unary_cases() {
  static const std::vector<UnaryCase> cases = {
      {"neg", neg, [](double x) { return -x; }},
      {"scale", [](const Tensor& x) { return scale(x, -1.5); }, [](double x) { return -1.5 * x; }},
      {"add_scalar", [](const Tensor& x) { return add_scalar(x, 0.75); }, [](double x) { return x + 0.75; }},
      {"pow 2", [](const Tensor& x) { return pow(x, 2.0); }, [](double x) { return x * x; }},
      {"pow 3", [](const Tensor& x) { return pow(x, 3.0); }, [](double x) { return x * x * x; }},
      {"pow -0.5", [](const Tensor& x) { return pow(x, -0.5); }, [](double x) { return 1.0 / std::sqrt(x); }, true},
      {"exp", exp, [](double x) { return std::exp(x); }},
      {"log", log, [](double x) { return std::log(x); }, true},
      {"sqrt", sqrt, [](double x) { return std::sqrt(x); }, true},
      {"relu", relu, [](double x) { return std::max(x, 0.0); }},
      {"gelu", gelu, [](double x) { return x * normal_cdf(x); }},
      {"gelu_tanh", gelu_tanh,
       [](double x) { return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x))); }},
      {"silu", silu, [](double x) { return x / (1.0 + std::exp(-x)); }},
  };
  return cases;
}

TEST(Elementwise, UnaryValuesMatchTheirFormulaInEveryDtype) {
  // One rounding to the result's dtype, and a few units in the last place of the type computed in for the vectorised exp,
  // log, erf and tanh. The activations' small results come from terms of size |x|, which bounds their absolute error.
  constexpr double kUnits = 8.0;
  for (const UnaryCase& test : unary_cases())
    for (DType dtype : kFloats) {
      SCOPED_TRACE(concat_text(test.name, " ", dtype));
      Tensor x = scale(random_tensor({7, 41}), 2.0);
      if (test.positive_only) x = add_scalar(mul(x, x), 0.01);
      x = cast(x, dtype);
      const double unit = epsilon(dtype == DType::f64 ? DType::f64 : DType::f32);
      const std::vector<double> in = x.to_doubles(), out = test.op(x).to_doubles();
      for (std::size_t i = 0; i < in.size(); ++i) {
        const double expected = test.reference(in[i]);
        const double bound = 0.5 * epsilon(dtype) * std::abs(expected) + kUnits * unit * (std::abs(expected) + std::abs(in[i]));
        ASSERT_NEAR(out[i], expected, bound + smallest(dtype)) << "x = " << in[i];
      }
    }
}

TEST(Elementwise, BinaryValuesAreRoundedOnce) {
  for (DType dtype : kFloats) {
    SCOPED_TRACE(dtype_name(dtype));
    const Tensor a = random_tensor({3, 50}, dtype, 1), b = random_tensor({3, 50}, dtype, 2);
    const Tensor wide_a = cast(a, DType::f64), wide_b = cast(b, DType::f64);
    const auto exact = [&](Tensor (*op)(const Tensor&, const Tensor&)) {
      std::vector<double> rounded = cast(op(wide_a, wide_b), dtype).to_doubles();
      return std::pair{op(a, b).to_doubles(), std::move(rounded)};
    };
    // A float holds the sum and the product of two 16-bit floats exactly, or rounds far below their last bit.
    for (auto op : {add, sub, mul}) EXPECT_EQ(exact(op).first, exact(op).second);
    const auto [quotient, expected] = exact(div);
    for (std::size_t i = 0; i < quotient.size(); ++i)
      EXPECT_NEAR(quotient[i], expected[i], epsilon(dtype) * std::abs(expected[i]));
  }
}

TEST(Elementwise, SwigluIsSiluTimesUp) {
  for (DType dtype : {DType::f64, DType::f32}) {
    const Tensor gate = random_tensor({5, 33}, dtype, 1), up = random_tensor({5, 33}, dtype, 2);
    const std::vector<double> fused = swiglu(gate, up).to_doubles(), apart = mul(silu(gate), up).to_doubles();
    for (std::size_t i = 0; i < fused.size(); ++i)
      EXPECT_NEAR(fused[i], apart[i], 2.0 * epsilon(dtype) * std::abs(apart[i]));
  }
}

// --- Special values ---

std::vector<double> applied(const std::function<Tensor(const Tensor&)>& op, const std::vector<double>& values, DType dtype) {
  return op(cast(Tensor::from_vector(values, {static_cast<std::int64_t>(values.size())}), dtype)).to_doubles();
}

TEST(Elementwise, LimitsOfExpLogSqrt) {
  for (DType dtype : {DType::f64, DType::f32}) {
    SCOPED_TRACE(dtype_name(dtype));
    EXPECT_EQ(applied(exp, {-kInfinity, kInfinity, 0.0, 1000.0, -1000.0}, dtype),
              (std::vector<double>{0.0, kInfinity, 1.0, kInfinity, 0.0}));
    EXPECT_EQ(applied(log, {0.0, kInfinity, 1.0}, dtype), (std::vector<double>{-kInfinity, kInfinity, 0.0}));
    EXPECT_EQ(applied(sqrt, {0.0, kInfinity, 4.0}, dtype), (std::vector<double>{0.0, kInfinity, 2.0}));
    EXPECT_TRUE(std::isnan(applied(log, {-1.0}, dtype)[0]));
    EXPECT_TRUE(std::isnan(applied(sqrt, {-1.0}, dtype)[0]));
  }
}

TEST(Elementwise, NanStaysNanThroughEveryOp) {
  for (const UnaryCase& test : unary_cases())
    for (DType dtype : kFloats) EXPECT_TRUE(std::isnan(applied(test.op, {NAN}, dtype)[0])) << test.name << ' ' << dtype;
  EXPECT_TRUE(std::isnan(max(Tensor::from_vector<double>({1.0, NAN, 2.0}, {3}), 0).item()));
}

TEST(Elementwise, ActivationsAreFiniteFarOut) {
  for (DType dtype : {DType::f64, DType::f32})
    for (const auto& op : {gelu, gelu_tanh, silu, relu})
      EXPECT_EQ(applied(op, {-1e4, 1e4}, dtype), (std::vector<double>{0.0, 1e4})) << dtype;
}

TEST(Elementwise, ReluGradientAtZeroIsZero) {
  const Tensor x = Tensor::from_vector<double>({-1.0, 0.0, -0.0, 2.0}, {4}).set_requires_grad(true);

  sum(relu(x)).backward();

  EXPECT_EQ(x.grad().to_doubles(), (std::vector<double>{0, 0, 0, 1}));
}

TEST(Elementwise, PowGradientAtZeroIsFinite) {
  for (double exponent : {0.0, 1.0, 2.0, 3.0}) {
    const Tensor x = Tensor::scalar(0.0, DType::f64).set_requires_grad(true);
    pow(x, exponent).backward();
    EXPECT_EQ(x.grad().item(), exponent == 1.0 ? 1.0 : 0.0) << exponent;
  }
}

// --- where, masked_fill ---

TEST(Elementwise, WhereSelectsGradientsInsteadOfMultiplying) {
  const Tensor x = Tensor::from_vector<double>({-1.0, -4.0, 4.0}, {3}).set_requires_grad(true);
  const Tensor is_positive = Tensor::from_vector<bool>({false, false, true}, {3});

  sum(where(is_positive, Tensor::full({3}, NAN, DType::f64), x)).backward();
  EXPECT_EQ(x.grad().to_doubles(), (std::vector<double>{1, 1, 0}));

  x.set_grad({});
  const Tensor infinite = Tensor::full({3}, kInfinity, DType::f64);
  sum(mul(where(is_positive, x, Tensor::scalar(0.0, DType::f64)), where(is_positive, x.detach(), infinite))).backward();
  EXPECT_EQ(x.grad().to_doubles(), (std::vector<double>{0, 0, 4}));  // an infinite dout times 0 would be NaN
}

TEST(Elementwise, WhereWorksOnIntegers) {
  const Tensor condition = Tensor::from_vector<bool>({true, false}, {2, 1});

  EXPECT_EQ(where(condition, counting({3}, DType::i64), Tensor::scalar(-100.0, DType::i64)).to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{0, 1, 2, -100, -100, -100}));
}

TEST(Elementwise, MaskedFillBroadcastsTheMask) {
  const Tensor x = random_leaf({2, 3});
  const Tensor mask = Tensor::from_vector<bool>({false, true, false}, {3});
  const Tensor y = masked_fill(x, mask, -kInfinity);

  sum(y, {0}).backward(Tensor::full({3}, 1.0, DType::f64));

  EXPECT_EQ(y.to_doubles()[1], -kInfinity);
  EXPECT_EQ(y.to_doubles()[5], x.to_doubles()[5]);
  EXPECT_EQ(x.grad().to_doubles(), (std::vector<double>{1, 0, 1, 1, 0, 1}));
}

// --- Broadcasting ---

TEST(Elementwise, BroadcastGradientsHaveTheOperandsShape) {
  const std::vector<std::pair<Shape, Shape>> pairs = {
      {{2, 1, 4, 64}, {2, 1, 4, 1}}, {{3, 4}, {4}}, {{1, 4}, {3, 1}}, {{2, 3}, {}},  {{}, {1}},
      {{1}, {5}},                    {{2, 3}, {1, 1}}, {{4, 1, 3}, {2, 1}}, {{2, 0, 3}, {3}}, {{0}, {1}}};
  for (const auto& [shape_a, shape_b] : pairs)
    for (auto op : {add, sub, mul, div}) {
      SCOPED_TRACE(concat_text(shape_a, " with ", shape_b));
      const Tensor a = random_leaf(shape_a, 1), b = random_leaf(shape_b, 2);
      const Tensor y = op(a, b);

      y.backward(Tensor::full(y.shape(), 1.0, DType::f64));

      EXPECT_EQ(y.shape(), broadcast_shapes(shape_a, shape_b, "test"));
      EXPECT_EQ(a.grad().shape(), shape_a);
      EXPECT_EQ(b.grad().shape(), shape_b);
      if (op != add) continue;
      const std::int64_t uses = b.numel() == 0 ? 0 : y.numel() / b.numel();  // of each element of b
      EXPECT_EQ(b.grad().to_doubles(), std::vector<double>(static_cast<std::size_t>(b.numel()), static_cast<double>(uses)));
    }
}

TEST(Elementwise, BroadcastErrorsNameTheOpAndTheShapes) {
  EXPECT_EQ(error_of([] { add(Tensor::zeros({2, 3}), Tensor::zeros({2})); }),
            "add: shapes [2, 3] and [2] do not broadcast; sizes must be equal or 1, aligned on the right");
  EXPECT_EQ(error_of([] { mul(Tensor::zeros({2}), Tensor::zeros({2}, DType::f64)); }),
            "mul: dtypes differ, float32 and float64; cast one (there is no promotion)");
  EXPECT_EQ(error_of([] { add(counting({2}, DType::i64), counting({2}, DType::i64)); }),
            "add: needs floating-point tensors, got int64 [2] on cpu");
  EXPECT_EQ(error_of([] { exp(counting({2}, DType::i32)); }), "exp: needs a floating-point tensor, got int32 [2] on cpu");
  EXPECT_EQ(error_of([] { swiglu(Tensor::zeros({2}), Tensor::zeros({3})); }),
            "swiglu: gate is [2], up is [3]; they must be equal");
  EXPECT_EQ(error_of([] { where(Tensor::zeros({2}), Tensor::zeros({2}), Tensor::zeros({2})); }),
            "where: the condition must be bool, got float32");
  EXPECT_EQ(error_of([] { masked_fill(Tensor::zeros({3}), Tensor::zeros({2, 3}, DType::boolean), 0.0); }),
            "masked_fill: mask [2, 3] does not broadcast to x [3]");
}

// --- Strides ---

// Views of one [6, 10] buffer whose values are those of `dense`, with every kind of stride. Runs longer and shorter than
// a chunk of the kernel.
std::vector<Tensor> layouts_of(const Tensor& dense) {
  const std::int64_t rows = dense.size(0), cols = dense.size(1);
  const Tensor columns = Tensor::empty({cols, rows}, dense.dtype());
  const Tensor wide = Tensor::full({rows + 2, cols + 3}, NAN, dense.dtype());
  const Tensor every_second = Tensor::full({rows, cols, 2}, NAN, dense.dtype());
  const std::vector<Tensor> views = {transpose(columns, 0, 1), slice(slice(wide, 0, 1, rows + 1), 1, 2, cols + 2),
                                     select_index(every_second, 2, 1)};
  for (const Tensor& view : views) view.copy_(dense);
  return views;
}

TEST(Elementwise, ResultDoesNotDependOnStrides) {
  for (const Shape& shape : {Shape{5, 3}, Shape{3, 300}, Shape{300, 2}, Shape{129, 127}})
    for (DType dtype : kFloats) {
      SCOPED_TRACE(concat_text(shape, " ", dtype));
      const Tensor a = random_tensor(shape, dtype, 1), b = random_tensor(shape, dtype, 2);
      const std::vector<double> expected = mul(a, b).to_doubles(), activated = silu(a).to_doubles();
      for (const Tensor& view : layouts_of(a)) {
        EXPECT_EQ(mul(view, b).to_doubles(), expected);
        EXPECT_EQ(mul(b, view).to_doubles(), expected);
        EXPECT_EQ(silu(view).to_doubles(), activated);
        EXPECT_EQ(cast(view, DType::f64).to_doubles(), a.to_doubles());
      }
    }
}

TEST(Elementwise, StridedDestinationIsFilledAndItsSurroundingsAreNot) {
  const Tensor wide = Tensor::full({4, 5}, -1.0, DType::f64);

  slice(wide, 1, 1, 3).copy_(Tensor::full({4, 2}, 2.0, DType::f64));

  EXPECT_EQ(sum(wide).item(), 4 * (-3.0 + 4.0));
}

TEST(Elementwise, RepeatedElementsAreRead) {
  const Tensor x = expand(Tensor::from_vector<double>({2, 3}, {2, 1}), {2, 200});

  EXPECT_EQ(sum(mul(x, x), {1}).to_doubles(), (std::vector<double>{800, 1800}));
}

TEST(Elementwise, OutputMayBeTheInput) {
  const Tensor x = random_tensor({3, 100}), y = x.clone();
  const std::vector<double> expected = exp(x).to_doubles();

  unary({.op = UnaryOp::exp, .x = y.view(), .out = y.mutable_view()}, device_context(kCpu));

  EXPECT_EQ(y.to_doubles(), expected);
}

TEST(Elementwise, ZeroSizesGiveZeroSizes) {
  const Tensor x = random_leaf({2, 0, 3});

  for (const UnaryCase& test : unary_cases()) EXPECT_EQ(test.op(x).shape(), x.shape()) << test.name;
  const Tensor y = swiglu(x, x);
  y.backward(Tensor::empty(y.shape(), DType::f64));
  EXPECT_EQ(x.grad().shape(), x.shape());
}

// --- In place ---

TEST(Elementwise, AddInPlaceKeepsTheTargetsDtype) {
  const Tensor x = Tensor::full({2, 2}, 1.0, DType::f32);

  x.add_(Tensor::from_vector<bfloat16>({bfloat16(0.5f), bfloat16(-2.0f)}, {2}));

  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{1.5f, -1.0f, 1.5f, -1.0f}));
}

TEST(Elementwise, GradientOfACastHasTheSourcesDtype) {
  const Tensor x = random_leaf({3}, 1, DType::bf16);

  sum(cast(x, DType::f32)).backward();

  EXPECT_EQ(x.grad().dtype(), DType::bf16);
  EXPECT_EQ(x.grad().to_doubles(), (std::vector<double>{1, 1, 1}));
}

}  // namespace
}  // namespace heddle
