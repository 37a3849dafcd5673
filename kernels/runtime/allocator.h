#pragma once

#include <cstdint>

#include "kernels/runtime/device.h"

namespace heddle {

// Bytes owned on a device, freed on destruction. Host memory is 64-byte aligned. Contents start undefined.
class Buffer {
 public:
  Buffer() = default;
  // Throws heddle::Error naming the request and what is in use when memory is exhausted or nbytes < 0.
  Buffer(std::int64_t nbytes, Device device);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  std::int64_t nbytes() const { return nbytes_; }
  Device device() const { return device_; }

 private:
  void* data_ = nullptr;
  std::int64_t nbytes_ = 0;
  Device device_;
};

// Bytes held by all Buffers of a device now, and the most held since the last reset.
struct MemoryStats {
  std::int64_t current_bytes = 0;
  std::int64_t peak_bytes = 0;
};
MemoryStats memory_stats(Device device);
void reset_peak_memory(Device device);

}  // namespace heddle
