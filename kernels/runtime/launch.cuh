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

#ifdef __CUDACC__
// Note: Kernels that start early
// A kernel launched early may start while the one before it in the stream ends: once all blocks of that one have called let_next_start
// or are done. It calls wait_for_previous before it touches what that one wrote. Only code compiled for 9.0 and later waits: on such
// devices do not launch code of an older architecture early. On older devices kernels run one after the other.
template <typename Params>
void launch_early(bool is_early, void (*kernel)(Params), unsigned blocks, int threads, std::size_t shared_nbytes, const ExecContext& ctx,
                  const Params& params) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_nbytes;
  config.stream = stream_of(ctx);
  config.attrs = &early;
  config.numAttrs = is_early ? 1 : 0;
  HEDDLE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace heddle::cuda
