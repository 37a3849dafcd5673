#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/device.h"

// What the rest of kernels/ needs of the CUDA runtime. Every function below throws heddle::Error on failure unless it says
// otherwise.

namespace heddle::cuda {

// Never throws: no driver, a driver too old, no such device or no code for it come back as the reason.
DeviceSupport device_support(int index);

struct DeviceInfo {
  int multiprocessors = 0;
  int capability = 0;  // 10 * major + minor
  int shared_bytes_per_block = 0;  // with opt-in
};
const DeviceInfo& device_info(int index);

// The one stream on which all work of a device is ordered.
cudaStream_t stream(int index);

// Two zeroed counters for kernels that hand out their tiles; a kernel leaves them zeroed.
unsigned* schedule_counters(int index);

// Stream-ordered memory from the device's pool. `allocate` returns null when memory is exhausted. `release` never throws.
void* allocate(std::int64_t nbytes, int index);
void release(void* memory, int index) noexcept;

}  // namespace heddle::cuda
