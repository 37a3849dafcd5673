#pragma once

#include "kernels/runtime/check.h"
#include "kernels/runtime/context.h"

// The one CPU/CUDA switch: HEDDLE_DISPATCH(ctx, softmax, args) calls cpu::softmax(args, ctx) or cuda::softmax(args, ctx).
// A build without CUDA names no cuda:: symbol, so it needs no stubs.
#if HEDDLE_WITH_CUDA
#define HEDDLE_DISPATCH(ctx, fn, args) ((ctx).device.is_cuda() ? cuda::fn(args, ctx) : cpu::fn(args, ctx))
#else
#define HEDDLE_DISPATCH(ctx, fn, args)                                                                 \
  do {                                                                                                 \
    HEDDLE_CHECK((ctx).device.is_cpu(), #fn, ": ", ::heddle::device_support((ctx).device).reason);     \
    cpu::fn(args, ctx);                                                                                \
  } while (false)
#endif
