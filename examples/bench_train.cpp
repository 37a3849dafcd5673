#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "examples/bench_timer.h"
#include "examples/commands.h"
#include "examples/options.h"
#include "examples/run_setup.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/parallel.h"
#include "nn/atomic_file.h"
#include "nn/trainer.h"
#include "quant/quantize_model.h"

namespace heddle::examples {
namespace {

struct BenchTrainCommand {
  std::string config, json;
  std::vector<std::string> overrides;
  int steps = 20, warmup = 5;
};

// 6 FLOP a parameter and token, 4 of a frozen one, and two attention products forward and four backward over half the T x T scores.
double flop_per_token(const nn::CausalLM& model, const nn::TransformerConfig& m, std::int64_t T) {
  std::int64_t work = 4 * quant::quantized_weights(model);
  for (const nn::NamedTensor& parameter : model.parameters())
    work += (parameter.tensor.requires_grad() ? 6 : 4) * parameter.tensor.numel();
  const std::int64_t scores = m.num_hidden_layers * T * m.num_attention_heads * m.head_size();
  return static_cast<double>(work) + 6.0 * static_cast<double>(scores);
}

// The updates of `heddle train`: forward, backward, clip, AdamW. Returns the seconds of each. As there, the result of an update is
// read when the next one has been started.
std::vector<double> time_updates(nn::CausalLM& model, const nn::Dataset& data, const nn::TrainConfig& train, int steps) {
  using Clock = std::chrono::steady_clock;
  nn::AdamW optimizer(model.trainable_parameters(), {.beta1 = train.adam_beta1,
                                                     .beta2 = train.adam_beta2,
                                                     .eps = train.adam_epsilon,
                                                     .weight_decay = train.weight_decay});
  nn::TrainStep train_step(model, optimizer, train);
  Generator dropout{static_cast<std::uint64_t>(train.seed)};
  std::int64_t examples = 0;
  std::vector<double> seconds;
  std::optional<nn::PendingUpdate> pending;
  const auto settle = [&] {
    if (!pending) return;
    const nn::UpdateResult update = pending->result();
    HEDDLE_CHECK(update.applied, "bench-train: the gradient of ", update.nonfinite, " is not finite; lower train.learning_rate");
  };
  for (int step = 0; step < steps; ++step) {
    const auto start = Clock::now();
    std::vector<nn::Batch> window;
    for (std::int64_t i = 0; i < train.gradient_accumulation_steps; ++i, examples += train.micro_batch_size)
      window.push_back(data.train_batch(examples, train.micro_batch_size));
    nn::StartedStep started = train_step.start(window, train.learning_rate, dropout);
    settle();
    pending = std::move(started.update);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  settle();
  return seconds;
}

int run_bench_train(const BenchTrainCommand& command) {
  const auto [run, device, data] = load_training(command.config, command.overrides);
  apply_settings(run, device);
  nn::CausalLM model = make_model(run, device, run.base ? Weights::loaded_next : Weights::drawn);
  start_from_base(run, model);
  use_precision(run, model);
  const double flop = flop_per_token(model, run.model, data->row_length());
  const DType dtype = nn::dtype_of(run.train.precision);
  const double ceiling = gemm_ceiling(dtype, device_context(device));

  reset_peak_memory(device);
  std::vector<double> seconds = time_updates(model, *data, run.train, command.warmup + command.steps);
  seconds.erase(seconds.begin(), seconds.begin() + command.warmup);
  std::ranges::sort(seconds);
  const double median = seconds[seconds.size() / 2], low = seconds.front(), high = seconds.back();
  const auto tokens = static_cast<double>(run.train.gradient_accumulation_steps * run.train.micro_batch_size * data->row_length());
  const double rate = flop * tokens / median;
  const double peak = static_cast<double>(memory_stats(device).peak_bytes);

  std::cout << "device: " << device << ", " << num_threads() << " CPU threads; " << nn::name_of(nn::EnumNames<nn::Precision>(nn::kPrecisionNames), run.train.precision) << '\n';
  std::printf("step:   %.3f ms, median of %d after %d; %.3f to %.3f\n", 1e3 * median, command.steps, command.warmup, 1e3 * low, 1e3 * high);
  std::printf("speed:  %.4g steps/s, %.6g tokens/s of %g tokens a step\n", 1 / median, tokens / median, tokens);
  std::printf("model:  %.4g TFLOP/s, %.1f %% of the %.4g that matrix products in %s reach\n", rate / 1e12, 100 * rate / ceiling, ceiling / 1e12,
              std::string(dtype_name(dtype)).c_str());
  std::printf("        %.4g MFLOP a token: 6 parameters (4 where frozen) + 6 layers T heads D\n", flop / 1e6);
  std::printf("memory: %.3f GiB at the peak\n", peak / (1 << 30));
  if (command.json.empty()) return 0;
  const nlohmann::json document = {{"config", command.config}, {"device", concat_text(device)}, {"step_ms", 1e3 * median},
                                   {"step_ms_min", 1e3 * low}, {"step_ms_max", 1e3 * high}, {"tokens_per_second", tokens / median},
                                   {"model_tflops", rate / 1e12}, {"gemm_tflops", ceiling / 1e12}, {"peak_gib", peak / (1 << 30)}};
  nn::write_file(command.json, document.dump(1) + "\n");
  return 0;
}

}  // namespace

void add_bench_train_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("bench-train", "Time the training step of a config file");
  const auto command = std::make_shared<BenchTrainCommand>();
  sub->add_option("config", command->config, "Config file; configs/README.md lists every key")->required()->check(non_empty());
  sub->add_option("--set", command->overrides, "Override one value: section.key=value")->allow_extra_args(false);
  sub->add_option("--steps", command->steps, "Timed steps")->check(integer_in(1, nn::kMaxCount))->capture_default_str();
  sub->add_option("--warmup", command->warmup, "Steps before them")->check(integer_in(1, nn::kMaxCount))->capture_default_str();
  sub->add_option("--json", command->json, "Write the results to this file too")->check(writable_file());
  sub->footer("Example: heddle bench-train configs/tiny.yaml --set train.micro_batch_size=64 --steps 10\n"
              "Nothing of the run is kept: no output folder, no checkpoint.");
  sub->callback([command, &exit_code] { exit_code = run_bench_train(*command); });
}

}  // namespace heddle::examples
