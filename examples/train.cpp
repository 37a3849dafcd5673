#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>

#include "examples/commands.h"
#include "examples/options.h"
#include "examples/run_setup.h"
#include "kernels/runtime/parallel.h"
#include "lora/adapter_file.h"
#include "nn/checkpoint.h"
#include "nn/posix_file.h"
#include "nn/trainer.h"
#include "quant/fp8_training.h"
#include "quant/quantize_model.h"

namespace heddle::examples {
namespace {

namespace fs = std::filesystem;

constexpr int kInterrupted = 130;  // 128 + SIGINT, as shells report it
constexpr std::string_view kResumeKey = "train.resume_from_checkpoint";

struct TrainCommand {
  std::string program;
  std::string config;
  std::vector<std::string> overrides;
  std::string graph;
};

volatile std::sig_atomic_t interrupt_requested = 0;

// While it lives, the first Ctrl-C only sets interrupt_requested; a second one ends the program at once.
class InterruptGuard {
 public:
  InterruptGuard() {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupt_requested = 1; };
    action.sa_flags = SA_RESTART | SA_RESETHAND;
    ::sigaction(SIGINT, &action, &previous_);
  }
  ~InterruptGuard() { ::sigaction(SIGINT, &previous_, nullptr); }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  struct sigaction previous_ {};
};

std::string shell_quoted(const std::string& text) {
  if (text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,") == std::string::npos)
    return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string resume_command(const TrainCommand& command) {
  std::string out = shell_quoted(command.program) + " train " + shell_quoted(command.config);
  for (const std::string& setting : command.overrides)
    if (!setting.starts_with(kResumeKey)) out += " --set " + shell_quoted(setting);
  return concat_text(out, " --set ", kResumeKey, "=auto");
}

void print_parameters(const nn::CausalLM& model) {
  const auto count = [](const std::vector<nn::NamedTensor>& parameters) {
    std::int64_t total = 0;
    for (const nn::NamedTensor& parameter : parameters) total += parameter.tensor.numel();
    return total;
  };
  const std::int64_t quantized = quant::quantized_weights(model), trainable = count(model.trainable_parameters());
  const std::int64_t total = count(model.parameters()) + quantized;
  std::cout << "model: " << total << " parameters, " << trainable << " of them trainable";
  if (trainable < total) std::printf(" (%.2f %%)", 100.0 * static_cast<double>(trainable) / static_cast<double>(total));
  if (quantized > 0) std::cout << ", " << quantized << " quantised";
  std::cout << std::endl;
}

// "lora: 8 layers of runs/arithmetic: 2 k_proj, 2 o_proj, 2 q_proj, 2 v_proj"
void print_adapter(const lora::Adapter& adapter, const std::string& base) {
  std::map<std::string, int> counts;
  std::size_t layers = 0;
  for (const lora::AdaptedLayer& layer : adapter.layers())
    for (const std::string& name : layer.names) {
      ++counts[name.substr(name.rfind('.') + 1)];
      ++layers;
    }
  std::cout << "lora: " << layers << " layers of " << nn::printable(base);
  for (const auto& [name, count] : counts) std::cout << (name == counts.begin()->first ? ": " : ", ") << count << ' ' << name;
  std::cout << '\n';
}

// What the trainer needs to know of an adapter.
nn::AdapterState adapter_state(const nn::CausalLM& model, const lora::Adapter& adapter, const std::string& base) {
  const std::string fingerprint = lora::base_fingerprint(model);
  return {.tensors = adapter.parameters(),
          .write_files = [&, base, fingerprint](const fs::path& folder) { lora::save_adapter(folder, model, adapter, base, fingerprint); },
          .base = fingerprint};
}

std::string precision_text(const config::RunConfig& run) {
  const nn::TrainConfig& train = run.train;
  const std::string master = ", master weights and gradients of weights float32";
  if (train.precision == nn::Precision::fp8) return quant::describe_fp8(run.model, train) + master;
  if (train.precision == nn::Precision::bf16) return "bfloat16" + master;
  return train.allow_tf32 ? "float32, products on CUDA in TF32 (train.allow_tf32)" : "float32";
}

// Whether a file is one that a run wrote: nothing in it gets lost when another run writes it again.
bool is_resolved_config(const std::string& path) {
  try {
    return nn::read_file(path) == config::to_yaml(config::load_run_config(path, {}, {}, config::Base::not_opened));
  } catch (const Error&) {
    return false;
  }
}

void check_output_folder(const std::string& config_path, const config::RunConfig& run) {
  std::error_code missing;
  const bool is_same = fs::equivalent(config_path, fs::path(run.train.output_dir) / "config.yaml", missing);
  if (is_same && !is_resolved_config(config_path)) {
    throw nn::BadValue("train.output_dir", "another folder than the config file's, where config.yaml is the run's own",
                       nn::quoted_text(run.train.output_dir));
  }
  if (!run.base) return;
  const fs::path base = fs::weakly_canonical(*run.base), output = fs::weakly_canonical(run.train.output_dir);
  const auto holds = [](const fs::path& folder, const fs::path& path) {
    return std::ranges::mismatch(folder, path).in1 == folder.end();
  };
  if (holds(base, output) || holds(output, base)) {  // which would move the base, or clear it away with other checkpoints
    throw nn::BadValue("train.output_dir", "a folder neither in the base's nor around it",
                       concat_text(nn::quoted_text(run.train.output_dir), ", with base ", nn::quoted_text(*run.base)));
  }
}

// The checkpoint that resume_from_checkpoint means. Throws nn::BadValue if there is none at the path.
std::optional<nn::Checkpoint> checkpoint_to_resume(const nn::TrainConfig& train) {
  if (!train.resume_from_checkpoint) return std::nullopt;
  if (*train.resume_from_checkpoint == "auto") return nn::find_last_checkpoint(train.output_dir);
  try {
    return nn::open_checkpoint(*train.resume_from_checkpoint, nn::Pick::last);
  } catch (const Error& error) {
    const std::string got = concat_text(nn::quoted_text(*train.resume_from_checkpoint), " (", error.what(), ")");
    throw nn::BadValue(std::string(kResumeKey), "auto, a checkpoint or the output folder of a run", got);
  }
}

// Refuses to continue a checkpoint as another model; returns a warning for everything else that will be different.
std::vector<std::string> check_resume(const config::RunConfig& run) {
  const auto from = checkpoint_to_resume(run.train);
  if (!from) return {};
  const std::string path = nn::printable_path(from->folder);
  const auto before = config::load_run_config((from->folder / "config.yaml").string(), {}, {}, config::Base::not_opened);
  const auto changes = config::resume_changes(before, run);
  if (!changes.refused.empty()) {
    std::string got = path + ", which has ";
    for (const std::string& change : changes.refused) got += (&change == &changes.refused.front() ? "" : "; ") + change;
    throw nn::BadValue(std::string(kResumeKey), "a checkpoint of the same model", got);
  }
  std::vector<std::string> warnings;
  for (const std::string& change : changes.noted) warnings.push_back("warning: " + path + " has " + change);
  return warnings;
}

int run_train(const TrainCommand& command) {
  std::vector<std::string> warnings;
  const auto [run, device, data] = load_training(
      command.config, command.overrides,
      {{{"", "train"}, [&](const auto& config) { check_output_folder(command.config, config); }},
       {{"model", "data", "train"}, [&](const auto& config) { warnings = check_resume(config); }}});
  apply_settings(run, device);
  nn::CausalLM model = make_model(run, device, run.base ? Weights::loaded_next : Weights::drawn);
  const std::optional<lora::Adapter> adapter = start_from_base(run, model);
  use_precision(run, model);
  if (!command.graph.empty()) {
    nn::write_graph(command.graph, model, data->train_batch(0, run.train.micro_batch_size));
    std::cout << "wrote " << nn::printable(command.graph) << "; nothing was trained\n";
    return 0;
  }
  const std::string yaml = config::to_yaml(run);
  const InterruptGuard guard;
  nn::Trainer trainer(model, *data, run.train,
                      {.title = fs::path(command.config).stem().string(),
                       .adapter = adapter ? std::optional(adapter_state(model, *adapter, *run.base)) : std::nullopt,
                       .rate_scale = [&](const nn::NamedTensor& parameter) { return adapter ? adapter->rate_scale(parameter) : 1; },
                       .config_yaml = yaml,
                       .interrupted = [] { return interrupt_requested != 0; }});
  std::cout << yaml << '\n';
  for (const std::string& warning : warnings) std::cout << warning << '\n';
  std::cout << "device: " << device << ", " << num_threads() << " CPU threads\n"
            << "precision: " << precision_text(run) << '\n'
            << "data: " << data->describe() << '\n';
  if (adapter) print_adapter(*adapter, *run.base);
  print_parameters(model);
  std::cout << "optimizer: " << trainer.optimizer().describe_groups() << std::endl;

  const nn::TrainResult result = trainer.run();
  if (!result.interrupted) return 0;
  std::cout << "interrupted after step " << result.step << "; "
            << (result.checkpoint.empty() ? "there is no checkpoint to resume from"
                                          : "to continue from " + nn::printable_path(result.checkpoint) + ":\n  " +
                                                resume_command(command))
            << '\n';
  return kInterrupted;
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code, const std::string& program) {
  CLI::App* sub = app.add_subcommand("train", "Train a model as a config file says");
  const auto command = std::make_shared<TrainCommand>();
  command->program = program;
  sub->add_option("config", command->config, "Config file; configs/README.md lists every key")->required()->check(non_empty());
  sub->add_option("--set", command->overrides, "Override one value: section.key=value")->allow_extra_args(false);
  sub->add_option("--graph", command->graph, "Write the graph of the first batch's loss as a Graphviz file, and train nothing")
      ->check(writable_file());
  sub->footer("Example: heddle train configs/tiny.yaml --set train.max_steps=200\n"
              "Ctrl-C finishes the step, saves a checkpoint and says how to resume.");
  sub->callback([command, &exit_code] { exit_code = run_train(*command); });
}

}  // namespace heddle::examples
