#include "examples/run_setup.h"

#include <iostream>

#include "kernels/attention/attention.h"
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

namespace {

DType model_dtype(const config::RunConfig& run) {
  return run.train.precision == nn::Precision::bf16 ? DType::bf16 : DType::f32;
}

// Throws unless the config's attention kernel can run the model forward and backward.
void check_attention_kernel(const config::RunConfig& run, Device device) {
  const AttentionProblem problem = {.B = 1,
                                    .Sq = 1,
                                    .Sk = 1,
                                    .Hq = run.model.num_attention_heads,
                                    .Hkv = run.model.kv_heads(),
                                    .D = run.model.head_size(),
                                    .dtype = model_dtype(run),
                                    .is_causal = true,
                                    .deterministic = run.attention.deterministic,
                                    .device = device};
  for (const AttentionPass pass : {AttentionPass::forward, AttentionPass::backward})
    select_attention(problem, pass, run.attention.kernel);
}

}  // namespace

Device choose_model_device(const config::RunConfig& run) {
  const Device device = choose_device(run.device);
  if (run.device != "auto" || device.is_cpu()) return device;
  try {
    check_attention_kernel(run, device);
    return device;
  } catch (const Error& error) {
    std::cout << "device auto: the CPU, because on " << device << " " << error.what() << '\n';
    return kCpu;
  }
}

nn::CausalLM make_model(const config::RunConfig& run, Device device) {
  if (run.train.num_threads > 0) set_num_threads(static_cast<int>(run.train.num_threads));
  device_context(device).deterministic = run.attention.deterministic;
  device_context(device).allow_tf32 = run.train.allow_tf32;
  check_attention_kernel(run, device);
  Generator generator{static_cast<std::uint64_t>(run.train.seed)};
  return nn::CausalLM(run.model, {.dtype = model_dtype(run), .device = device}, generator, run.attention.kernel);
}

}  // namespace heddle::examples
