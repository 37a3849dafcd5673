#include <filesystem>
#include <iostream>
#include <optional>

#include "examples/commands.h"
#include "examples/options.h"
#include "examples/run_setup.h"
#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/tensor_files.h"
#include "quant/quant_file.h"
#include "quant/quant_layout.h"
#include "quant/quantize_model.h"

namespace heddle::examples {
namespace {

namespace fs = std::filesystem;

struct QuantizeCommand {
  std::string model, format, output, rounding, seed, only, device = "auto";
  std::vector<std::string> exclude, overrides;
  bool compares = false;
};

// A text as a YAML list, for an override of a key.
std::string list_text(const std::vector<std::string>& items) {
  std::string out = "[";
  for (const std::string& item : items) out += (out.size() > 1 ? ", " : "") + nn::quoted_text(item);
  return out + "]";
}

std::vector<std::string> excluded(const QuantizeCommand& command) {
  std::vector<std::string> out = quant::QuantConfig{}.exclude;
  out.insert(out.end(), command.exclude.begin(), command.exclude.end());
  return out;
}

config::RunConfig read_config(const QuantizeCommand& command, const fs::path& folder) {
  std::vector<std::string> overrides = {"attention.kernel=auto", "device=auto", "base=null"};
  if (!command.compares) {
    overrides.push_back("quantize.format=" + command.format);
    overrides.push_back("quantize.exclude=" + list_text(excluded(command)));
    if (!command.rounding.empty()) overrides.push_back("quantize.rounding=" + command.rounding);
    if (!command.seed.empty()) overrides.push_back("quantize.seed=" + command.seed);
  }
  overrides.insert(overrides.end(), command.overrides.begin(), command.overrides.end());
  const auto has_layout = [](const config::RunConfig& run) {
    if (run.quantize && !quant::has_layout(run.quantize->spec()))
      throw nn::BadValue("quantize.format", "one that files have a layout for (fp8_e4m3, mxfp4 or nvfp4)", std::string(name_of(run.quantize->format)));
  };
  const auto has_no_compute = [](const config::RunConfig& run) {
    if (run.compute)
      throw nn::BadValue("quantize.compute", "null: nothing is multiplied here, and each run that uses the folder has its own",
                         std::string(quant::compute_name(*run.compute)));
  };
  return config::load_run_config((folder / "config.yaml").string(), overrides, {{{"quantize"}, has_layout}, {{"quantize"}, has_no_compute}});
}

void write_model(const fs::path& folder, const nn::CausalLM& model, const config::RunConfig& run, const quant::QuantReport& report) {
  quant::save_quantized(folder, model);
  nn::write_file(folder / "config.yaml", config::to_yaml(run));
  nn::write_file(folder / "report.json", quant::to_json(report));
  nn::write_file(folder / "report.svg", nn::to_svg(quant::to_chart(report)));
}

int run_quantize(const QuantizeCommand& command) {
  if (command.compares == !command.output.empty() || command.compares != command.format.empty())
    throw ConfigError("quantize: give --format and --output, or --compare without them");
  if (!command.compares && !command.only.empty()) throw ConfigError("quantize: --only is for --compare; leave layers as they are with --exclude");
  if (command.compares && !(command.rounding.empty() && command.seed.empty()))
    throw ConfigError("quantize: --compare rounds to nearest; leave out --rounding and --seed");
  if (command.compares && !command.overrides.empty())
    throw ConfigError("quantize: --compare shows every form of every format; leave out --set " + nn::printable(command.overrides.front()));
  for (const std::string& text : command.overrides)
    if (!text.starts_with("quantize.")) throw ConfigError("quantize: --set takes quantize.key=value, got " + nn::printable(text));
  const fs::path folder = nn::open_weights(command.model);
  if (quant::has_quantized(folder)) throw ConfigError("--model: " + nn::printable_path(folder) + " is quantised already; give the plain model");
  const config::RunConfig run = read_config(command, folder);
  // Before the work: what cannot be written is known first. Everything of the new folder appears at once.
  std::optional<nn::AtomicFolder> out;
  if (!command.compares) out.emplace(command.output, nn::Existing::refused);
  nn::CausalLM model = make_model(run, choose_device(command.device), Weights::loaded_next);
  nn::load_weights(folder, model);
  if (command.compares) {
    std::cout << quant::scoreboard(model, excluded(command), command.only.empty() ? "*" : command.only);
    return 0;
  }
  const quant::QuantReport report = quant::quantize_model(model, *run.quantize);
  std::cout << quant::to_table(report);
  write_model(out->path(), model, run, report);
  out->commit();
  std::cout << "wrote " << nn::printable(command.output) << ": " << nn::kWeightsFile << ", config.json, config.yaml, report.json, report.svg\n";
  return 0;
}

}  // namespace

void add_quantize_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("quantize", "Store a model's Linear weights in 4 or 8 bits, or compare what formats cost");
  const auto command = std::make_shared<QuantizeCommand>();
  sub->add_option("--model", command->model, "A checkpoint, or the output folder of a run: its best checkpoint")->required()->check(non_empty());
  sub->add_option("--format", command->format, "fp8_e4m3, mxfp4 or nvfp4");
  sub->add_option("--output", command->output, "A new folder for the quantised checkpoint")->check(new_folder());
  sub->add_option("--exclude", command->exclude, "A layer to leave as it is, beside lm_head: its name, the end of it, or wildcards")
      ->allow_extra_args(false);
  sub->add_option("--rounding", command->rounding, "nearest, or stochastic: up or down by chance, on average right where elements do not saturate");
  sub->add_option("--seed", command->seed, "Of stochastic rounding; the run's own if left out")->check(integer_in(0));
  sub->add_option("--set", command->overrides, "Override one value: quantize.key=value")->allow_extra_args(false);
  sub->add_flag("--compare", command->compares, "Print what every format would cost, and write nothing");
  sub->add_option("--only", command->only, "Compare on the layers of this name or pattern alone");
  add_device_option(*sub, command->device);
  sub->footer("Example: heddle quantize --model runs/tiny --format nvfp4 --output runs/tiny-nvfp4");
  sub->callback([command, &exit_code] { exit_code = run_quantize(*command); });
}

}  // namespace heddle::examples
