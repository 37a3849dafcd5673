#pragma once

#include "kernels/runtime/device.h"

namespace heddle {

// What a kernel launch needs beside its arguments. One per device and thread.
struct ExecContext {
  Device device;
  void* stream = nullptr;      // a cudaStream_t on CUDA; unused on the CPU
  bool deterministic = false;  // asks every kernel for bit-reproducible results; the CPU kernels always are
};

// The calling thread's context of a device. Throws heddle::Error if the device cannot be used.
ExecContext& device_context(Device device);

}  // namespace heddle
