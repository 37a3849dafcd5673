#pragma once

#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"

// Note: Groups
// Kernels that work along one dimension give each slice to a group of kThreads threads: a warp where slices are short, the
// whole block of kBlock threads where they are long. Partial results are combined in an order that depends on kThreads only,
// so results are the same in every run.

namespace heddle::cuda {

inline constexpr int kWarp = 32;
// Slices up to this long are a warp's: 32 elements a thread.
inline constexpr std::int64_t kWarpSlice = 1024;

// Calls fn(std::integral_constant<int, kThreads>{}) with the group size for slices of `size` elements.
template <typename Fn>
void with_group(std::int64_t size, const Fn& fn) {
  if (size <= kWarpSlice) fn(std::integral_constant<int, kWarp>{});
  else fn(std::integral_constant<int, kBlock>{});
}

// The first slice of this thread's group, how many groups the grid has, and the thread's place in its group.
template <int kThreads>
struct Group {
  static constexpr int kInBlock = kBlock / kThreads;
  std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kInBlock + threadIdx.x / kThreads;
  std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kInBlock;
  int lane = threadIdx.x % kThreads;
};

// Combines a value of every thread of a group and gives all of them the result. Every thread of the group must call it.
template <int kThreads, typename A, typename Op>
__device__ A reduce_group(A value, Op op) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  if constexpr (kThreads > kWarp) {
    __shared__ A parts[kThreads / kWarp];
    __syncthreads();  // whoever still reads the parts of the call before
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = parts[0];
    for (int warp = 1; warp < kThreads / kWarp; ++warp) value = op(value, parts[warp]);
  }
  return value;
}

template <int kThreads, typename A>
__device__ A sum_group(A value) {
  return reduce_group<kThreads>(value, [](A a, A b) { return a + b; });
}

// The largest value and the sum of exp(x - largest) of a slice.
template <typename A>
struct MaxAndSum {
  A largest;
  A sum;  // 0 exactly when every value is -inf; NaN when a value is NaN or +inf
};

// In one pass over x(0), ..., x(size - 1). Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
template <int kThreads, typename A, typename Read>
__device__ MaxAndSum<A> max_and_sum(std::int64_t size, int lane, const Read& x) {
  A largest = -infinity<A>(), sum = 0;
  for (std::int64_t i = lane; i < size; i += kThreads) {
    const A value = x(i);
    if (value > largest) {
      sum = sum * exp(largest - value) + (value - value + A(1));
      largest = value;
    } else if (value != -infinity<A>()) {
      sum += exp(value - largest);
    }
  }
  const A top = reduce_group<kThreads>(largest, [](A a, A b) { return a > b ? a : b; });
  return {top, sum_group<kThreads>(largest == top ? sum : sum * exp(largest - top))};
}

}  // namespace heddle::cuda
