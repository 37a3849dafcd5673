#include "configs/run_config.h"

#include <algorithm>
#include <filesystem>
#include <span>

#include "configs/yaml_reader.h"
#include "kernels/runtime/check.h"
#include "kernels/runtime/device.h"
#include "nn/arithmetic_data.h"
#include "nn/tokenizer.h"

namespace heddle::config {
namespace {

// Keys that change neither the model nor the course of its training.
constexpr std::string_view kFreeOnResume[] = {
    "model.initializer_range",  // acts before the first step
    "data.files",               // the data themselves are compared: TrainerState::data
    "train.output_dir", "train.max_nonfinite_steps", "train.num_threads", "train.logging_steps", "train.eval_steps",
    "train.eval_iters", "train.save_steps", "train.save_total_limit", "train.resume_from_checkpoint", "attention.kernel",
    "attention.deterministic", "device"};
constexpr std::string_view kDropout[] = {"model.resid_pdrop", "model.embd_pdrop"};

bool is_among(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

bool is_device_name(const std::string& text) {
  if (text == "auto") return true;
  try {
    parse_device(text);
    return true;
  } catch (const Error&) {
    return false;
  }
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

}  // namespace

std::vector<SectionFields> sections(RunConfig& config) {
  return {
      {"model", fields(config.model)},
      {"data", fields(config.data)},
      {"train", fields(config.train)},
      {"attention", fields(config.attention)},
      {"", {{"device", &config.device, {.form = "auto, cpu, cuda or cuda:N", .accepts = is_device_name}}}},
  };
}

RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides,
                          const std::vector<RunCheck>& checks) {
  RunConfig config;
  config.train.output_dir = "runs/" + std::filesystem::path(path).stem().string();
  YamlReader reader(path, overrides);
  for (const SectionFields& section : sections(config)) {
    reader.read(section.name, section.fields);
    if (section.name == "model") config.data.sequence_length = config.model.max_position_embeddings;
  }
  reader.check("model", nn::conflicts(config.model));
  reader.check("train", nn::conflicts(config.train));
  reader.check("", conflicts(config));
  for (const RunCheck& check : checks) {
    if (std::ranges::any_of(check.sections, [&](const std::string& section) { return reader.has_mistake(section); })) continue;
    try {
      check.run(config);
    } catch (const nn::BadValue& value) {
      reader.refuse(value);
    }
  }
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

ResumeChanges resume_changes(RunConfig checkpoint, RunConfig run) {
  checkpoint.model = checkpoint.model.resolved();
  run.model = run.model.resolved();
  ResumeChanges out;
  const std::vector<SectionFields> before = sections(checkpoint), now = sections(run);
  for (std::size_t s = 0; s < now.size(); ++s) {
    for (std::size_t i = 0; i < now[s].fields.size(); ++i) {
      const std::string name = now[s].name.empty() ? now[s].fields[i].key : now[s].name + "." + now[s].fields[i].key;
      const std::string was = before[s].fields[i].value_text(), is = now[s].fields[i].value_text();
      if (was == is || is_among(kFreeOnResume, name)) continue;
      const bool is_function = (now[s].name == "model" && !is_among(kDropout, name)) || name == "train.precision";
      (is_function ? out.refused : out.noted).push_back(concat_text(name, " ", was, ", here ", is));
    }
  }
  return out;
}

}  // namespace heddle::config
