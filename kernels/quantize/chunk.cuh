#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/quantize/quantize.h"
#include "kernels/quantize/scales.h"
#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"

// Note: Chunks
// A thread takes a chunk of neighbouring columns of one row, no more than share a scale. blockIdx.y counts rows. Whole chunks whose
// addresses allow it are moved 16 bytes at a time, as words: the compiler moves a structure of small members one by one.

namespace heddle::cuda {

inline constexpr std::int64_t kMostRows = 65535;  // that one dimension of a grid counts

__device__ inline std::int64_t my_chunk() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline std::int64_t my_row() { return static_cast<std::int64_t>(blockIdx.z) * kMostRows + blockIdx.y; }

template <int N>
__device__ int at_most(std::int64_t count) {
  return count < N ? static_cast<int>(count) : N;
}

inline dim3 chunk_grid(std::int64_t rows, std::int64_t columns, int chunk) {
  const std::int64_t threads = (columns + chunk - 1) / chunk;
  return {static_cast<unsigned>((threads + kBlock - 1) / kBlock), static_cast<unsigned>(std::min(rows, kMostRows)),
          static_cast<unsigned>((rows + kMostRows - 1) / kMostRows)};
}

// A matrix as chunks: rows a stride apart, and whether its chunks can be moved whole.
template <typename T>
struct Rows {
  T* data;
  std::int64_t rows, columns, stride;
  bool is_aligned;

  template <typename View>
  explicit Rows(const View& view)
      : data(view.template as<std::remove_const_t<T>>()), rows(view.shape[0]), columns(view.shape[1]), stride(rows > 1 ? view.strides[0] : columns),
        is_aligned(reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0) {}

  // The same elements as one row, which a grid covers better, if they lie so and no `chunk` of them would cross a row.
  Rows flat(std::int64_t chunk) const {
    Rows out = *this;
    if (stride != columns || columns % chunk != 0) return out;
    out.columns = out.stride = rows * columns;
    out.rows = std::min<std::int64_t>(rows, 1);
    return out;
  }
};

// Calls fn(std::type_identity<T>{}): the types of weights and activations.
template <typename Fn>
void dispatch_stored(DType dtype, const char* op, const Fn& fn) {
  switch (dtype) {
    case DType::f32: return fn(std::type_identity<float>{});
    case DType::bf16: return fn(std::type_identity<bfloat16>{});
    case DType::f16: return fn(std::type_identity<float16>{});
    default: throw Error(concat_text(op, ": on CUDA not for ", dtype, "; cast to float32"));
  }
}

}  // namespace heddle::cuda
