#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd/tensor.h"
#include "tests/support/error_of.h"

namespace heddle::test {

// Whether every value lies within `bound` of the expected one; bound 0 asks for equality, so that infinities compare too.
// NaN matches NaN only. The message names the worst index and both values.
inline ::testing::AssertionResult all_close(const Tensor& actual, const std::vector<double>& expected, double bound) {
  const std::vector<double> values = actual.to_doubles();
  if (values.size() != expected.size())
    return ::testing::AssertionFailure() << actual.describe() << " has " << values.size() << " values, expected " << expected.size();
  std::size_t worst = 0;
  double worst_error = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == expected[i] || (std::isnan(values[i]) && std::isnan(expected[i]))) continue;
    const double error = std::abs(values[i] - expected[i]);
    if (!(error <= worst_error)) worst = i, worst_error = error;
    if (std::isnan(error)) break;
  }
  if (worst_error <= bound) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << actual.describe() << " at flat index " << worst << ": " << values[worst] << ", expected "
                                       << expected[worst] << ", bound " << bound;
}

inline ::testing::AssertionResult all_equal(const Tensor& actual, const std::vector<double>& expected) {
  return all_close(actual, expected, 0.0);
}

}  // namespace heddle::test
