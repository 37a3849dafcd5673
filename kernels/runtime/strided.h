#pragma once

#include <array>
#include <cstdint>

#include "kernels/runtime/parallel.h"
#include "kernels/runtime/shape.h"

namespace heddle {

// Note: Strided loops
// N operands walked over one shape, each with its own strides (0 where it is broadcast). Neighbouring dimensions that
// every operand steps through evenly are merged first, so dense operands become one long inner loop.
template <int N>
struct StridedLoop {
  Shape shape;                   // outer dimensions first, the inner loop last; rank >= 1
  std::array<Shape, N> strides;  // in elements

  StridedLoop(const Shape& full, const std::array<Shape, N>& operand_strides) {
    for (int d = 0; d < full.rank(); ++d) {
      if (full[d] == 1) continue;
      if (shape.rank() > 0 && merges(full[d], operand_strides, d)) {
        const int last = shape.rank() - 1;
        shape[last] *= full[d];
        for (int i = 0; i < N; ++i) at(i)[last] = operand_strides[static_cast<std::size_t>(i)][d];
        continue;
      }
      shape.push_back(full[d]);
      for (int i = 0; i < N; ++i) at(i).push_back(operand_strides[static_cast<std::size_t>(i)][d]);
    }
    if (shape.rank() == 0) {
      shape.push_back(1);
      for (int i = 0; i < N; ++i) at(i).push_back(0);
    }
  }

  std::int64_t inner_size() const { return shape.back(); }
  std::int64_t inner_stride(int operand) const { return strides[static_cast<std::size_t>(operand)].back(); }

  // Calls body(offsets, count) for runs along the inner dimension, in parallel; offsets[i] is where operand i's run
  // starts, in elements. Every element is visited once.
  template <typename Body>
  void run(const Body& body, std::int64_t grain = 16384) const {
    parallel_for(shape.numel(), grain, [&](std::int64_t begin, std::int64_t end) { walk(begin, end, body); });
  }

  // The same for elements [begin, end) in row-major order, on the calling thread.
  template <typename Body>
  void walk(std::int64_t begin, std::int64_t end, const Body& body) const {
    const std::int64_t inner = inner_size();
    while (begin < end) {
      const std::int64_t column = begin % inner;
      const std::int64_t count = std::min(end - begin, inner - column);
      body(offsets_at(begin / inner, column), count);
      begin += count;
    }
  }

 private:
  Shape& at(int operand) { return strides[static_cast<std::size_t>(operand)]; }

  bool merges(std::int64_t size, const std::array<Shape, N>& operand_strides, int d) const {
    for (int i = 0; i < N; ++i) {
      const auto operand = static_cast<std::size_t>(i);
      if (strides[operand].back() != operand_strides[operand][d] * size) return false;
    }
    return true;
  }

  std::array<std::int64_t, N> offsets_at(std::int64_t row, std::int64_t column) const {
    std::array<std::int64_t, N> offsets{};
    for (int i = 0; i < N; ++i) offsets[static_cast<std::size_t>(i)] = column * inner_stride(i);
    for (int d = shape.rank() - 2; d >= 0; --d) {
      const std::int64_t index = row % shape[d];
      row /= shape[d];
      for (int i = 0; i < N; ++i)
        offsets[static_cast<std::size_t>(i)] += index * strides[static_cast<std::size_t>(i)][d];
    }
    return offsets;
  }
};

// A shape, or strides, without one dimension.
inline Shape without_dim(const Shape& values, int dim) {
  Shape rest;
  for (int d = 0; d < values.rank(); ++d)
    if (d != dim) rest.push_back(values[d]);
  return rest;
}

// The strides with which a tensor of `shape` and `strides` is read as the broadcast shape `target`: 0 along every
// dimension it lacks or has as 1. `target` must be a shape it broadcasts to.
inline Shape broadcast_strides(const Shape& shape, const Shape& strides, const Shape& target) {
  Shape out = Shape::filled(target.rank(), 0);
  const int shift = target.rank() - shape.rank();
  for (int d = 0; d < shape.rank(); ++d) out[d + shift] = shape[d] == 1 ? 0 : strides[d];
  return out;
}

}  // namespace heddle
