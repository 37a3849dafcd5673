#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/runtime/view.h"

namespace heddle {

// A few numbers on their way from a device to the host, copied in the order of the device's work. Making one waits for nothing;
// reading it waits for the work before it, not for what came after. Host memory is copied at once.
class HostCopy {
 public:
  static constexpr std::int64_t kMaxBytes = 64;

  // `source` is dense and at most kMaxBytes long.
  explicit HostCopy(const ConstView& source);
  ~HostCopy();
  HostCopy(HostCopy&& other) noexcept;
  HostCopy& operator=(HostCopy&& other) noexcept;
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  bool is_ready() const;
  // Element `i`. Throws what a kernel before the copy reported, for example a token id outside the vocabulary.
  template <typename T>
  T value(int i = 0) const {
    return static_cast<const T*>(wait())[i];
  }

 private:
  const void* wait() const;

  Device device_;
  alignas(8) std::array<std::byte, kMaxBytes> bytes_{};  // of a host source
  int slot_ = -1;                                        // of a device source
};

}  // namespace heddle
