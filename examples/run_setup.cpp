#include "examples/run_setup.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <map>
#include <utility>

#include "kernels/runtime/context.h"
#include "kernels/runtime/parallel.h"
#include "nn/checkpoint.h"
#include "nn/posix_file.h"
#include "quant/fp8_training.h"
#include "quant/quant_file.h"
#include "quant/quant_linear.h"
#include "quant/quantize_model.h"
#include "quant/quantized_base.h"

namespace heddle::examples {
namespace {

constexpr Device kFirstGpu{DeviceType::cuda, 0};
constexpr std::array kBothPasses = {AttentionPass::forward, AttentionPass::backward};

DType model_dtype(const config::RunConfig& run) { return nn::dtype_of(run.train.precision); }

// Throws unless the kernel can run the passes.
void check_kernel(const AttentionProblem& problem, std::span<const AttentionPass> passes, const std::string& kernel) {
  for (const AttentionPass pass : passes) select_attention(problem, pass, kernel);
}

void check_kernel_name(const std::string& kernel) {
  bool is_known = kernel == "auto";
  std::string names = "auto";
  for (const AttentionVariant& variant : attention_variants()) {
    is_known = is_known || kernel == variant.name;
    names.append(", ").append(variant.name);
  }
  if (!is_known) throw nn::BadValue("attention.kernel", "one of " + names, nn::quoted_text(kernel));
}

// Quantised weights are frozen, and quantised once.
void check_quantised(const config::RunConfig& run) {
  if (run.quantize && !run.lora)
    throw nn::BadValue("quantize.format", "a section lora beside it: quantised weights are frozen, and without an adapter every weight is trained",
                       std::string(name_of(run.quantize->format)));
  if (!run.base || !quant::has_quantized(nn::open_weights(*run.base))) {
    if (run.compute && !run.quantize)
      throw nn::BadValue("quantize.compute", "quantize.format beside it, or a base that is quantised", std::string(quant::compute_name(*run.compute)));
    return;
  }
  if (!run.lora)
    throw nn::BadValue("base", "a model that is not quantised, or a section lora beside it: quantised weights are frozen", nn::quoted_text(*run.base));
  if (run.quantize)
    throw nn::BadValue("quantize.format", concat_text("nothing but quantize.compute beside ", nn::quoted_text(*run.base), ", which is quantised already"),
                       std::string(name_of(run.quantize->format)));
}

void check_fp8(const config::RunConfig& run, Device device) {
  if (run.train.precision != nn::Precision::fp8) return;
  if (run.lora)
    throw nn::BadValue("train.precision", "bf16 beside lora: a frozen base is multiplied in FP8 by quantize.format fp8_e4m3", "fp8");
  const std::string obstacle = quant::fp8_obstacle(run.model, device);
  if (!obstacle.empty()) throw nn::BadValue("train.precision", concat_text("bf16 or fp32 (", obstacle, ")"), "fp8");
}

// [out, in] of a linear layer.
std::pair<std::int64_t, std::int64_t> shape_of(const std::string& layer, const nn::TransformerConfig& m) {
  const std::int64_t width = m.hidden_size, queries = m.num_attention_heads * m.head_size(), keys = m.kv_heads() * m.head_size();
  const std::map<std::string, std::pair<std::int64_t, std::int64_t>> shapes = {
      {"q_proj", {queries, width}},         {"k_proj", {keys, width}},          {"v_proj", {keys, width}},        {"o_proj", {width, queries}},
      {"gate_proj", {m.ffn_size(), width}}, {"up_proj", {m.ffn_size(), width}}, {"down_proj", {width, m.ffn_size()}}, {"lm_head", {m.vocab_size, width}}};
  return shapes.at(layer.substr(layer.rfind('.') + 1));
}

// FP8 products that the device cannot do with the weights the base has, or is to have.
void check_compute(const config::RunConfig& run, Device device) {
  if (run.compute != QuantCompute::fp8) return;
  std::vector<quant::StoredLayer> layers;
  if (run.quantize) {
    for (const std::string& name : lora::linear_layers(run.model))
      if (const auto [out, in] = shape_of(name, run.model); !quant::is_excluded(name, run.quantize->exclude)) layers.push_back({run.quantize->spec(), out, in});
  } else if (run.base) {
    if (const std::filesystem::path folder = nn::open_weights(*run.base); quant::has_quantized(folder)) layers = quant::stored_layers(folder);
  }
  for (const auto& [spec, out, in] : layers) quant::require_fp8_products(spec, out, in, model_dtype(run), device);
}

Device choose_training_device(const config::RunConfig& run) {
  try {
    return choose_attention_device(run.device, attention_problem(run), kBothPasses, run.attention.kernel);
  } catch (const Error& error) {
    const std::string got = concat_text(nn::quoted_text(run.attention.kernel), " (", error.what(), ")");
    throw nn::BadValue("attention.kernel", "a kernel that can train this model", got);
  }
}

}  // namespace

Device choose_device(const std::string& name) {
  if (name == "auto") return device_support(kFirstGpu).ok ? kFirstGpu : kCpu;
  const Device device = parse_device(name);
  const DeviceSupport support = device_support(device);
  if (!support.ok) throw nn::BadValue("device", "a device that can be used", concat_text(name, " (", support.reason, ")"));
  return device;
}

Device choose_attention_device(const std::string& name, AttentionProblem problem, std::span<const AttentionPass> passes,
                               const std::string& kernel) {
  problem.device = choose_device(name);
  try {
    check_kernel(problem, passes, kernel);
  } catch (const Error& error) {
    if (name != "auto" || problem.device.is_cpu()) throw;
    const Device gpu = std::exchange(problem.device, kCpu);
    check_kernel(problem, passes, kernel);
    std::cerr << "device auto: the CPU, because on " << gpu << " " << error.what() << '\n';
  }
  return problem.device;
}

TrainingSetup load_training(const std::string& path, const std::vector<std::string>& overrides,
                            std::vector<config::RunCheck> checks) {
  TrainingSetup out;
  checks.push_back({{""}, [](const auto& run) { choose_device(run.device); }});
  checks.push_back({{"", "quantize"}, [](const auto& run) { check_quantised(run); }});
  checks.push_back({{"attention"}, [](const auto& run) { check_kernel_name(run.attention.kernel); }});
  checks.push_back({{"", "model", "attention"}, [&](const auto& run) { out.device = choose_training_device(run); }});
  checks.push_back({{"", "model", "attention", "train"}, [&](const auto& run) { check_fp8(run, out.device); }});
  checks.push_back({{"", "model", "attention", "train", "quantize"}, [&](const auto& run) { check_compute(run, out.device); }});
  checks.push_back({{"", "model", "attention", "train"}, [&](const auto& run) {
                      if (run.train.cuda_graph && out.device.is_cpu()) throw nn::BadValue("train.cuda_graph", "false on the CPU", "true");
                    }});
  checks.push_back({{"model", "data"}, [&](const auto& run) {
                      out.data = nn::make_dataset(run.data, static_cast<std::uint64_t>(run.train.seed));
                    }});
  out.run = config::load_run_config(path, overrides, checks);
  return out;
}

void use_threads(std::int64_t wanted, std::string_view source) {
  const std::int64_t cores = num_cores();
  if (wanted > cores) std::cerr << "heddle: " << source << " asks for " << wanted << " threads; using " << cores << ", one a core\n";
  set_num_threads(static_cast<int>(std::min(wanted, cores)));
}

void apply_settings(const config::RunConfig& run, Device device) {
  if (run.train.num_threads > 0) use_threads(run.train.num_threads, "train.num_threads");
  device_context(device).deterministic = run.attention.deterministic;
  device_context(device).allow_tf32 = run.train.allow_tf32;
}

nn::CausalLM make_model(const config::RunConfig& run, Device device, Weights weights) {
  nn::TransformerConfig config = run.model;
  if (weights == Weights::loaded_next) config.initializer_range = 0;
  Generator generator{static_cast<std::uint64_t>(run.train.seed)};
  return nn::CausalLM(config, {.dtype = model_dtype(run), .device = device}, generator, run.attention.kernel);
}

config::RunConfig stored_config(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.yaml";
  config::RunConfig run = config::load_run_config(file.string(), {"attention.kernel=auto", "device=auto", "base=null"}, {}, config::Base::not_opened);
  if (run.compute)
    std::cerr << "heddle: not used: quantize.compute " << quant::compute_name(*run.compute) << " in " << nn::printable_path(file)
              << ", which says how another run multiplied\n";
  run.compute.reset();
  return run;
}

void follow_adapter(const std::filesystem::path& adapter, const std::filesystem::path& base, config::RunConfig& run) {
  if (quant::has_quantized(base) || !std::filesystem::exists(adapter / "config.yaml")) return;
  const config::RunConfig trained = stored_config(adapter);
  if (!trained.quantize) return;
  for (const std::string& difference : config::resume_changes(trained, run).refused)
    HEDDLE_CHECK(!difference.starts_with("model."), nn::printable_path(adapter), " was trained on another model than ", nn::printable_path(base), ": ",
                 difference);
  run.quantize = trained.quantize;
  run.train.precision = trained.train.precision;
}

bool load_model_weights(const std::string& path, const config::RunConfig& run, nn::CausalLM& model, nn::Dtypes dtypes) {
  const std::filesystem::path folder = nn::open_weights(path);
  const bool is_stored = quant::has_quantized(folder);
  if (!is_stored && !run.quantize) {
    nn::load_weights(folder, model, dtypes);
    return false;
  }
  if (!is_stored) {
    for (const std::string& line : quant::load_quantized_base(path, folder, *run.quantize, model_dtype(run), model, run.compute))
      std::cerr << "heddle: " << line << '\n';
  } else if (const std::vector<std::string> ignored = quant::load_quantized(folder, model, run.compute); !ignored.empty()) {
    std::cerr << "heddle: not used: " << ignored.size() << " scales of activations, " << nn::printable(ignored.front()) << " the first\n";
  }
  for (const std::string& line : quant::describe_products(model)) std::cerr << "heddle: " << line << '\n';
  return true;
}

std::optional<lora::Adapter> start_from_base(const config::RunConfig& run, nn::CausalLM& model) {
  if (!run.base) return std::nullopt;
  load_model_weights(*run.base, run, model, nn::Dtypes::converted);
  if (!run.lora) return std::nullopt;
  Generator generator{static_cast<std::uint64_t>(run.train.seed)};
  lora::Adapter adapter(model, lora::plan_layers(lora::linear_layers(model), *run.lora), *run.lora, generator);
  for (const std::string& name : adapter.zero_layers()) std::cerr << "heddle: all weights of " << name << " are zero\n";
  adapter.attach(model);
  return adapter;
}

void use_precision(const config::RunConfig& run, nn::CausalLM& model) {
  if (run.train.precision == nn::Precision::fp8)
    quant::use_fp8(model, run.train.fp8_scaling == nn::Fp8Scaling::delayed ? run.train.fp8_history : 0);
}

AttentionProblem attention_problem(const config::RunConfig& run) {
  return {.B = 1,
          .Sq = 1,
          .Sk = 1,
          .Hq = run.model.num_attention_heads,
          .Hkv = run.model.kv_heads(),
          .D = run.model.head_size(),
          .dtype = model_dtype(run),
          .is_causal = true,
          .deterministic = run.attention.deterministic};
}

}  // namespace heddle::examples
