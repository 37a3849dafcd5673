#include "configs/run_config.h"

#include <algorithm>
#include <filesystem>
#include <span>

#include "configs/yaml_reader.h"
#include "kernels/runtime/check.h"
#include "kernels/runtime/device.h"
#include "lora/adapter.h"
#include "nn/arithmetic_data.h"
#include "nn/checkpoint.h"
#include "nn/tokenizer.h"

namespace heddle::config {
namespace {

// Keys that change neither the model nor the course of its training.
constexpr std::string_view kFreeOnResume[] = {
    "model.initializer_range",  // acts before the first step
    "data.files",               // the data themselves are compared: TrainerState::data
    "train.output_dir", "train.max_nonfinite_steps", "train.num_threads", "train.logging_steps", "train.eval_steps",
    "train.eval_iters", "train.save_steps", "train.save_total_limit", "train.resume_from_checkpoint", "train.cuda_graph", "attention.kernel",
    "attention.deterministic", "device"};
constexpr std::string_view kFreeOfAdapter[] = {"lora.lora_dropout", "lora.loraplus_lr_ratio"};  // act on the training only
constexpr const char* kCompute = "quantize.compute";  // of the machine, not of the base
constexpr std::string_view kDropout[] = {"model.resid_pdrop", "model.embd_pdrop"};

bool is_among(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Rules between keys of different sections.
std::vector<nn::Conflict> conflicts(const RunConfig& c) {
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  std::vector<nn::Conflict> out;
  const std::int64_t length = c.data.sequence_length;
  if (length > c.model.max_position_embeddings) {
    out.push_back({"data.sequence_length", "at most", "model.max_position_embeddings",
                   number(c.model.max_position_embeddings), number(length)});
  }
  const std::int64_t needed = nn::ArithmeticData::problem_tokens(c.data);
  if (c.data.source == nn::DataSource::arithmetic && length > 0 && length < needed) {
    out.push_back({"data.sequence_length", "at least " + number(needed) + ", a whole problem, for", "data.digits",
                   number(c.data.digits), number(length)});
  }
  const std::int64_t bytes = nn::ByteTokenizer().vocab_size();
  if (c.model.vocab_size < bytes) {
    const std::string source(nn::name_of(nn::EnumNames<nn::DataSource>(nn::kDataSourceNames), c.data.source));
    out.push_back({"model.vocab_size", "at least " + number(bytes) + ", one a byte, for", "data.source", source,
                   number(c.model.vocab_size)});
  }
  return out;
}

constexpr const char* kBaseForm = "a checkpoint or the output folder of a run";

// The model of the base, so that the file need not give it. Nothing if there is no such base.
std::optional<nn::TransformerConfig> read_base(const RunConfig& config, YamlReader& reader) {
  if (reader.is_wrong("base")) return std::nullopt;
  if (!config.base) {
    reader.refuse(nn::BadValue("base", concat_text(kBaseForm, ", for lora to adapt"), "null"));
    return std::nullopt;
  }
  try {
    const std::filesystem::path folder = nn::open_weights(*config.base);
    return load_run_config((folder / "config.yaml").string(), {}, {}, Base::not_opened).model;
  } catch (const Error& error) {
    const std::string got = concat_text(nn::quoted_text(*config.base), " (", error.what(), ")");
    reader.refuse(nn::BadValue("base", kBaseForm, got));
    return std::nullopt;
  }
}

// A base and its model section, where there is one, must be of the same function.
void check_model_of_base(const RunConfig& run, nn::TransformerConfig base_model) {
  nn::TransformerConfig model = run.model.resolved();
  const std::vector<nn::Field> own = fields(model), wanted = fields(base_model);
  for (std::size_t i = 0; i < own.size(); ++i) {
    const std::string name = "model." + own[i].key;
    if (own[i].value_text() != wanted[i].value_text() && !is_among(kDropout, name) && !is_among(kFreeOnResume, name))
      throw nn::BadValue(name, concat_text("the base's, ", wanted[i].value_text()), own[i].value_text());
  }
}

void check_lora(const RunConfig& run) {
  if (run.lora) lora::plan_layers(lora::linear_layers(run.model), *run.lora);
}

}  // namespace

bool is_device_name(const std::string& text) {
  if (text == "auto") return true;
  try {
    parse_device(text);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::vector<SectionFields> sections(RunConfig& config) {
  std::vector<SectionFields> out = {
      {"model", fields(config.model)},
      {"data", fields(config.data)},
      {"train", fields(config.train)},
      {"attention", fields(config.attention)},
  };
  if (config.lora) out.push_back({"lora", fields(*config.lora)});
  if (config.quantize || config.compute) {
    out.push_back({"quantize", config.quantize ? fields(*config.quantize) : std::vector<nn::Field>{}});
    out.back().fields.push_back(quant::compute_field(config.compute));
  }
  out.push_back({"", {{"base", &config.base, {}},
                      {"device", &config.device, {.form = kDeviceForm, .accepts = is_device_name}}}});
  return out;
}

RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides,
                          const std::vector<RunCheck>& checks, Base base) {
  RunConfig config;
  config.train.output_dir = "runs/" + std::filesystem::path(path).stem().string();
  YamlReader reader(path, overrides);
  const bool has_lora = reader.has_section("lora");
  // How products are computed says nothing of the weights, which may be stored quantised.
  const bool has_quantize = reader.has_section("quantize") && !reader.has_only("quantize", "compute");
  config.lora.emplace();  // their keys are known without them
  config.quantize.emplace();
  std::vector<SectionFields> all = sections(config);
  reader.read("", all.back().fields);  // the base gives the model's defaults
  all.pop_back();
  if (!has_quantize)
    for (nn::Field& field : all.back().fields) field.rule.required = false;
  const bool has_base = base == Base::opened && (config.base || has_lora);
  const std::optional<nn::TransformerConfig> base_model = has_base ? read_base(config, reader) : std::nullopt;
  const bool has_model = !has_base || base_model;
  if (base_model) config.model = *base_model;
  if (has_base)
    for (nn::Field& field : all.front().fields) field.rule.required = false;
  for (const SectionFields& section : all) {
    reader.read(section.name, section.fields);
    if (section.name == "model") config.data.sequence_length = config.model.max_position_embeddings;
  }
  if (!has_lora) config.lora.reset();
  if (!has_quantize) config.quantize.reset();
  if (config.quantize && config.quantize->rounding == quant::ElementRounding::stochastic && !config.quantize->seed)
    config.quantize->seed = config.train.seed;
  const auto attempt = [&](const RunCheck& check) {
    const auto is_unknown = [&](const std::string& section) { return reader.has_mistake(section) || (section == "model" && !has_model); };
    if (std::ranges::any_of(check.sections, is_unknown)) return;
    try {
      check.run(config);
    } catch (const nn::BadValue& value) {
      reader.refuse(value);
    }
  };
  // First: where the architecture is another one, rules between keys would speak of what follows from it.
  if (base_model) attempt({{"model"}, [&](const RunConfig& run) { check_model_of_base(run, *base_model); }});
  reader.check("model", nn::conflicts(config.model));
  reader.check("train", nn::conflicts(config.train));
  if (config.quantize) reader.check("quantize", quant::conflicts(*config.quantize));
  if (has_model) reader.check("", conflicts(config));
  attempt({{"model", "lora"}, check_lora});
  for (const RunCheck& check : checks) attempt(check);
  reader.finish();
  config.model = config.model.resolved();
  return config;
}

std::string to_yaml(const RunConfig& config) {
  RunConfig copy = config;
  copy.model = copy.model.resolved();
  std::string out;
  for (const SectionFields& section : sections(copy)) {
    if (!section.name.empty()) out += section.name + ":\n";
    const std::string indent = section.name.empty() ? "" : "  ";
    for (const nn::Field& field : section.fields) out += indent + field.key + ": " + field.value_text() + "\n";
  }
  return out;
}

namespace {

// Every key's full name, and its value; of quantize.compute without its section too.
std::vector<std::pair<std::string, std::string>> values_of(RunConfig& config) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const SectionFields& section : sections(config))
    for (const nn::Field& field : section.fields)
      out.emplace_back(section.name.empty() ? field.key : section.name + "." + field.key, field.value_text());
  if (!config.quantize && !config.compute) out.emplace_back(kCompute, quant::compute_field(config.compute).value_text());
  return out;
}

}  // namespace

ResumeChanges resume_changes(RunConfig checkpoint, RunConfig run) {
  checkpoint.model = checkpoint.model.resolved();
  run.model = run.model.resolved();
  ResumeChanges out;
  const auto compare_section = [&](const char* name, bool had, bool has) {
    if (had != has) out.refused.push_back(concat_text(had ? "a" : "no", " section ", name, ", here ", has ? "one" : "none"));
  };
  compare_section("lora", checkpoint.lora.has_value(), run.lora.has_value());
  compare_section("quantize", checkpoint.quantize.has_value(), run.quantize.has_value());
  const std::vector<std::pair<std::string, std::string>> before = values_of(checkpoint);
  for (const auto& [name, is] : values_of(run)) {
    const auto found = std::ranges::find(before, name, [](const auto& entry) { return entry.first; });
    if (found == before.end() || found->second == is || is_among(kFreeOnResume, name)) continue;
    const std::string& was = found->second;
    const bool is_of_model = name.starts_with("model.") && !is_among(kDropout, name);
    const bool is_of_adapter = name.starts_with("lora.") && !is_among(kFreeOfAdapter, name);
    const bool is_of_base = (name.starts_with("quantize.") && name != kCompute) || name == "train.precision" || name.starts_with("train.fp8_");
    (is_of_model || is_of_adapter || is_of_base ? out.refused : out.noted).push_back(concat_text(name, " ", was, ", here ", is));
  }
  return out;
}

}  // namespace heddle::config
