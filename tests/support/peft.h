#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "autograd/grad_mode.h"
#include "nn/safetensors.h"
#include "tests/support/reference_training.h"

// What PEFT left in tests/data (see its README.md).
namespace heddle::test {

inline const std::vector<std::string> kPeftCases = {"gpt2_plain",   "gpt2_rslora", "gpt2_dora",      "llama_plain",
                                                    "llama_rslora", "llama_dora",  "llama_loraplus", "llama_patterns"};
// Saved with the A and B of PiSSA, without PEFT's conversion.
inline const std::vector<std::string> kPissaCases = {"gpt2_pissa", "llama_pissa"};
inline const char* const kPeftFile = HEDDLE_SOURCE_DIR "/tests/data/lora.safetensors";

inline bool is_llama_case(const std::string& name) { return name.starts_with("llama"); }

// The folder that PEFT saved after training.
inline std::filesystem::path peft_adapter(const std::string& name) { return HEDDLE_SOURCE_DIR "/tests/data/adapters/" + name; }

// Holds the base's weights under "initial/", and the batch.
inline std::string peft_base_file(const std::string& name) {
  return HEDDLE_SOURCE_DIR "/tests/data/train_" + std::string(is_llama_case(name) ? "llama" : "gpt2") + ".safetensors";
}

inline std::unique_ptr<nn::CausalLM> peft_base(const std::string& name, const nn::ModuleOptions& options = {}) {
  Generator generator{1};
  const auto architecture = is_llama_case(name) ? nn::Architecture::llama : nn::Architecture::gpt2;
  auto model = std::make_unique<nn::CausalLM>(reference_config(architecture), options, generator);
  const nn::SafetensorsFile file(peft_base_file(name));
  const NoGradGuard no_grad;
  for (const nn::NamedTensor& parameter : model->parameters()) parameter.tensor.copy_(file.read("initial/" + parameter.name));
  return model;
}

}  // namespace heddle::test
