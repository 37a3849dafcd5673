#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/runtime/strided.h"
#include "kernels/runtime/view.h"

// Note: Chunks
// CPU elementwise kernels gather up to kChunk elements of each operand into a local array of the type they compute in, work on
// whole arrays (which Eigen vectorises, exp and tanh included) and scatter the result. One path serves every dtype and
// every stride, an output may be the same view as an input, and nothing lazy outlives its operands.
// kChunk 512: five chunks of float are 10 KB, well inside L1; 128 spends twice the time on a dense addition.

namespace heddle::cpu {

inline constexpr int kChunk = 512;

template <typename A>
using Chunk = Eigen::Array<A, Eigen::Dynamic, 1, Eigen::ColMajor, kChunk, 1>;  // on the stack

// Converts `count` elements of a view of any dtype to A (float or double), from `offset` in steps of `stride`.
template <typename A>
void load(A* chunk, const ConstView& view, std::int64_t offset, std::int64_t stride, std::int64_t count);

// The inverse. 16-bit floats round once; an integer takes the truncated value; a bool is whether it is not zero.
template <typename A>
void store(const A* chunk, const MutView& view, std::int64_t offset, std::int64_t stride, std::int64_t count);

// outputs = fn(inputs) over the shape of outputs[0]. fn(const std::array<Chunk<A>, In>&, std::array<Chunk<A>, Out>&).
template <typename A, std::size_t In, std::size_t Out, typename Fn>
void map_chunks(const std::array<ConstView, In>& inputs, const std::array<MutView, Out>& outputs, const Fn& fn) {
  constexpr std::int64_t kGrain = 16384;  // elements worth a thread: some 5 microseconds of a cheap op
  std::array<Shape, In + Out> strides;
  for (std::size_t i = 0; i < In; ++i) strides[i] = broadcast_strides(inputs[i].shape, inputs[i].strides, outputs[0].shape);
  for (std::size_t i = 0; i < Out; ++i) strides[In + i] = outputs[i].strides;
  const StridedLoop<In + Out> loop(outputs[0].shape, strides);
  parallel_for(loop.shape.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::array<Chunk<A>, In> in;
    std::array<Chunk<A>, Out> out;
    for (; begin < end; begin += kChunk) {
      const std::int64_t stop = std::min(begin + kChunk, end);
      for (Chunk<A>& chunk : in) chunk.resize(stop - begin);
      std::int64_t at = 0;
      loop.walk(begin, stop, [&](const auto& offsets, std::int64_t count) {
        for (std::size_t i = 0; i < In; ++i) load(in[i].data() + at, inputs[i], offsets[i], loop.inner_stride(i), count);
        at += count;
      });
      fn(in, out);
      at = 0;
      loop.walk(begin, stop, [&](const auto& offsets, std::int64_t count) {
        for (std::size_t i = 0; i < Out; ++i)
          store(out[i].data() + at, outputs[i], offsets[In + i], loop.inner_stride(In + i), count);
        at += count;
      });
    }
  });
}

}  // namespace heddle::cpu
