#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

namespace heddle {

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  bool is_cpu() const { return type == DeviceType::cpu; }
  bool is_cuda() const { return type == DeviceType::cuda; }
  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr Device kCpu{};
// Per-device state is kept for this many CUDA devices; a larger index is an error.
inline constexpr int kMaxCudaDevices = 16;

std::ostream& operator<<(std::ostream& out, Device device);  // "cpu", "cuda:0"

// Parses "cpu", "cuda" (index 0) or "cuda:N". Throws heddle::ConfigError on anything else.
Device parse_device(std::string_view text);

// Whether this build and this machine can run on the device; `reason` says why not, and what to do.
struct DeviceSupport {
  bool ok = false;
  std::string reason;
};
DeviceSupport device_support(Device device);

// How often the host has waited for the device's work since the process started. A training step that is not logged adds
// nothing to it.
std::int64_t wait_count(Device device);

}  // namespace heddle
