#pragma once

#include "kernels/runtime/strided.h"

namespace heddle::cuda {

// A StridedLoop as kernels take it: from the number of an item to where each operand has it. An item is an element, or
// `width` neighbours along the inner dimension.
template <int N>
struct Walk {
  std::int64_t count = 1;  // items
  int rank = 1;
  std::int64_t size[kMaxRank] = {};  // in items
  std::int64_t step[N][kMaxRank] = {};  // in elements

  Walk(const StridedLoop<N>& loop, int width = 1) : count(loop.shape.numel() / width), rank(loop.shape.rank()) {
    for (int d = 0; d < rank; ++d) {
      const bool is_inner = d == rank - 1;
      size[d] = is_inner ? loop.shape[d] / width : loop.shape[d];
      for (int n = 0; n < N; ++n) step[n][d] = loop.strides[static_cast<std::size_t>(n)][d] * (is_inner ? width : 1);
    }
  }

  __device__ void locate(std::int64_t item, std::int64_t (&offsets)[N]) const {
    for (int n = 0; n < N; ++n) offsets[n] = 0;
#pragma unroll
    for (int d = kMaxRank - 1; d > 0; --d) {
      if (d >= rank) continue;
      const std::int64_t rest = item / size[d], index = item - rest * size[d];
      item = rest;
      for (int n = 0; n < N; ++n) offsets[n] += index * step[n][d];
    }
    for (int n = 0; n < N; ++n) offsets[n] += item * step[n][0];
  }
};

// Whether an operand of a loop can be moved `width` elements at a time: its inner runs are dense, whole multiples of it, and
// aligned; or it is one value all along them.
template <int N>
bool fits_vectors(const StridedLoop<N>& loop, int operand, const void* data, std::size_t element_bytes, int width) {
  if (loop.inner_size() % width != 0) return false;
  if (loop.inner_stride(operand) == 0) return true;
  if (loop.inner_stride(operand) != 1 || reinterpret_cast<std::uintptr_t>(data) % (width * element_bytes) != 0) return false;
  for (int d = 0; d + 1 < loop.shape.rank(); ++d)
    if (loop.strides[static_cast<std::size_t>(operand)][d] % width != 0) return false;
  return true;
}

}  // namespace heddle::cuda
