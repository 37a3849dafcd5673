#include "kernels/runtime/device.h"

#include <charconv>

#include "kernels/runtime/check.h"
#if HEDDLE_WITH_CUDA
#include "kernels/runtime/device_cuda.h"
#endif

namespace heddle {

std::ostream& operator<<(std::ostream& out, Device device) {
  if (device.is_cpu()) return out << "cpu";
  return out << "cuda:" << device.index;
}

Device parse_device(std::string_view text) {
  if (text == "cpu") return kCpu;
  if (text == "cuda") return {DeviceType::cuda, 0};
  constexpr std::string_view kPrefix = "cuda:";
  if (text.starts_with(kPrefix)) {
    int index = -1;
    const char* first = text.data() + kPrefix.size();
    const char* last = text.data() + text.size();
    const auto [end, status] = std::from_chars(first, last, index);
    if (status == std::errc{} && end == last && index >= 0) return {DeviceType::cuda, index};
  }
  throw ConfigError(concat_text("device: expected cpu, cuda or cuda:N, got '", text, "'"));
}

DeviceSupport device_support(Device device) {
  if (device.is_cpu()) return {true, ""};
#if HEDDLE_WITH_CUDA
  return cuda::device_support(device.index);
#else
  return {false, "this build has no CUDA kernels; use device cpu"};
#endif
}

std::int64_t wait_count([[maybe_unused]] Device device) {
#if HEDDLE_WITH_CUDA
  if (device.is_cuda()) return cuda::wait_count(device.index);
#endif
  return 0;
}

}  // namespace heddle
