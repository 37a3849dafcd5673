#include "nn/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/ops.h"
#include "tests/support/error_of.h"

namespace heddle::nn {
namespace {

using test::error_of;

using Numbers = std::vector<double>;
using Ids = std::vector<std::int32_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Probabilities of 1/2, 1/4, 1/8 and 1/8, in mixed order.
const Numbers kLogits{std::log(0.125), std::log(0.5), std::log(0.125), std::log(0.25)};

void expect_near(const Numbers& got, const Numbers& expected) {
  // log, exp, one sum of four and one division: each rounds by at most half a unit in the last place.
  constexpr double kTolerance = 8 * std::numeric_limits<double>::epsilon();
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], kTolerance) << "id " << i;
}

TEST(SamplingDistribution, DefaultIsSoftmax) { expect_near(sampling_distribution(kLogits, {}), {0.125, 0.5, 0.125, 0.25}); }

// Squares of the probabilities, 1/64, 16/64, 1/64, 4/64, scaled to sum 1.
TEST(SamplingDistribution, TemperatureOneHalfSquaresTheOdds) {
  expect_near(sampling_distribution(kLogits, {.temperature = 0.5}), {1 / 22.0, 16 / 22.0, 1 / 22.0, 4 / 22.0});
}

TEST(SamplingDistribution, TemperatureZeroIsCertain) {
  EXPECT_EQ(sampling_distribution(kLogits, {.temperature = 0}), (Numbers{0, 1, 0, 0}));
}

TEST(SamplingDistribution, TinyTemperatureDoesNotOverflow) {
  EXPECT_EQ(sampling_distribution(Numbers{1e5, -1e5, 0}, {.temperature = 1e-300}), (Numbers{1, 0, 0}));
}

TEST(SamplingDistribution, TemperatureZeroTakesTheLowestOfEqualIds) {
  EXPECT_EQ(sampling_distribution(Numbers{1, 3, 3, 2}, {.temperature = 0}), (Numbers{0, 1, 0, 0}));
}

TEST(SamplingDistribution, TopKKeepsTheMostProbable) {
  expect_near(sampling_distribution(kLogits, {.top_k = 2}), {0, 2 / 3.0, 0, 1 / 3.0});
}

TEST(SamplingDistribution, TopKKeepsTheLowestOfEqualIds) {
  EXPECT_EQ(sampling_distribution(Numbers{5, 5, 5, 5}, {.top_k = 2}), (Numbers{0.5, 0.5, 0, 0}));
}

TEST(SamplingDistribution, TopKBeyondTheVocabularyKeepsAll) {
  EXPECT_EQ(sampling_distribution(kLogits, {.top_k = 100}), sampling_distribution(kLogits, {}));
}

TEST(SamplingDistribution, TopPIncludesTheIdThatReachesIt) {
  EXPECT_EQ(sampling_distribution(Numbers{5, 5, 5, 5}, {.top_p = 0.5}), (Numbers{0.5, 0.5, 0, 0}));
  EXPECT_EQ(sampling_distribution(Numbers{2, 2, 2, 2}, {.top_p = 0.50001}), (Numbers{1 / 3.0, 1 / 3.0, 1 / 3.0, 0}));
}

TEST(SamplingDistribution, TinyTopPKeepsOneId) {
  EXPECT_EQ(sampling_distribution(kLogits, {.top_p = 1e-12}), (Numbers{0, 1, 0, 0}));
}

TEST(SamplingDistribution, TopPAppliesToWhatTopKLeft) {
  // Of 1/2, 1/4 and 1/8, scaled to 4/7, 2/7 and 1/7, the first two reach 0.8; of the full distribution they would not.
  expect_near(sampling_distribution(kLogits, {.top_k = 3, .top_p = 0.8}), {0, 2 / 3.0, 0, 1 / 3.0});
}

TEST(SamplingDistribution, MinusInfinityIsNeverDrawn) {
  EXPECT_EQ(sampling_distribution(Numbers{-kInfinity, 1, 1}, {}), (Numbers{0, 0.5, 0.5}));
}

TEST(SamplingDistribution, UnusableLogitsAreRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();

  EXPECT_EQ(error_of([&] { sampling_distribution(Numbers{0, nan}, {}); }),
            "generate: the logit of id 1 is nan; the model's weights may not be finite");
  EXPECT_EQ(error_of([&] { sampling_distribution(Numbers{kInfinity, 0}, {}); }),
            "generate: the logit of id 0 is inf; the model's weights may not be finite");
  EXPECT_EQ(error_of([&] { sampling_distribution(Numbers{-kInfinity, -kInfinity}, {}); }),
            "generate: every logit is -inf; no id can be chosen");
}

