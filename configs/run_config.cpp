#include "configs/run_config.h"

#include <filesystem>

#include "configs/yaml_reader.h"
#include "kernels/runtime/check.h"
#include "kernels/runtime/device.h"

namespace heddle::config {
namespace {

constexpr std::int64_t kByteVocabulary = 256;

bool is_device_name(const std::string& text) {
  if (text == "auto") return true;
  try {
    parse_device(text);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Tokens of an arithmetic problem less the last, which is only predicted: "aa+bb=ccc\n", or a difference one digit shorter.
std::int64_t problem_tokens(const nn::DataConfig& data) {
  return 3 * data.digits + (data.operation == nn::Operation::addition ? 3 : 2);
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
  const std::int64_t needed = problem_tokens(c.data);
  if (c.data.source == nn::DataSource::arithmetic && length > 0 && length < needed) {
    out.push_back({"data.sequence_length", "at least " + number(needed) + ", a whole problem, for", "data.digits",
                   number(c.data.digits), number(length)});
  }
  if (c.model.vocab_size < kByteVocabulary) {
    const std::string source(nn::name_of(nn::EnumNames<nn::DataSource>(nn::kDataSourceNames), c.data.source));
    out.push_back({"model.vocab_size", "at least " + number(kByteVocabulary) + ", one a byte, for", "data.source", source,
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

RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides) {
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

}  // namespace heddle::config
