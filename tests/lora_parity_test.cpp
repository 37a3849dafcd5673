// Twenty training steps of an adapter against PEFT's numbers (data/README.md): from PEFT's initial factors, which a folder brings in,
// to the folder that PEFT saved.

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "lora/adapter_file.h"
#include "tests/support/peft.h"
#include "tests/support/temp_folder.h"

namespace heddle::lora {
namespace {

namespace fs = std::filesystem;
using nn::SafetensorsFile;
using test::peft_adapter, test::peft_base;

const char* const kTensors = "adapter_model.safetensors";

// The folder of the factors before the first step.
void write_initial_adapter(const fs::path& folder, const std::string& name) {
  const SafetensorsFile stored(test::kPeftFile);
  const std::string prefix = name + "/initial/";
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& key : stored.names())
    if (key.starts_with(prefix)) tensors.emplace_back(key.substr(prefix.size()), stored.read(key));
  fs::create_directories(folder);
  fs::copy_file(peft_adapter(name) / "adapter_config.json", folder / "adapter_config.json");
  nn::write_safetensors(folder / kTensors, tensors);
}

class PeftParity : public testing::TestWithParam<std::string> {};

TEST_P(PeftParity, TwentyStepsGiveItsLossesAndItsAdapter) {
  const test::TempFolder out;
  const auto model = peft_base(GetParam());
  const SafetensorsFile stored(test::kPeftFile), run(test::peft_base_file(GetParam()));
  write_initial_adapter(out / "initial", GetParam());
  const Adapter adapter = load_adapter(out / "initial", *model);
  adapter.attach(*model);

  const test::Steps steps = test::train_twenty_steps(*model, {run.read("input_ids"), run.read("labels")});
  save_adapter(out / "final", *model, adapter, "");

  // As in training all weights: the project's bound for losses, and ten times what rounding alone moves PEFT's final weights by.
  test::expect_relative(steps.losses, stored.read(GetParam() + "/losses").to_doubles(), 1e-5);
  const SafetensorsFile ours(out / "final" / kTensors), theirs(peft_adapter(GetParam()) / kTensors);
  ASSERT_EQ(ours.names(), theirs.names());
  for (const std::string& key : theirs.names()) {
    const std::vector<double> actual = ours.read(key).to_doubles(), expected = theirs.read(key).to_doubles();
    ASSERT_EQ(actual.size(), expected.size()) << key;
    for (std::size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 2.7e-5) << key << " at " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, PeftParity,
                         testing::Values("gpt2_plain", "gpt2_rslora", "gpt2_dora", "llama_plain", "llama_rslora", "llama_dora", "llama_patterns"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace heddle::lora
