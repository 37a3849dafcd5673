#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "autograd/ops.h"
#include "tests/support/error_of.h"

namespace heddle::test {

// Standard normal values, the same for the same seed.
inline Tensor random_tensor(const Shape& shape, DType dtype = DType::f64, std::uint64_t seed = 1) {
  Generator generator{.seed = seed};
  return normal(shape, 0.0, 1.0, generator, dtype);
}

inline Tensor random_leaf(const Shape& shape, std::uint64_t seed = 1, DType dtype = DType::f64) {
  return random_tensor(shape, dtype, seed).set_requires_grad(true);
}

// 0, 1, 2, ... in row-major order.
inline Tensor counting(const Shape& shape, DType dtype = DType::f64) {
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  std::iota(values.begin(), values.end(), 0.0);
  return cast(Tensor::from_vector(values, shape), dtype);
}

}  // namespace heddle::test
