#include <cmath>
#include <iostream>
#include <map>

#include "autograd/ops.h"
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

// What the adapter adds to a quantised base is small beside the steps of few bits: says how much of it quantising again would cover up.
// `base` are the layers before the merge.
std::string loss_of_quantising(nn::CausalLM& merged, const std::map<std::string, std::shared_ptr<nn::LinearBase>>& base, const quant::QuantConfig& config) {
  double change = 0, error = 0;
  for (const auto& [name, module] : merged.modules())
    if (const auto found = base.find(name); found != base.end()) {
      const Tensor difference = sub(std::dynamic_pointer_cast<nn::LinearBase>(module)->dense_weight(), found->second->dense_weight());
      change += sum(mul(difference, difference)).item();
    }
  const quant::QuantReport report = quant::quantize_model(merged, config);
  for (const quant::LayerReport& layer : report.layers) error += layer.error.noise;
  std::string out = concat_text("quantised again they would be off by ", std::sqrt(error),
                                " (root of the summed squares), where the adapter changes them by ", std::sqrt(change), "; ", quant::summary(report));
  for (const std::string& note : quant::notes(report)) out += "\n" + note;
  return out;
}

int run_merge(const MergeCommand& command) {
  namespace fs = std::filesystem;
  nn::AtomicFolder out(command.output, nn::Existing::refused);  // before the work, so that a folder that cannot be written is known first
  const fs::path folder = nn::open_weights(command.base);
  config::RunConfig run = stored_config(folder);
  const fs::path adapter_folder = nn::open_adapter(command.adapter);
  follow_adapter(adapter_folder, folder, run);
  const DType dtype = nn::dtype_of(run.train.precision);
  config::RunConfig summed = run;
  summed.train.precision = nn::Precision::fp32;
  nn::CausalLM model = make_model(summed, kCpu, Weights::loaded_next);
  const bool is_quantized = load_model_weights(command.base, run, model, nn::Dtypes::converted);
  lora::Adapter adapter = lora::load_adapter(adapter_folder, model);
  std::map<std::string, std::shared_ptr<nn::LinearBase>> base;
  for (const auto& [name, module] : model.modules())
    if (const auto layer = std::dynamic_pointer_cast<nn::LinearBase>(module); layer != nullptr) base.emplace(name, layer);
  adapter.merge(model, is_quantized ? lora::Quantised::decoded : lora::Quantised::refused);
  quant::dequantize_model(model);

  nn::save_weights(out.path(), model, is_quantized ? DType::bf16 : dtype);
  nn::write_file(out.path() / "config.yaml", is_quantized ? config::to_yaml(dense_config(run)) : nn::read_file(folder / "config.yaml"));
  out.commit();
  std::size_t layers = 0;
  for (const lora::AdaptedLayer& layer : adapter.layers()) layers += layer.names.size();
  std::cout << "merged " << layers << " layers into " << nn::printable(command.output) << ": summed in float32, rounded to "
            << (is_quantized ? DType::bf16 : dtype) << ", to nearest even\n";
  if (run.quantize)
    std::cout << "the base was quantised, the merged weights are not; " << loss_of_quantising(model, base, *run.quantize) << '\n';
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
