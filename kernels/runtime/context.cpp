#include "kernels/runtime/context.h"

#include "kernels/runtime/check.h"
#if HEDDLE_WITH_CUDA
#include <map>

#include "kernels/runtime/device_cuda.h"
#endif

namespace heddle {

ExecContext& device_context(Device device) {
  if (device.is_cpu()) {
    thread_local ExecContext cpu_context{.device = kCpu};
    return cpu_context;
  }
#if HEDDLE_WITH_CUDA
  thread_local std::map<int, ExecContext> cuda_contexts;
  const auto known = cuda_contexts.find(device.index);
  if (known != cuda_contexts.end()) return known->second;
#endif
  const DeviceSupport support = device_support(device);
  HEDDLE_CHECK(support.ok, "device ", device, ": ", support.reason);
#if HEDDLE_WITH_CUDA
  return cuda_contexts[device.index] = {.device = device, .stream = cuda::stream(device.index)};
#else
  throw Error(concat_text("device ", device, ": has no context in this build"));
#endif
}

}  // namespace heddle
