#include "kernels/runtime/random.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/runtime/parallel.h"
#include "tests/support/tensors.h"

namespace heddle {
namespace {

using Words = std::array<std::uint32_t, 4>;

// The known answers published with the generator (Random123, philox4x32 with 10 rounds).
TEST(Philox, MatchesItsPublishedKnownAnswers) {
  EXPECT_EQ(philox(0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e), (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UnitIntervalExcludesOne) {
  EXPECT_EQ(unit_interval(0, 0), 0.0);
  EXPECT_EQ(unit_interval(~0u, ~0u), 1.0 - 0x1p-53);
}

TEST(Generator, SameSeedAndOffsetGiveTheSameNumbers) {
  Generator first{.seed = 5}, second{.seed = 5};
  const Tensor a = normal({3, 7}, 0.0, 1.0, first), b = normal({3, 7}, 0.0, 1.0, second);

  EXPECT_EQ(a.to_doubles(), b.to_doubles());
  EXPECT_EQ(first.offset, second.offset);
}

// An odd count, and more than a thread takes at once.
TEST(Generator, AnyNumberOfThreadsDrawsTheSameNumbers) {
  const int threads = num_threads();
  const auto drawn_by = [](int count) {
    set_num_threads(count);
    Generator generator{.seed = 5};
    return normal({10, 3001}, 0.0, 1.0, generator).to_doubles();
  };
  const std::vector<double> one = drawn_by(1), three = drawn_by(3);
  set_num_threads(threads);

  EXPECT_EQ(one, three);
}

TEST(Generator, WithoutDeviationDrawsTheMeanAndMovesOn) {
  Generator still{.seed = 5}, drawn{.seed = 5};

  EXPECT_EQ(normal({3, 5}, -2.5, 0.0, still).to_doubles(), std::vector<double>(15, -2.5));
  normal({3, 5}, 0.0, 1.0, drawn);
  EXPECT_EQ(still.offset, drawn.offset);
}

TEST(Generator, ConsecutiveDrawsAndOtherSeedsDiffer) {
  Generator generator{.seed = 5}, other{.seed = 6};
  const std::vector<double> first = uniform({8}, 0, 1, generator).to_doubles();

  EXPECT_NE(first, uniform({8}, 0, 1, generator).to_doubles());
  EXPECT_NE(first, uniform({8}, 0, 1, other).to_doubles());
}

TEST(Generator, SavedOffsetResumesTheStream) {
  Generator whole{.seed = 9};
  normal({5}, 0, 1, whole);
  const Generator saved = whole;
  const std::vector<double> expected = normal({6}, 0, 1, whole).to_doubles();

  Generator resumed = saved;

  EXPECT_EQ(normal({6}, 0, 1, resumed).to_doubles(), expected);
}

TEST(Generator, DrawsOfEqualCountUseOneStreamWhateverTheDtype) {
  Generator a{.seed = 3}, b{.seed = 3};

  EXPECT_EQ(cast(uniform({9}, -1, 1, a, DType::f64), DType::bf16).to_doubles(), uniform({9}, -1, 1, b, DType::bf16).to_doubles());
}

// Sample moments of n draws lie within five standard errors: a chance of 6e-7 each, for one fixed seed.
TEST(Generator, NormalHasTheMomentsAskedFor) {
  constexpr int kCount = 100001;
  Generator generator{.seed = 1};
  const std::vector<double> x = normal({kCount}, 2.0, 3.0, generator, DType::f64).to_doubles();
  double m1 = 0, m2 = 0, m3 = 0, m4 = 0;
  for (double value : x) {
    const double z = (value - 2.0) / 3.0;
    m1 += z / kCount, m2 += z * z / kCount, m3 += z * z * z / kCount, m4 += z * z * z * z / kCount;
  }

  const double error = 5.0 / std::sqrt(kCount);
  EXPECT_NEAR(m1, 0.0, error);
  EXPECT_NEAR(m2, 1.0, error * std::sqrt(2.0));   // var(z^2) = 2
  EXPECT_NEAR(m3, 0.0, error * std::sqrt(15.0));  // var(z^3) = 15
  EXPECT_NEAR(m4, 3.0, error * std::sqrt(96.0));  // var(z^4) = 105 - 9
}

TEST(Generator, UniformFillsItsIntervalEvenly) {
  constexpr int kCount = 100000, kBins = 10;
  Generator generator{.seed = 1};
  std::array<int, kBins> counts{};
  for (double value : uniform({kCount}, -1.0, 3.0, generator, DType::f64).to_doubles()) {
    ASSERT_TRUE(value >= -1.0 && value < 3.0);
    ++counts[static_cast<std::size_t>((value + 1.0) / 4.0 * kBins)];
  }

  const double deviation = std::sqrt(kCount * 0.1 * 0.9);
  for (int count : counts) EXPECT_NEAR(count, kCount / kBins, 5.0 * deviation);
}

TEST(Generator, NoElementsUseNoNumbers) {
  Generator generator{.seed = 1};

  EXPECT_EQ(normal({0, 3}, 0, 1, generator).numel(), 0);
  EXPECT_EQ(generator.offset, 0u);
}

}  // namespace
}  // namespace heddle
