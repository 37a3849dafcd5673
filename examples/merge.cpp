#include <iostream>

#include "examples/commands.h"
#include "examples/options.h"
#include "examples/run_setup.h"
#include "lora/adapter_file.h"
#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "quant/quantize_model.h"

namespace heddle::examples {
namespace {

struct MergeCommand {
  std::string base, adapter, output;
};

// The config of the same model with its weights in bfloat16 again.
config::RunConfig dense_config(config::RunConfig run) {
  run.quantize.reset();
  run.train.precision = nn::Precision::bf16;
  return run;
}

int run_merge(const MergeCommand& command) {
  namespace fs = std::filesystem;
  nn::AtomicFolder out(command.output);  // before the work, so that a folder that cannot be written is known first
  const fs::path folder = nn::open_weights(command.base);
  config::RunConfig run = config::load_run_config((folder / "config.yaml").string(), {"attention.kernel=auto", "device=cpu", "base=null"});
  const DType dtype = run.train.precision == nn::Precision::bf16 ? DType::bf16 : DType::f32;
  run.train.precision = nn::Precision::fp32;
  nn::CausalLM model = make_model(run, kCpu);
  const bool is_quantized = load_model_weights(folder, run, model, nn::Dtypes::converted);
  lora::Adapter adapter = lora::load_adapter(nn::open_adapter(command.adapter), model);
  adapter.merge(model, is_quantized ? lora::Quantised::decoded : lora::Quantised::refused);
  quant::dequantize_model(model);

  nn::save_weights(out.path() / "model.safetensors", model, is_quantized ? DType::bf16 : dtype);
  nn::write_file(out.path() / "config.yaml", is_quantized ? config::to_yaml(dense_config(run)) : nn::read_file(folder / "config.yaml"));
  out.commit();
  std::size_t layers = 0;
  for (const lora::AdaptedLayer& layer : adapter.layers()) layers += layer.names.size();
  std::cout << "merged " << layers << " layers into " << nn::printable(command.output) << ": summed in float32, rounded to "
            << (is_quantized ? DType::bf16 : dtype) << ", to nearest even\n";
  if (run.quantize)
    std::cout << "the base was quantised, the merged weights are not; to quantise them again: "
              << quant::summary(quant::quantize_model(model, *run.quantize)) << '\n';
  return 0;
}

}  // namespace

void add_merge_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("merge", "Write a model with an adapter's changes in its weights");
  const auto command = std::make_shared<MergeCommand>();
  sub->add_option("--base", command->base, "A checkpoint, or the output folder of a run: its best checkpoint")->required()->check(non_empty());
  sub->add_option("--adapter", command->adapter, "An adapter trained on it: its folder, or the output folder of a run: its best checkpoint")
      ->required()->check(non_empty());
  sub->add_option("--output", command->output, "A new folder for the merged checkpoint")->required()->check(new_folder());
  sub->footer("Example: heddle merge --base runs/tiny --adapter runs/tiny_lora --output runs/merged");
  sub->callback([command, &exit_code] { exit_code = run_merge(*command); });
}

}  // namespace heddle::examples
