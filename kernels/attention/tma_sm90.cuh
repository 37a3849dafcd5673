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

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace heddle::cuda::sm90
