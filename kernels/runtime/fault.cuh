#pragma once

#include "kernels/runtime/device_cuda.h"

namespace heddle::cuda {

// Note: Faults, device_cuda.h.
__device__ inline void report(const FaultSlot& slot, const Fault& fault) {
  if (atomicExch(slot.claimed, 1u) != 0u) return;
  *slot.fault = fault;
  __threadfence_system();
}

}  // namespace heddle::cuda
