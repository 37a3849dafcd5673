#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/pack.cuh"

// Warp-wide matrix products of sm_80 and the copies that feed them: mma.sync, ldmatrix, cp.async.
// PTX ISA, "Matrix multiply-accumulate operation using mma instruction", "ldmatrix", "cp.async".

namespace heddle::cuda::sm80 {

// Note: Fragments
// mma.m16n8k16 multiplies a 16 x 16 block of the left matrix by a 16 x 8 block of the right one. Of the 16 x 8 result, lane l
// holds elements {0, 1} in row l / 4 and {2, 3} in row l / 4 + 8, at the columns 2 (l % 4) + {0, 1}. Two results side by side,
// packed to 16 bits, are the left operand of a product 16 deep: no exchange between lanes.
inline constexpr int kWarp = 32;
inline constexpr int kBlockRows = 16;     // of the left operand and the result
inline constexpr int kBlockDepth = 16;
inline constexpr int kBlockColumns = 8;   // of the result

__device__ __forceinline__ void mma(float (&sum)[4], const std::uint32_t (&left)[4], std::uint32_t right0, std::uint32_t right1, __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
__device__ __forceinline__ void mma(float (&sum)[4], const std::uint32_t (&left)[4], std::uint32_t right0, std::uint32_t right1, __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

// Starts a copy of 16 bytes to shared memory; zeros are written instead if `is_inside` is false, and nothing is read.
__device__ __forceinline__ void copy_16(std::uint32_t to, const void* from, bool is_inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared(std::uint32_t to, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t from) {
  std::uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_shared_16(std::uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_shared_float2(std::uint32_t from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
  return value;
}

// The left operand of a product 16 deep, from the two results that lie side by side.
template <typename T>
__device__ __forceinline__ void pack_left(std::uint32_t (&to)[4], const float (&first)[4], const float (&second)[4]) {
  to[0] = pack(first[0], first[1], T());
  to[1] = pack(first[2], first[3], T());
  to[2] = pack(second[0], second[1], T());
  to[3] = pack(second[2], second[3], T());
}

// sum += left * right for a warp's kM x kN blocks, kSteps blocks deep. left(fragment, i, k) loads the left block (i, k);
// right(fragment, j, k) loads the blocks (k, j) and (k, j + 1) of the right matrix, j even.
template <typename T, int kSteps, int kM, int kN, typename Left, typename Right>
__device__ __forceinline__ void multiply(float (&sum)[kM][kN][4], const Left& left, const Right& right) {
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    std::uint32_t a[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) left(a[i], i, k);
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      std::uint32_t b[4];
      right(b, j, k);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        mma(sum[i][j], a[i], b[0], b[1], T());
        mma(sum[i][j + 1], a[i], b[2], b[3], T());
      }
    }
  }
}

// The two halves of a register as floats.
__device__ __forceinline__ float2 unpack(std::uint32_t pair, __nv_bfloat16) { return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair)); }
__device__ __forceinline__ float2 unpack(std::uint32_t pair, __half) { return __half22float2(reinterpret_cast<const __half2&>(pair)); }

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&sum)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;
}

// The value reduced over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

}  // namespace heddle::cuda::sm80
