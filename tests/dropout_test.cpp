#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/random.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_equal;
using test::error_of;

TEST(Dropout, FollowsThePhiloxWordsOfItsGenerator) {
  Generator generator{.seed = 11, .offset = 5};
  std::vector<double> expected;
  for (std::uint64_t i = 0; i < 6; ++i) expected.push_back(philox(11, 5 + i / 4, 0)[i % 4] < 0x40000000u ? 0.0 : 4.0 / 3.0);

  const Tensor y = dropout(Tensor::full({2, 3}, 1.0, DType::f64), 0.25, generator);

  EXPECT_TRUE(all_equal(y, expected));
  EXPECT_EQ(generator.offset, 7u);  // two blocks of four words for six elements
}

TEST(Dropout, MasksDifferBetweenCallsAndRepeatAfterReseeding) {
  const Tensor x = Tensor::full({1000}, 1.0);
  Generator generator{.seed = 2};

  const std::vector<double> first = dropout(x, 0.5, generator).to_doubles();
  const std::vector<double> second = dropout(x, 0.5, generator).to_doubles();
  generator = {.seed = 2};

  EXPECT_NE(first, second);
  EXPECT_TRUE(all_equal(dropout(x, 0.5, generator), first));
}

TEST(Dropout, DropsTheAskedFractionAndKeepsTheMean) {
  constexpr std::int64_t kCount = 100000;
  Generator generator{.seed = 3};

  const std::vector<double> y = dropout(Tensor::full({kCount}, 1.0, DType::f64), 0.3, generator).to_doubles();

  const auto dropped = static_cast<double>(std::count(y.begin(), y.end(), 0.0));
  EXPECT_NEAR(dropped / kCount, 0.3, 5 * std::sqrt(0.3 * 0.7 / kCount));  // five standard deviations
  EXPECT_EQ(*std::max_element(y.begin(), y.end()), 1.0 / 0.7);
}

TEST(Dropout, GradientHasTheMaskOfTheForward) {
  Generator generator{.seed = 4};
  const Tensor x = Tensor::full({40, 7}, 1.0, DType::f64).set_requires_grad(true);

  const Tensor y = dropout(x, 0.5, generator);
  dropout(y.detach(), 0.5, generator);  // another call in between must not matter
  sum(y).backward();

  EXPECT_TRUE(all_equal(x.grad(), y.to_doubles()));
}

TEST(Dropout, MaskDependsOnTheLogicalIndexNotOnStridesOrThreads) {
  Generator a{.seed = 5}, b{.seed = 5};
  const Tensor wide = transpose(Tensor::full({211, 97}, 1.0), 0, 1);  // [97, 211]
  const int threads_before = num_threads();

  set_num_threads(3);
  const std::vector<double> strided = dropout(wide, 0.5, a).to_doubles();
  set_num_threads(1);
  const std::vector<double> dense = dropout(contiguous(wide), 0.5, b).to_doubles();
  set_num_threads(threads_before);

  EXPECT_EQ(strided, dense);
}

TEST(Dropout, DropsNanRatherThanMultiplyingIt) {
  Generator generator{.seed = 6};
  const Tensor x = Tensor::full({64}, std::nan(""));

  const std::vector<double> y = dropout(x, 0.5, generator).to_doubles();

  EXPECT_GT(std::count(y.begin(), y.end(), 0.0), 0);
}

TEST(Dropout, ZeroIsTheIdentityAndDrawsNothing) {
  Generator generator{.seed = 7};
  const Tensor x = Tensor::full({3}, 2.0);

  EXPECT_EQ(dropout(x, 0.0, generator).storage(), x.storage());
  EXPECT_EQ(generator.offset, 0u);
}

TEST(Dropout, RefusesProbabilitiesOutsideZeroToOne) {
  Generator generator;
  const Tensor x = Tensor::zeros({3});
  EXPECT_EQ(error_of([&] { dropout(x, 1.0, generator); }), "dropout: p must be in [0, 1), got 1");
  EXPECT_EQ(error_of([&] { dropout(x, -0.1, generator); }), "dropout: p must be in [0, 1), got -0.1");
  EXPECT_EQ(error_of([&] { dropout(x, std::nan(""), generator); }), "dropout: p must be in [0, 1), got nan");
}

}  // namespace
}  // namespace heddle