TEST(SamplingOptions, EveryBadOptionIsNamed) {
  const SamplingOptions bad{.max_new_tokens = -1, .temperature = -0.5, .top_k = -2, .top_p = 0};

  EXPECT_EQ(error_of([&] { validate(bad); }),
            "generate: max_new_tokens: expected integer >= 0, got -1\n"
            "generate: temperature: expected number >= 0, got -0.5\n"
            "generate: top_k: expected integer >= 0, got -2\n"
            "generate: top_p: expected number in (0, 1], got 0");
  EXPECT_THROW(validate({.temperature = std::numeric_limits<double>::quiet_NaN()}), ConfigError);
  EXPECT_THROW(validate({.top_p = 1.01}), ConfigError);
}

// Logits of a fixed distribution at every position.
LogitsFn constant_logits(const Numbers& logits) {
  return [logits](const Tensor& ids) {
    const auto vocab = static_cast<std::int64_t>(logits.size());
    return expand(Tensor::from_vector(logits, {1, 1, vocab}), {1, ids.size(1), vocab});
  };
}

// Each id is followed by the next one, modulo 5.
Tensor counting_logits(const Tensor& ids) {
  Numbers logits;
  for (const std::int64_t id : ids.to_vector<std::int64_t>())
    for (std::int64_t next = 0; next < 5; ++next) logits.push_back(next == (id + 1) % 5 ? 1.0 : 0.0);
  return Tensor::from_vector(logits, {1, ids.size(1), 5});
}

TEST(Generate, GreedyFollowsTheLastPosition) {
  EXPECT_EQ(generate(counting_logits, Ids{0, 3}, /*max_context=*/8, {.max_new_tokens = 4, .temperature = 0}), (Ids{4, 0, 1, 2}));
}

TEST(Generate, ContextIsCroppedToItsLastIds) {
  std::vector<std::vector<std::int64_t>> seen;
  const auto spy = [&](const Tensor& ids) {
    seen.push_back(ids.to_vector<std::int64_t>());
    return counting_logits(ids);
  };

  generate(spy, Ids{0, 1}, /*max_context=*/3, {.max_new_tokens = 3, .temperature = 0});

  EXPECT_EQ(seen, (std::vector<std::vector<std::int64_t>>{{0, 1}, {0, 1, 2}, {1, 2, 3}}));
}

TEST(Generate, IdsBeyondTheVocabularyAreNeverTaken) {
  const SamplingOptions options{.max_new_tokens = 20, .temperature = 0, .vocab_size = 3};

  // Of ids 0 to 2 the most probable is 1; id 3 is more probable than all.
  const Numbers logits{0, 2, 1, 9};
  EXPECT_EQ(generate(constant_logits(logits), Ids{0}, 4, options), Ids(20, 1));
}

TEST(Generate, SeedReproducesTheText) {
  const SamplingOptions options{.max_new_tokens = 40, .seed = 9};
  SamplingOptions other = options;
  other.seed = 10;

  const Ids text = generate(constant_logits(kLogits), Ids{0}, 4, options);

  EXPECT_EQ(generate(constant_logits(kLogits), Ids{0}, 4, options), text);
  EXPECT_NE(generate(constant_logits(kLogits), Ids{0}, 4, other), text);
}

// 4000 draws: the count of an id of probability p has a standard deviation of sqrt(4000 p (1 - p)); five of them are
// passed by chance in fewer than 1 of 100 000 seeds.
TEST(Generate, FrequenciesFollowTheDistribution) {
  constexpr int kDraws = 4000;
  const Numbers expected{0.125, 0.5, 0.125, 0.25};

  std::vector<int> counts(4);
  for (const std::int32_t id : generate(constant_logits(kLogits), Ids{0}, 1, {.max_new_tokens = kDraws, .seed = 3}))
    ++counts[static_cast<std::size_t>(id)];

  for (std::size_t id = 0; id < 4; ++id)
    EXPECT_NEAR(counts[id], kDraws * expected[id], 5 * std::sqrt(kDraws * expected[id] * (1 - expected[id])));
}

TEST(Generate, NoTokensAskedForGivesNone) { EXPECT_EQ(generate(counting_logits, Ids{0}, 8, {.max_new_tokens = 0}), Ids{}); }

TEST(Generate, EmptyPromptIsRefused) {
  EXPECT_EQ(error_of([] { generate(counting_logits, Ids{}, 8, {}); }),
            "generate: the prompt is empty; give at least one token to continue");
}

TEST(Generate, LogitsOfTheWrongShapeAreRefused) {
  const auto wrong = [](const Tensor&) { return Tensor::zeros({1, 5}); };

  EXPECT_EQ(error_of([&] { generate(wrong, Ids{0}, 8, {}); }), "generate: needs logits [1, 1, V], got float32 [1, 5] on cpu");
}

}  // namespace
}  // namespace heddle::nn
