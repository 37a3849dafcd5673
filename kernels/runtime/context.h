#pragma once

#include "kernels/runtime/device.h"

namespace heddle {

// What a kernel launch needs beside its arguments. One per device and thread.
struct ExecContext {
  Device device;
  void* stream = nullptr;      // a cudaStream_t on CUDA; unused on the CPU
  bool deterministic = false;  // asks every kernel for bit-reproducible results; the CPU kernels always are
  bool allow_tf32 = false;     // float32 products on CUDA may round their operands to TF32: 10 bits of mantissa
};

// The calling thread's context of a device. Throws heddle::Error if the device cannot be used.
ExecContext& device_context(Device device);

}  // namespace heddle
