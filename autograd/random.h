#pragma once

#include <cstdint>

#include "autograd/tensor.h"

namespace heddle {

// A position in a Philox stream. The numbers drawn depend on (seed, offset) only, whatever the device or the number of
// threads; saving both resumes the stream exactly.
struct Generator {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;  // in blocks of four 32-bit words

  // Claims the blocks for `count` elements at `per_block` elements a block; returns the first.
  std::uint64_t reserve(std::int64_t count, int per_block);
};

// Host-made random tensors, moved to `device`. Outside the graph.
Tensor uniform(const Shape& shape, double low, double high, Generator& generator, DType dtype = DType::f32, Device device = kCpu);
Tensor normal(const Shape& shape, double mean, double stddev, Generator& generator, DType dtype = DType::f32, Device device = kCpu);

}  // namespace heddle
