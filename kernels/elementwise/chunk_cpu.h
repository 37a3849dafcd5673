#pragma once

#include <Eigen/Core>
#include <array>
#include <cstdint>

#include "kernels/runtime/strided.h"
#include "kernels/runtime/view.h"

// Note: Chunks
// CPU elementwise kernels gather up to kChunk elements of each operand into a local array of the accumulation type,
// compute on whole arrays (which Eigen vectorises, exp and tanh included) and scatter the result. One path serves every
// dtype and every stride, and nothing lazy outlives its operands. kChunk 128: 16 AVX registers of float, all in L1.

namespace heddle::cpu {

inline constexpr int kChunk = 128;

template <typename A>
using Chunk = Eigen::Array<A, kChunk, 1>;

template <typename A, typename T>
void load(Chunk<A>& chunk, const T* from, std::int64_t stride, int count) {
  if (stride == 1) {
    for (int i = 0; i < count; ++i) chunk[i] = static_cast<A>(from[i]);
  } else {
    for (int i = 0; i < count; ++i) chunk[i] = static_cast<A>(from[i * stride]);
  }
  for (int i = count; i < kChunk; ++i) chunk[i] = A(1);
}

template <typename A, typename T>
void store(const Chunk<A>& chunk, T* to, std::int64_t stride, int count) {
  if (stride == 1) {
    for (int i = 0; i < count; ++i) to[i] = static_cast<T>(chunk[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i * stride] = static_cast<T>(chunk[i]);
  }
}

// outputs = fn(inputs) over the shape of outputs[0]. fn(const std::array<Chunk<A>, In>&, std::array<Chunk<A>, Out>&).
template <typename T, int In, int Out, typename Fn>
void map_chunks(const std::array<ConstView, In>& inputs, const std::array<MutView, Out>& outputs, const Fn& fn) {
  using A = accumulate_t<T>;
  const Shape& shape = outputs[0].shape;
  std::array<Shape, In + Out> strides;
  for (int i = 0; i < In; ++i) strides[i] = broadcast_strides(inputs[i].shape, inputs[i].strides, shape);
  for (int i = 0; i < Out; ++i) strides[In + i] = outputs[i].strides;
  const StridedLoop<In + Out> loop(shape, strides);
  loop.run([&](const std::array<std::int64_t, In + Out>& offsets, std::int64_t count) {
    std::array<Chunk<A>, In> in;
    std::array<Chunk<A>, Out> out;
    for (std::int64_t done = 0; done < count; done += kChunk) {
      const int size = static_cast<int>(std::min<std::int64_t>(kChunk, count - done));
      for (int i = 0; i < In; ++i) {
        const std::int64_t stride = loop.inner_stride(i);
        load(in[i], inputs[i].template as<T>() + offsets[i] + done * stride, stride, size);
      }
      fn(in, out);
      for (int i = 0; i < Out; ++i) {
        const std::int64_t stride = loop.inner_stride(In + i);
        store(out[i], outputs[i].template as<T>() + offsets[In + i] + done * stride, stride, size);
      }
    }
  });
}

}  // namespace heddle::cpu
