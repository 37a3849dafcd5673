#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/ops.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_close;

// float32 and float64 take different routes to the normal distribution function; see normal_cdf.
TEST(Gelu, FloatAgreesWithDouble) {
  std::vector<double> values;
  for (int i = -1200; i <= 1200; ++i) values.push_back(i * 0.01);
  const Tensor x = Tensor::from_vector(values, {static_cast<std::int64_t>(values.size())});
  const Tensor exact_x = cast(cast(x, DType::f32), DType::f64).set_requires_grad(true);
  const Tensor float_x = cast(x, DType::f32).set_requires_grad(true);

  const Tensor exact = gelu(exact_x), rounded = gelu(float_x);
  sum(exact).backward();
  sum(rounded).backward();

  // Phi is off by 1e-7 at most, times |x| where |x| < 6 (beyond, Phi is 0 or 1); plus a float32 rounding of y < 12.
  constexpr double kBound = 6 * 1e-7 + 12 * 0x1p-24;
  EXPECT_TRUE(all_close(rounded, exact.to_doubles(), kBound));
  EXPECT_TRUE(all_close(float_x.grad(), exact_x.grad().to_doubles(), kBound));
}

TEST(Gelu, OfMinusOneZeroAndOne) {
  // x * Phi(x) with Phi(1) = 0.8413447461.
  EXPECT_TRUE(all_close(gelu(Tensor::from_vector<double>({-1, 0, 1}, {3})), {-0.1586552539, 0.0, 0.8413447461}, 5e-11));
}

TEST(Gelu, FarAwayIsZeroOrTheInput) {
  const double kInf = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(all_close(gelu(Tensor::from_vector<float>({-50.0f, 50.0f}, {2})), {0.0, 50.0}, 1e-30));
  EXPECT_TRUE(test::all_equal(gelu(Tensor::from_vector<double>({kInf}, {1})), {kInf}));
}

}  // namespace
}  // namespace heddle
