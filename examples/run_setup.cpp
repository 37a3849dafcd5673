#include "examples/run_setup.h"

#include "kernels/runtime/context.h"
#include "kernels/runtime/parallel.h"

namespace heddle::examples {

Device choose_device(const std::string& name) {
  if (name == "auto") {
    constexpr Device kFirstGpu{DeviceType::cuda, 0};
    return device_support(kFirstGpu).ok ? kFirstGpu : kCpu;
  }
  const Device device = parse_device(name);
  const DeviceSupport support = device_support(device);
  if (!support.ok) throw ConfigError(concat_text("device: cannot use ", name, ": ", support.reason));
  return device;
}

nn::CausalLM make_model(const config::RunConfig& run, Device device) {
  if (run.train.num_threads > 0) set_num_threads(static_cast<int>(run.train.num_threads));
  device_context(device).deterministic = run.attention.deterministic;
  const DType dtype = run.train.precision == nn::Precision::bf16 ? DType::bf16 : DType::f32;
  Generator generator{static_cast<std::uint64_t>(run.train.seed)};
  return nn::CausalLM(run.model, {.dtype = dtype, .device = device}, generator, run.attention.kernel);
}

}  // namespace heddle::examples
