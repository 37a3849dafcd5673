#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lora/lora_config.h"
#include "nn/train_config.h"
#include "nn/transformer_config.h"
#include "quant/quant_config.h"

namespace heddle::config {

// How a device is named, beside what parse_device takes.
inline constexpr std::string_view kDeviceForm = "auto, cpu, cuda or cuda:N";
bool is_device_name(const std::string& text);

// Everything one run needs: the sections of a config file.
struct RunConfig {
  nn::TransformerConfig model;
  nn::DataConfig data;
  nn::TrainConfig train;
  nn::AttentionConfig attention;
  std::optional<std::string> base;       // the checkpoint whose weights training starts from, and whose model it is
  std::optional<lora::LoraConfig> lora;  // with it the base is frozen and an adapter is trained
  std::optional<quant::QuantConfig> quantize;  // with it the Linear weights of the base are frozen in few bits
  std::optional<QuantCompute> compute;  // the key quantize.compute: how this machine multiplies quantised weights
  std::string device = "auto";  // kDeviceForm

  friend bool operator==(const RunConfig&, const RunConfig&) = default;
};

// One section of a config file; the name of the top level is "".
struct SectionFields {
  std::string name;
  std::vector<nn::Field> fields;
};

// Every key of a config file, in the order in which they are written; those of lora and quantize only where there is one. The fields point into
// `config`.
std::vector<SectionFields> sections(RunConfig& config);

// A check of a config against what lies outside it: the machine, the data, an earlier run. Throws nn::BadValue.
struct RunCheck {
  std::vector<std::string> sections;  // what it looks at; a mistake in one of them leaves the check out
  std::function<void(const RunConfig&)> run;
};

// Whether a base is looked at and gives the model, or the file holds the whole model beside it, as the config of a run does: that one can
// be read wherever the base is by now.
enum class Base { opened, not_opened };

// Reads a config file; each override is `section.key=value`, its value YAML, and wins over the file. Every optional of the
// result is filled in. Throws heddle::ConfigError listing every mistake, one a line:
//   configs/tiny.yaml:12:12: model.num_hidden_layers: expected integer in [1, 10000], got "eight"
//   --set train.max_step: expected a known key, got "max_step"; did you mean max_steps?
// What `checks` refuse is among them.
RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides = {},
                          const std::vector<RunCheck>& checks = {}, Base base = Base::opened);

// The config as a YAML file that loads as the same config.
std::string to_yaml(const RunConfig& config);

// What a run that continues a checkpoint has otherwise than the checkpoint's own config.
struct ResumeChanges {
  std::vector<std::string> refused;  // "model.rope_theta 10000, here 5000": the weights mean another function
  std::vector<std::string> noted;    // the training goes on otherwise than it began
};
ResumeChanges resume_changes(RunConfig checkpoint, RunConfig run);

}  // namespace heddle::config
