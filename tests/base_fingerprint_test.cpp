#include <gtest/gtest.h>

#include "autograd/grad_mode.h"
#include "lora/adapter_file.h"
#include "tests/support/adapters.h"
#include "tests/support/tiny_run.h"

namespace heddle::lora {
namespace {

using nn::CausalLM;
using test::adapt, test::CodedLinear, test::tiny_config, test::tiny_model;

TEST(BaseFingerprint, IsThatOfTheBaseAlsoUnderAnAdapter) {
  CausalLM model = tiny_model(tiny_config());
  const std::string plain = base_fingerprint(model);
  const Adapter adapter = adapt(model, {});
  adapter.attach(model);

  EXPECT_EQ(plain.size(), 16u);
  EXPECT_EQ(base_fingerprint(model), plain);
}

TEST(BaseFingerprint, IsThatOfTheBaseAlsoIn16Bits) {
  const CausalLM model = tiny_model(tiny_config()), copy = tiny_model(tiny_config(), 1, DType::bf16);
  const NoGradGuard no_grad;
  for (std::size_t i = 0; i < copy.parameters().size(); ++i) copy.parameters()[i].tensor.copy_(model.parameters()[i].tensor);

  EXPECT_EQ(base_fingerprint(copy), base_fingerprint(model));
}

TEST(BaseFingerprint, SeesWeightsThatAreNoParametersAlsoUnderAnAdapter) {
  CausalLM model = tiny_model(tiny_config());
  const auto fingerprint_with = [&](double value) {
    model.replace_child("model.layers.1.self_attn.o_proj", std::make_shared<CodedLinear>(Tensor::full({12, 12}, value)));
    return base_fingerprint(model);
  };

  const std::string ones = fingerprint_with(1), twos = fingerprint_with(2);
  adapt(model, {.target_modules = {"o_proj"}}).attach(model);

  EXPECT_NE(ones, twos);
  EXPECT_EQ(base_fingerprint(model), twos);
}

TEST(BaseFingerprint, SeesTheSignsOfTwoWeights) {
  const CausalLM model = tiny_model(tiny_config());
  const std::string plain = base_fingerprint(model);
  const Tensor weight = model.parameters()[0].tensor;
  const NoGradGuard no_grad;

  for (const std::int64_t column : {1, 3}) slice(select_index(weight, 0, 0), 0, column, column + 1).mul_(-1);

  EXPECT_NE(base_fingerprint(model), plain);
}

}  // namespace
}  // namespace heddle::lora
