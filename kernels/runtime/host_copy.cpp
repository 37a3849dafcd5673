#include "kernels/runtime/host_copy.h"

#include <cstring>
#include <utility>

#include "kernels/runtime/check.h"
#if HEDDLE_WITH_CUDA
#include "kernels/runtime/device_cuda.h"
#endif

namespace heddle {

HostCopy::HostCopy(const ConstView& source) : device_(source.device) {
  const std::int64_t nbytes = source.numel() * static_cast<std::int64_t>(dtype_size(source.dtype));
  HEDDLE_CHECK(source.is_contiguous() && nbytes <= kMaxBytes, "host_copy: needs a dense tensor of at most ", kMaxBytes,
               " bytes, got ", source.dtype, " ", source.shape);
#if HEDDLE_WITH_CUDA
  if (device_.is_cuda()) {
    slot_ = cuda::start_host_copy(source.data, nbytes, device_.index);
    return;
  }
#endif
  std::memcpy(bytes_.data(), source.data, static_cast<std::size_t>(nbytes));
}

HostCopy::~HostCopy() {
#if HEDDLE_WITH_CUDA
  if (slot_ >= 0) cuda::end_host_copy(slot_, device_.index);
#endif
}

HostCopy::HostCopy(HostCopy&& other) noexcept : device_(other.device_), bytes_(other.bytes_), slot_(std::exchange(other.slot_, -1)) {}

HostCopy& HostCopy::operator=(HostCopy&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(bytes_, other.bytes_);
  std::swap(slot_, other.slot_);
  return *this;
}

bool HostCopy::is_ready() const {
#if HEDDLE_WITH_CUDA
  if (slot_ >= 0) return cuda::is_host_copy_ready(slot_, device_.index);
#endif
  return true;
}

const void* HostCopy::wait() const {
#if HEDDLE_WITH_CUDA
  if (slot_ >= 0) return cuda::wait_for_host_copy(slot_, device_.index);
#endif
  return bytes_.data();
}

}  // namespace heddle
