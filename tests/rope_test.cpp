#include <gtest/gtest.h>

#include <cmath>

#include "autograd/ops.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_close;
using test::all_equal;
using test::error_of;

Tensor positions_of(const std::vector<std::int64_t>& positions) {
  return Tensor::from_vector(positions, {static_cast<std::int64_t>(positions.size())});
}

TEST(Rope, TurnsEachHalfPairByItsOwnFrequency) {
  // D = 4, theta = 100: pairs (x0, x2) and (x1, x3) turn by p and p / 10. Position 0 leaves the row as it is.
  const Tensor x = Tensor::from_vector<double>({1, 2, 3, 4, 1, 0, 0, 1}, {1, 2, 1, 4});

  const Tensor y = rope(x, positions_of({0, 5}), 100.0);

  EXPECT_TRUE(all_close(y, {1, 2, 3, 4, std::cos(5.0), -std::sin(0.5), std::sin(5.0), std::cos(0.5)}, 1e-15));
}

TEST(Rope, ScoresDependOnTheDistanceOnly) {
  Generator generator{.seed = 4};
  const Tensor q = normal({1, 1, 1, 8}, 0.0, 1.0, generator, DType::f64), k = normal({1, 1, 1, 8}, 0.0, 1.0, generator, DType::f64);
  const auto score = [&](std::int64_t at_q, std::int64_t at_k) {
    return sum(mul(rope(q, positions_of({at_q})), rope(k, positions_of({at_k})))).item();
  };

  EXPECT_NEAR(score(7, 3), score(1007, 1003), 1e-11);  // angles near 1000 carry an error of 1000 * 2^-53 each
}

TEST(Rope, GradientTurnsBack) {
  Generator generator{.seed = 5};
  const Tensor x = normal({2, 5, 6, 8}, 0.0, 1.0, generator, DType::f64).set_requires_grad(true);
  const Tensor positions = positions_of({3, 4, 5, 6, 7});
  const Tensor y = rope(x, positions);

  y.backward(y.detach());

  EXPECT_TRUE(all_close(x.grad(), x.to_doubles(), 1e-14));  // turning back the output gives the input
}

TEST(Rope, ReadsTransposedInputs) {
  Generator generator{.seed = 6};
  const Tensor x = normal({2, 6, 5, 8}, 0.0, 1.0, generator, DType::f64);  // [B, H, S, D]
  const Tensor positions = positions_of({0, 1, 2, 3, 4});

  EXPECT_TRUE(all_equal(rope(transpose(x, 1, 2), positions), rope(contiguous(transpose(x, 1, 2)), positions).to_doubles()));
}

TEST(Rope, RefusesBadArgumentsByName) {
  const Tensor x = Tensor::zeros({1, 2, 1, 4});
  EXPECT_EQ(error_of([&] { rope(Tensor::zeros({1, 2, 1, 3}), positions_of({0, 1})); }),
            "rope: needs x [B, S, H, D] with D even, got [1, 2, 1, 3]");
  EXPECT_EQ(error_of([&] { rope(x, positions_of({0})); }), "rope: positions must be int64 [2], got int64 [1]");
  EXPECT_EQ(error_of([&] { rope(x, positions_of({0, 1}), -1.0); }), "rope: theta must be finite and > 0, got -1");
}

TEST(Rope, NoTokensGiveNoTokens) { EXPECT_EQ(rope(Tensor::zeros({1, 0, 2, 4}), positions_of({})).shape(), Shape({1, 0, 2, 4})); }

}  // namespace
}  // namespace heddle
