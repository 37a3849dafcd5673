#pragma once

#include "kernels/runtime/check.h"
#include "kernels/runtime/context.h"

#if HEDDLE_WITH_CUDA
namespace heddle::cuda {
void use_device(int index);  // device_cuda.h
}
#endif

namespace heddle {

// Makes the context's device the one that the calling thread launches on.
inline void make_current([[maybe_unused]] const ExecContext& ctx) {
#if HEDDLE_WITH_CUDA
  if (ctx.device.is_cuda()) cuda::use_device(ctx.device.index);
#endif
}

}  // namespace heddle

// The one CPU/CUDA switch: HEDDLE_DISPATCH(ctx, softmax, args) calls cpu::softmax(args, ctx) or, with the context's device
// current, cuda::softmax(args, ctx). A build without CUDA names no cuda:: symbol, so it needs no stubs.
#if HEDDLE_WITH_CUDA
#define HEDDLE_DISPATCH(ctx, fn, args) \
  (::heddle::make_current(ctx), (ctx).device.is_cuda() ? cuda::fn(args, ctx) : cpu::fn(args, ctx))
#else
#define HEDDLE_DISPATCH(ctx, fn, args)                                                                 \
  do {                                                                                                 \
    HEDDLE_CHECK((ctx).device.is_cpu(), #fn, ": ", ::heddle::device_support((ctx).device).reason);     \
    cpu::fn(args, ctx);                                                                                \
  } while (false)
#endif
