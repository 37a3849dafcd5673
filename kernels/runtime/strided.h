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
    if (begin >= end) return;
    const int last = shape.rank() - 1;
    std::array<std::int64_t, kMaxRank> index{};
    std::int64_t rest = begin;
    for (int d = last; d > 0; --d) index[static_cast<std::size_t>(d)] = rest % shape[d], rest /= shape[d];
    index[0] = rest;
    std::array<std::int64_t, N> offsets{};
    for (int d = 0; d <= last; ++d) step(offsets, d, index[static_cast<std::size_t>(d)]);
    while (true) {
      const std::int64_t column = index[static_cast<std::size_t>(last)];
      const std::int64_t count = std::min(end - begin, shape[last] - column);
      body(offsets, count);
      begin += count;
      if (begin >= end) return;
      // On to the start of the next run: back over this one, then a carry through the outer dimensions.
      step(offsets, last, -column);
      index[static_cast<std::size_t>(last)] = 0;
      int d = last - 1;
      step(offsets, d, 1);
      while (++index[static_cast<std::size_t>(d)] == shape[d]) {
        step(offsets, d, -shape[d]);
        index[static_cast<std::size_t>(d)] = 0;
        step(offsets, --d, 1);
      }
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

  // Moves every operand `count` elements along dimension d.
  void step(std::array<std::int64_t, N>& offsets, int d, std::int64_t count) const {
    for (std::size_t i = 0; i < N; ++i) offsets[i] += count * strides[i][d];
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
