#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "autograd/ops.h"
#include "nn/safetensors.h"
#include "tests/support/pytorch.h"

// Each op's result and gradients against the float64 numbers of PyTorch in data/ops.safetensors (layout: data/README.md).

namespace heddle {
namespace {

using test::expect_near_pytorch;

using Inputs = std::vector<Tensor>;

struct Case {
  std::string name;                                // of the case in the file
  std::vector<std::string> inputs;                 // in the order of `run`'s argument
  std::function<Tensor(const Inputs& in)> run;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

Tensor positions(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(first + i);
  return Tensor::from_vector(values, Shape{count});
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"cross_entropy_sum", {"logits", "labels"},
       [](const Inputs& in) { return cross_entropy(in[0], in[1], {.reduction = LossReduction::sum}); }},
      {"cross_entropy_mean", {"logits", "labels"}, [](const Inputs& in) { return cross_entropy(in[0], in[1]); }},
      {"gelu_exact", {"x"}, [](const Inputs& in) { return gelu(in[0]); }},
      {"gelu_tanh", {"x"}, [](const Inputs& in) { return gelu_tanh(in[0]); }},
      {"silu", {"x"}, [](const Inputs& in) { return silu(in[0]); }},
      {"swiglu", {"gate", "up"}, [](const Inputs& in) { return swiglu(in[0], in[1]); }},
      {"softmax_last", {"x"}, [](const Inputs& in) { return softmax(in[0]); }},
      {"softmax_middle", {"x"}, [](const Inputs& in) { return softmax(in[0], 1); }},
      {"log_softmax_last", {"x"}, [](const Inputs& in) { return log_softmax(in[0]); }},
      {"log_softmax_middle", {"x"}, [](const Inputs& in) { return log_softmax(in[0], 1); }},
      {"layer_norm", {"x", "weight", "bias"}, [](const Inputs& in) { return layer_norm(in[0], in[1], in[2], 1e-5); }},
      {"rms_norm", {"x", "weight"}, [](const Inputs& in) { return rms_norm(in[0], in[1], 1e-6); }},
      {"rope", {"x"}, [](const Inputs& in) { return rope(in[0], positions(0, 5)); }},
      {"rope_offset", {"x"}, [](const Inputs& in) { return rope(in[0], positions(37, 5)); }},
      {"embedding_padding", {"weight", "ids"}, [](const Inputs& in) { return embedding(in[0], in[1], 4); }},
      {"attention_full", {"q", "k", "v"}, [](const Inputs& in) { return attention(in[0], in[1], in[2]); }},
      {"attention_causal", {"q", "k", "v"},
       [](const Inputs& in) { return attention(in[0], in[1], in[2], {.is_causal = true}); }},
  };
  return all;
}

const nn::SafetensorsFile& reference() {
  static const nn::SafetensorsFile file(HEDDLE_SOURCE_DIR "/tests/data/ops.safetensors");
  return file;
}

// Two or three sums of at most 12 terms follow one another (norm and attention backward): at most 32 roundings, each of
// half an epsilon of a value not above the largest one expected, or 1.
constexpr double kEpsilons = 16;

class TorchParity : public testing::TestWithParam<std::tuple<Case, DType>> {};

TEST_P(TorchParity, ResultAndGradientsEqualPyTorch) {
  const auto& [c, dtype] = GetParam();
  const double epsilon =
      dtype == DType::f64 ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const auto stored = [&](const std::string& key) { return reference().read(c.name + "/" + key); };
  Inputs inputs;
  for (const std::string& name : c.inputs) {
    const Tensor value = stored(name);
    inputs.push_back(value.dtype() == DType::f64 ? cast(value, dtype).set_requires_grad(true) : value);
  }

  const Tensor y = c.run(inputs);
  y.backward(cast(stored("dy"), dtype));

  expect_near_pytorch(y, stored("y"), kEpsilons * epsilon, "y");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    expect_near_pytorch(inputs[i].grad(), stored("d" + c.inputs[i]), kEpsilons * epsilon, "d" + c.inputs[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, TorchParity,
                         testing::Combine(testing::ValuesIn(cases()), testing::Values(DType::f32, DType::f64)),
                         [](const auto& info) {
                           const bool is_double = std::get<1>(info.param) == DType::f64;
                           return std::get<0>(info.param).name + (is_double ? "_f64" : "_f32");
                         });

TEST(TorchParity, AttentionLogSumExpEqualsPyTorch) {
  for (const bool is_causal : {false, true}) {
    const std::string name = is_causal ? "attention_causal" : "attention_full";
    const auto stored = [&](const std::string& key) { return reference().read(name + "/" + key); };

    const Tensor lse = attention_with_lse(stored("q"), stored("k"), stored("v"), {.is_causal = is_causal}).lse;

    expect_near_pytorch(lse, stored("lse"), kEpsilons * std::numeric_limits<double>::epsilon(), name);
  }
}

// A case added to the file cannot be forgotten here.
TEST(TorchParity, EveryStoredCaseIsRun) {
  for (const std::string& key : reference().names()) {
    const std::string name = key.substr(0, key.find('/'));
    EXPECT_TRUE(std::any_of(cases().begin(), cases().end(), [&](const Case& c) { return c.name == name; })) << name;
  }
}

}  // namespace
}  // namespace heddle
