#include "kernels/runtime/context.h"

#include "kernels/runtime/check.h"

namespace heddle {

ExecContext& device_context(Device device) {
  const DeviceSupport support = device_support(device);
  HEDDLE_CHECK(support.ok, "device ", device, ": ", support.reason);
  thread_local ExecContext cpu_context{.device = kCpu};
  return cpu_context;
}

}  // namespace heddle
