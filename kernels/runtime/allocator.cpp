#include "kernels/runtime/allocator.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "kernels/runtime/check.h"
#if HEDDLE_WITH_CUDA
#include "kernels/runtime/device_cuda.h"
#endif

namespace heddle {
namespace {

constexpr std::size_t kHostAlignment = 64;  // one cache line, and the widest vector register

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

Counters& counters(Device device) {
  static std::array<Counters, 1 + kMaxCudaDevices> table;
  const std::size_t slot = device.is_cpu() ? 0 : 1 + static_cast<std::size_t>(device.index);
  HEDDLE_CHECK(slot < table.size(), "allocator: device index ", device.index, " is not below ", kMaxCudaDevices);
  return table[slot];
}

// Null when memory is exhausted.
void* allocate(std::int64_t nbytes, Device device) {
  if (device.is_cpu()) {
    // aligned_alloc wants a multiple of the alignment; rounded in unsigned arithmetic.
    const std::size_t rounded = (static_cast<std::size_t>(nbytes) + kHostAlignment - 1) / kHostAlignment * kHostAlignment;
    return std::aligned_alloc(kHostAlignment, rounded);
  }
#if HEDDLE_WITH_CUDA
  return cuda::allocate(nbytes, device.index);
#else
  throw Error(concat_text("allocator: ", device_support(device).reason, " (asked for ", device, ")"));
#endif
}

void release(void* memory, Device device) noexcept {
  if (device.is_cpu()) std::free(memory);
#if HEDDLE_WITH_CUDA
  else cuda::release(memory, device.index);
#endif
}

}  // namespace

Buffer::Buffer(std::int64_t nbytes, Device device) : nbytes_(nbytes), device_(device) {
  HEDDLE_CHECK(nbytes >= 0, "allocator: ", nbytes, " bytes asked for; the element count overflowed or a size is negative");
  if (nbytes == 0) return;
  data_ = allocate(nbytes, device);
  HEDDLE_CHECK(data_ != nullptr, "allocator: out of memory on ", device, ": asked for ", nbytes, " bytes with ",
               counters(device).current.load(), " in use; use a smaller batch or model");
  counters(device).add(nbytes);
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  counters(device_).current.fetch_sub(nbytes_);
  release(data_, device_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)), device_(other.device_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(device_, other.device_);
  return *this;
}

MemoryStats memory_stats(Device device) { return {counters(device).current.load(), counters(device).peak.load()}; }

void reset_peak_memory(Device device) { counters(device).peak.store(counters(device).current.load()); }

}  // namespace heddle
