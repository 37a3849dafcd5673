#include <csignal>
#include <filesystem>
#include <iostream>

#include "examples/commands.h"
#include "examples/run_setup.h"
#include "kernels/runtime/parallel.h"
#include "nn/posix_file.h"
#include "nn/trainer.h"

namespace heddle::examples {
namespace {

constexpr int kInterrupted = 130;  // 128 + SIGINT, as shells report it
constexpr std::string_view kResumeKey = "train.resume_from_checkpoint";

struct TrainCommand {
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
  std::string out = "heddle train " + shell_quoted(command.config);
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
  std::cout << "model: " << count(model.parameters()) << " parameters, " << count(model.trainable_parameters())
            << " of them trainable\n";
}

std::string precision_text(const nn::TrainConfig& train) {
  if (train.precision == nn::Precision::bf16) return "bfloat16, master weights and gradients of weights float32";
  return train.allow_tf32 ? "float32, products on CUDA in TF32 (train.allow_tf32)" : "float32";
}

int run_train(const TrainCommand& command) {
  const config::RunConfig run = config::load_run_config(command.config, command.overrides);
  const std::string yaml = config::to_yaml(run);
  const Device device = choose_model_device(run);
  std::cout << yaml << '\n';
  const auto data = nn::make_dataset(run.data, static_cast<std::uint64_t>(run.train.seed));
  nn::CausalLM model = make_model(run, device);
  std::cout << "device: " << device << ", " << num_threads() << " CPU threads\n" << "precision: " << precision_text(run.train) << '\n' << "data: " << data->describe() << '\n';
  print_parameters(model);

  const InterruptGuard guard;
  nn::Trainer trainer(model, *data, run.train,
                      {.title = std::filesystem::path(command.config).stem().string(),
                       .config_yaml = yaml,
                       .interrupted = [] { return interrupt_requested != 0; }});
  std::cout << "optimizer: " << trainer.optimizer().describe_groups() << std::endl;
  if (!command.graph.empty()) nn::write_graph(command.graph, model, data->train_batch(0, run.train.micro_batch_size));

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

void add_train_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("train", "Train a model as a config file says");
  const auto command = std::make_shared<TrainCommand>();
  sub->add_option("config", command->config, "Config file; configs/README.md lists every key")->required();
  sub->add_option("--set", command->overrides, "Override one value: section.key=value")->allow_extra_args(false);
  sub->add_option("--graph", command->graph, "Write the graph of the first batch's loss as a Graphviz file");
  sub->footer("Example: heddle train configs/tiny.yaml --set train.max_steps=200\n"
              "Ctrl-C finishes the step, saves a checkpoint and says how to resume.");
  sub->callback([command, &exit_code] { exit_code = run_train(*command); });
}

}  // namespace heddle::examples
