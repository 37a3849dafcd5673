#pragma once

#include <array>

#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"
#include "kernels/runtime/strided.cuh"
#include "kernels/runtime/view.h"

// Note: Maps
// An elementwise kernel reads V neighbouring elements of each operand, computes on one element at a time in the accumulation
// type and writes V back. V is 16 bytes' worth where every operand allows it, else 1; both take any strides.

namespace heddle::cuda {

template <typename A>
__device__ A sigmoid(A x) {
  return A(1) / (A(1) + exp(-x));
}

template <typename T, int In, int Out>
struct MapOperands {
  const T* in[In];
  T* out[Out];
  bool is_splat[In];  // one value all along the inner dimension
};

template <int V, typename T>
__device__ Pack<T, V> read_pack(const T* from, bool is_splat) {
  Pack<T, V> pack;
  if (V > 1 && is_splat)
    for (int i = 0; i < V; ++i) pack.at[i] = *from;
  else pack = *reinterpret_cast<const Pack<T, V>*>(from);
  return pack;
}

template <int V, typename T, int In, int Out, typename Fn>
__global__ void map_kernel(const __grid_constant__ Walk<In + Out> walk, const __grid_constant__ MapOperands<T, In, Out> operands,
                           const Fn fn) {
  using A = accumulate_t<T>;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t item = first; item < walk.count; item += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t at[In + Out];
    walk.locate(item, at);
    Pack<T, V> in[In], out[Out];
#pragma unroll
    for (int k = 0; k < In; ++k) in[k] = read_pack<V>(operands.in[k] + at[k], operands.is_splat[k]);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      A x[In], y[Out];
#pragma unroll
      for (int k = 0; k < In; ++k) x[k] = convert<A>(in[k].at[i]);
      fn(x, y);
#pragma unroll
      for (int k = 0; k < Out; ++k) out[k].at[i] = convert<T>(y[k]);
    }
#pragma unroll
    for (int k = 0; k < Out; ++k) *reinterpret_cast<Pack<T, V>*>(operands.out[k] + at[In + k]) = out[k];
  }
}

// outputs = fn(inputs) over the shape of outputs[0]; fn(const A (&in)[In], A (&out)[Out]) runs on the device.
template <typename T, int In, int Out, typename Fn>
void map(const char* op, const std::array<ConstView, In>& inputs, const std::array<MutView, Out>& outputs, const Fn& fn,
         const ExecContext& ctx) {
  const Shape& shape = outputs[0].shape;
  if (shape.numel() == 0) return;
  std::array<Shape, In + Out> strides;
  for (int k = 0; k < In; ++k) strides[k] = broadcast_strides(inputs[k].shape, inputs[k].strides, shape);
  for (int k = 0; k < Out; ++k) strides[In + k] = outputs[k].strides;
  const StridedLoop<In + Out> loop(shape, strides);
  constexpr int kWide = 16 / sizeof(T);
  MapOperands<T, In, Out> operands;
  bool is_wide = true;
  for (int k = 0; k < In; ++k) {
    operands.in[k] = inputs[k].template as<T>();
    operands.is_splat[k] = loop.inner_stride(k) == 0;
    is_wide = is_wide && fits_vectors(loop, k, operands.in[k], sizeof(T), kWide);
  }
  for (int k = 0; k < Out; ++k) {
    operands.out[k] = outputs[k].template as<T>();
    is_wide = is_wide && loop.inner_stride(In + k) == 1 && fits_vectors(loop, In + k, operands.out[k], sizeof(T), kWide);
  }
  const Walk<In + Out> walk(loop, is_wide ? kWide : 1);
  const int grid = grid_for(walk.count, kBlock, ctx);
  if (is_wide) map_kernel<kWide><<<grid, kBlock, 0, stream_of(ctx)>>>(walk, operands, fn);
  else map_kernel<1><<<grid, kBlock, 0, stream_of(ctx)>>>(walk, operands, fn);
  check_launch(op);
}

}  // namespace heddle::cuda
