#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/runtime/allocator.h"

namespace heddle {

// Owned memory shared by every view of it. The version counts writes: the autograd engine compares it to tell whether a
// saved tensor changed between forward and backward.
class Storage {
 public:
  Storage(std::int64_t nbytes, Device device) : buffer_(nbytes, device) {}

  void* data() const { return buffer_.data(); }
  std::int64_t nbytes() const { return buffer_.nbytes(); }
  Device device() const { return buffer_.device(); }

  std::uint64_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }

 private:
  Buffer buffer_;
  std::atomic<std::uint64_t> version_{0};
};

}  // namespace heddle
