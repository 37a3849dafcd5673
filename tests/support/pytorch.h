#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "autograd/tensor.h"

namespace heddle::test {

// Fails unless `actual` has the shape of PyTorch's stored float64 result and differs nowhere by more than `relative`
// times the largest expected value, or times 1 if that is smaller.
inline void expect_near_pytorch(const Tensor& actual, const Tensor& expected, double relative, const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.shape(), expected.shape()) << what;
  const std::vector<double> a = actual.to_doubles(), e = expected.to_doubles();
  double largest = 1;
  for (double value : e) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < e.size(); ++i) ASSERT_NEAR(a[i], e[i], relative * largest) << what << ", element " << i;
}

}  // namespace heddle::test
