#include "kernels/runtime/allocator.h"

#include <atomic>
#include <cstdlib>
#include <utility>

#include "kernels/runtime/check.h"

namespace heddle {
namespace {

constexpr std::int64_t kHostAlignment = 64;  // one cache line, and the widest vector register

struct Counters {
  std::atomic<std::int64_t> current{0};
  std::atomic<std::int64_t> peak{0};

  void add(std::int64_t nbytes) {
    const std::int64_t now = current.fetch_add(nbytes) + nbytes;
    std::int64_t seen = peak.load();
    while (now > seen && !peak.compare_exchange_weak(seen, now)) {
    }
  }
};

Counters& host_counters() {
  static Counters counters;
  return counters;
}

void check_host(Device device) {
  HEDDLE_CHECK(device.is_cpu(), "allocator: ", device_support(device).reason, " (asked for ", device, ")");
}

}  // namespace

Buffer::Buffer(std::int64_t nbytes, Device device) : nbytes_(nbytes), device_(device) {
  check_host(device);
  HEDDLE_CHECK(nbytes >= 0, "allocator: ", nbytes, " bytes asked for; the element count overflowed or a size is negative");
  if (nbytes == 0) return;
  // Rounded in unsigned arithmetic: aligned_alloc wants a multiple of the alignment.
  const auto alignment = static_cast<std::size_t>(kHostAlignment);
  const std::size_t rounded = (static_cast<std::size_t>(nbytes) + alignment - 1) / alignment * alignment;
  data_ = std::aligned_alloc(alignment, rounded);
  HEDDLE_CHECK(data_ != nullptr, "allocator: out of memory on ", device, ": asked for ", nbytes, " bytes with ",
               host_counters().current.load(), " in use; use a smaller batch or model");
  host_counters().add(nbytes);
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  host_counters().current.fetch_sub(nbytes_);
  std::free(data_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)), device_(other.device_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(device_, other.device_);
  return *this;
}

MemoryStats memory_stats(Device device) {
  check_host(device);
  return {host_counters().current.load(), host_counters().peak.load()};
}

void reset_peak_memory(Device device) {
  check_host(device);
  host_counters().peak.store(host_counters().current.load());
}

}  // namespace heddle
