// Twenty training steps of an adapter against PEFT's numbers (data/README.md): from PEFT's initial factors, which a folder brings in,
// to the folder that PEFT saved.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "autograd/ops.h"
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
  const double ratio = GetParam() == "llama_loraplus" ? 4 : 1;  // of rates, which a folder does not hold
  adapter.attach(*model);

  const test::Steps steps = test::train_twenty_steps(
      *model, {run.read("input_ids"), run.read("labels")},
      [&](const nn::NamedTensor& parameter) { return parameter.name.ends_with("lora_A.weight") ? 1 : ratio; });
  save_adapter(out / "final", *model, adapter, "");

  // As in training all weights: the project's bound for losses, and ten times what rounding alone moves PEFT's final weights by.
  test::expect_relative(steps.losses, stored.read(GetParam() + "/losses").to_doubles(), 1e-5);
  const SafetensorsFile ours(out / "final" / kTensors), theirs(peft_adapter(GetParam()) / kTensors);
  ASSERT_EQ(ours.names(), theirs.names());
  for (const std::string& key : theirs.names()) {
    const Tensor wanted = theirs.read(key);
    // What began as PiSSA has the initial factors behind the trained ones.
    Tensor got = ours.read(key);
    for (int dim = 0; dim < got.rank(); ++dim) got = slice(got, dim, 0, std::min(got.size(dim), wanted.size(dim)));
    ASSERT_EQ(got.shape(), wanted.shape()) << key;
    const std::vector<double> actual = got.to_doubles(), expected = wanted.to_doubles();
    for (std::size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 2.7e-5) << key << " at " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, PeftParity, testing::ValuesIn(test::kPeftCases), [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Pissa, PeftParity, testing::ValuesIn(test::kPissaCases), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace heddle::lora
