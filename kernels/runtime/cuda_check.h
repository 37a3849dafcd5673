#pragma once

#include <cuda_runtime.h>

#include "kernels/runtime/check.h"

// Turns a failed CUDA runtime call into heddle::Error, with the call and the runtime's own words.
#define HEDDLE_CUDA_CHECK(call)                                                                                  \
  do {                                                                                                           \
    const cudaError_t heddle_status = (call);                                                                    \
    HEDDLE_CHECK(heddle_status == cudaSuccess, "cuda: ", #call, ": ", cudaGetErrorString(heddle_status));        \
  } while (false)

namespace heddle::cuda {

// After every kernel launch: throws if it was refused. With HEDDLE_CUDA_SYNC=1 in the environment it also waits for the
// kernel, so that a fault inside it is reported under its own name.
void check_launch(const char* op);

}  // namespace heddle::cuda
