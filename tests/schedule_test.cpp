#include "nn/schedule.h"

#include <gtest/gtest.h>

#include <vector>

namespace heddle::nn {
namespace {

TrainConfig config(Schedule kind, std::int64_t warmup, std::int64_t steps) {
  TrainConfig out;
  out.learning_rate = 1e-3;
  out.min_learning_rate = 1e-4;
  out.lr_scheduler_type = kind;
  out.warmup_steps = warmup;
  out.max_steps = steps;
  return out;
}

void expect_rates(const TrainConfig& train, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(learning_rate_at(train, static_cast<std::int64_t>(i)), expected[i], 1e-15) << "update " << i;
}

// Warm-up of 4 in 10 updates: quarters of the peak, then p = 1/6 .. 6/6.
TEST(Schedule, LinearRatesOfTenUpdates) {
  expect_rates(config(Schedule::linear, 4, 10),
               {2.5e-4, 5e-4, 7.5e-4, 1e-3, 8.5e-4, 7e-4, 5.5e-4, 4e-4, 2.5e-4, 1e-4});
}

// cos(pi/6) = 0.8660254037844387, cos(pi/3) = 0.5, cos(pi/2) = 0, and their mirror images.
TEST(Schedule, CosineRatesOfTenUpdates) {
  const double far = 0.45e-3 * (1 - 0.8660254037844387) + 1e-4;
  expect_rates(config(Schedule::cosine, 4, 10),
               {2.5e-4, 5e-4, 7.5e-4, 1e-3, 1.1e-3 - far, 7.75e-4, 5.5e-4, 3.25e-4, far, 1e-4});
}

TEST(Schedule, ConstantStaysAtThePeakAfterTheWarmup) {
  expect_rates(config(Schedule::constant, 2, 5), {5e-4, 1e-3, 1e-3, 1e-3, 1e-3});
}

TEST(Schedule, WithoutWarmupTheFirstUpdateHasThePeak) {
  expect_rates(config(Schedule::linear, 0, 4), {1e-3, 7e-4, 4e-4, 1e-4});
}

TEST(Schedule, WarmupAsLongAsTheRunEndsAtThePeak) {
  expect_rates(config(Schedule::cosine, 3, 3), {1e-3 / 3, 2e-3 / 3, 1e-3});
}

TEST(Schedule, RunShorterThanTheWarmupStaysInIt) {
  expect_rates(config(Schedule::cosine, 8, 2), {1.25e-4, 2.5e-4});
}

TEST(Schedule, OneUpdateHasThePeak) { expect_rates(config(Schedule::cosine, 0, 1), {1e-3}); }

TEST(Schedule, AfterTheLastUpdateTheRateStaysAtTheMinimum) {
  EXPECT_EQ(learning_rate_at(config(Schedule::cosine, 4, 10), 25), 1e-4);
}

TEST(Schedule, EveryRateIsAboveZeroAndThePeakIsReachedOnce) {
  for (const Schedule kind : {Schedule::cosine, Schedule::linear}) {
    int peaks = 0;
    for (std::int64_t i = 0; i < 20; ++i) {
      const double rate = learning_rate_at(config(kind, 5, 20), i);
      EXPECT_GT(rate, 0);
      EXPECT_LE(rate, 1e-3);
      peaks += rate == 1e-3;
    }
    EXPECT_EQ(peaks, 1);
  }
}

}  // namespace
}  // namespace heddle::nn
