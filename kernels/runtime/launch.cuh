#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/runtime/context.h"
#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/device_cuda.h"

namespace heddle::cuda {

// Threads a block of every plain kernel.
inline constexpr int kBlock = 256;

inline cudaStream_t stream_of(const ExecContext& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

// Blocks for `items` pieces of work of which a block takes `per_block` at a time. Kernels stride over the grid, so it is never
// larger than a few waves: 32 blocks of kBlock threads a multiprocessor.
inline int grid_for(std::int64_t items, std::int64_t per_block, const ExecContext& ctx) {
  const std::int64_t most = std::int64_t{32} * device_info(ctx.device.index).multiprocessors;
  return static_cast<int>(std::clamp<std::int64_t>((items + per_block - 1) / per_block, 1, most));
}

}  // namespace heddle::cuda
