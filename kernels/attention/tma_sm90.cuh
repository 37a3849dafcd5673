#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/attention/barrier_sm90.cuh"

// The tensor memory accelerator of sm_90: boxes of a strided tensor to shared memory, 128-byte swizzled.

namespace heddle::cuda::sm90 {

// Columns of 16-bit elements in one box: a row of 128 bytes, the span of the swizzle.
inline constexpr int kPanelColumns = 64;

// Copies the box at (column, row, head, batch) of a [B, S, H, D] map to shared memory. Rows outside the tensor arrive as
// zeros and count as delivered bytes.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, Barrier* full, int column, int row, int head,
                                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Copies a box the other way; what lies outside the tensor is not written. The calling thread's copies since its last commit are a
// group; see below.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Copies nbytes (a multiple of 16, both addresses aligned to it) from global to shared memory.
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t nbytes, Barrier* full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(nbytes), "r"(shared_address(full))
               : "memory");
}

// Adds nbytes of floats in shared memory to global memory, atomically an element. The calling thread's adds since its last
// commit are a group; wait_read waits until the shared memory of all groups has been read, wait until they are in memory.
__device__ __forceinline__ void bulk_add(float* to, const void* from, std::uint32_t nbytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(nbytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace heddle::cuda::sm90
