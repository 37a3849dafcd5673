#include <array>
#include <iostream>

#include "examples/commands.h"
#include "examples/options.h"
#include "examples/run_setup.h"
#include "lora/adapter_file.h"
#include "nn/checkpoint.h"
#include "nn/generate.h"
#include "nn/tokenizer.h"

namespace heddle::examples {
namespace {

struct GenerateCommand {
  std::string model, adapter, prompt, device = "auto";
  nn::SamplingOptions sampling;
};

int run_generate(const GenerateCommand& command) {
  if (command.prompt.empty()) throw ConfigError("--prompt: expected at least one byte to continue, got \"\"");
  const std::filesystem::path folder = nn::open_weights(command.model);
  config::RunConfig run = stored_config(folder);
  const std::filesystem::path adapter = command.adapter.empty() ? std::filesystem::path() : nn::open_adapter(command.adapter);
  if (!adapter.empty()) follow_adapter(adapter, folder, run);
  constexpr std::array kPasses = {AttentionPass::forward};
  const Device device = choose_attention_device(command.device, attention_problem(run), kPasses, run.attention.kernel);
  apply_settings(run, device);
  nn::CausalLM model = make_model(run, device, Weights::loaded_next);
  load_model_weights(command.model, run, model);
  if (!adapter.empty()) lora::load_adapter(adapter, model).attach(model);
  model.eval();

  const nn::ByteTokenizer tokenizer;
  const std::vector<std::int32_t> prompt = tokenizer.encode(command.prompt);
  const std::int64_t context = model.config().max_position_embeddings;
  if (static_cast<std::int64_t>(prompt.size()) > context)
    std::cerr << "heddle: the prompt has " << prompt.size() << " tokens; the model sees the last " << context << '\n';
  nn::SamplingOptions sampling = command.sampling;
  sampling.vocab_size = tokenizer.vocab_size();
  std::cout << command.prompt << tokenizer.decode(nn::generate(model, prompt, sampling)) << '\n';
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("generate", "Continue a text with a trained model");
  const auto command = std::make_shared<GenerateCommand>();
  nn::SamplingOptions& sampling = command->sampling;
  sub->add_option("--model", command->model, "A checkpoint, or the output folder of a run: its best checkpoint")->required()->check(non_empty());
  sub->add_option("--adapter", command->adapter, "An adapter trained on this model: its folder, or the output folder of a run: its best checkpoint")
      ->check(non_empty());
  sub->add_option("--prompt", command->prompt, "Text to continue; of one longer than the model's context, the end")->required();
  sub->add_option("--max-new-tokens", sampling.max_new_tokens, "How many tokens to add")->check(integer_in(0))->capture_default_str();
  sub->add_option("--temperature", sampling.temperature, "0 takes the most probable token each time")
      ->check(number_in(nn::at_least(0)))->capture_default_str();
  sub->add_option("--top-k", sampling.top_k, "Choose among the k most probable tokens; 0: among all")
      ->check(integer_in(0))->capture_default_str();
  sub->add_option("--top-p", sampling.top_p, "Choose among the fewest tokens with this total probability")
      ->check(number_in({.low = 0, .high = 1, .low_included = false}))->capture_default_str();
  sub->add_option("--seed", sampling.seed, "The same seed gives the same text")->check(integer_in(0))->capture_default_str();
  add_device_option(*sub, command->device);
  sub->footer("Example: heddle generate --model runs/tiny --prompt 'Tensor ' --temperature 0.8");
  sub->callback([command, &exit_code] { exit_code = run_generate(*command); });
}

}  // namespace heddle::examples
