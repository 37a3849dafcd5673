#include <iostream>

#include "examples/commands.h"
#include "examples/run_setup.h"
#include "nn/checkpoint.h"
#include "nn/generate.h"
#include "nn/tokenizer.h"

namespace heddle::examples {
namespace {

struct GenerateCommand {
  std::string model, prompt, device = "auto";
  nn::SamplingOptions sampling;
};

int run_generate(const GenerateCommand& command) {
  nn::validate(command.sampling);
  if (command.prompt.empty()) throw ConfigError("--prompt: expected at least one byte to continue, got \"\"");
  const nn::Checkpoint checkpoint = nn::open_checkpoint(command.model, nn::Pick::best);
  config::RunConfig run = config::load_run_config((checkpoint.folder / "config.yaml").string());
  run.device = command.device;
  nn::CausalLM model = make_model(run, choose_model_device(run));
  nn::load_weights(checkpoint.folder / "model.safetensors", model);
  model.eval();

  const nn::ByteTokenizer tokenizer;
  const std::vector<std::int32_t> prompt = tokenizer.encode(command.prompt);
  std::cout << command.prompt << tokenizer.decode(nn::generate(model, prompt, command.sampling)) << '\n';
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("generate", "Continue a text with a trained model");
  const auto command = std::make_shared<GenerateCommand>();
  nn::SamplingOptions& sampling = command->sampling;
  sub->add_option("--model", command->model, "A checkpoint, or the output folder of a run: its best checkpoint")->required();
  sub->add_option("--prompt", command->prompt, "Text to continue")->required();
  sub->add_option("--max-new-tokens", sampling.max_new_tokens, "How many tokens to add")->capture_default_str();
  sub->add_option("--temperature", sampling.temperature, "0 takes the most probable token each time")->capture_default_str();
  sub->add_option("--top-k", sampling.top_k, "Choose among the k most probable tokens; 0: among all")->capture_default_str();
  sub->add_option("--top-p", sampling.top_p, "Choose among the fewest tokens with this total probability")->capture_default_str();
  sub->add_option("--seed", sampling.seed, "The same seed gives the same text")->capture_default_str();
  sub->add_option("--device", command->device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  sub->footer("Example: heddle generate --model runs/tiny --prompt 'Tensor ' --temperature 0.8");
  sub->callback([command, &exit_code] { exit_code = run_generate(*command); });
}

}  // namespace heddle::examples
