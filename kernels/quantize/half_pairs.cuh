#pragma once

#include "kernels/runtime/numeric.cuh"

// Two neighbouring 16-bit numbers as one word, the first in its lower half. The type is named by a value of it.

namespace heddle::cuda {

__device__ inline std::uint32_t pair_of(bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ inline std::uint32_t pair_of(float16, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

__device__ inline float2 floats_of(bfloat16, std::uint32_t pair) { return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)}; }
__device__ inline float2 floats_of(float16, std::uint32_t pair) { return __half22float2(reinterpret_cast<const __half2&>(pair)); }

__device__ inline std::uint32_t products(bfloat16, std::uint32_t a, std::uint32_t b) {
  const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ inline std::uint32_t products(float16, std::uint32_t a, std::uint32_t b) {
  const __half2 pair = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// Numbers that have the larger magnitudes of two, of either sign.
#if __CUDA_ARCH__ >= 860
#define HEDDLE_LARGER(type) asm("max.xorsign.abs." type "x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b))
#else
#define HEDDLE_LARGER(type) \
  asm("{.reg .b32 x, y; abs." type "x2 x, %1; abs." type "x2 y, %2; max." type "x2 %0, x, y;}" : "=r"(out) : "r"(a), "r"(b))
#endif
__device__ inline std::uint32_t larger_of(bfloat16, std::uint32_t a, std::uint32_t b) {
  std::uint32_t out;
  HEDDLE_LARGER("bf16");
  return out;
}
__device__ inline std::uint32_t larger_of(float16, std::uint32_t a, std::uint32_t b) {
  std::uint32_t out;
  HEDDLE_LARGER("f16");
  return out;
}
#undef HEDDLE_LARGER

// sums += a b on the tensor cores, a 16 x 16 and b 16 x 8: lane 4 g + t has of a the rows g and g + 8 at the terms 2 t and 2 t + 1, then at
// 2 t + 8 and 2 t + 9; of b the column g at the same terms; of the sums the rows g and g + 8 at the columns 2 t and 2 t + 1.
#define HEDDLE_MULTIPLY_ADD(type)                                                                                                            \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ inline void multiply_add(bfloat16, const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], float (&sums)[4]) {
  HEDDLE_MULTIPLY_ADD("bf16");
}
__device__ inline void multiply_add(float16, const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], float (&sums)[4]) {
  HEDDLE_MULTIPLY_ADD("f16");
}
#undef HEDDLE_MULTIPLY_ADD

}  // namespace heddle::cuda
