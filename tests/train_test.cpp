// Training steps without the trainer around them: PyTorch's numbers, and the weight of a token in a window.

#include <gtest/gtest.h>

#include <cmath>

#include "nn/trainer.h"
#include "tests/support/reference_training.h"
#include "tests/support/tiny_run.h"
#include "tests/support/window.h"

namespace heddle::nn {
namespace {

using test::accumulate_window;
using test::tiny_config;
using test::tiny_model;
using test::TinyData;
using test::WindowLoss;

class TorchParity : public testing::TestWithParam<Architecture> {
 protected:
  std::vector<double> stored(const std::string& key) const { return run_.stored(key); }

  test::ReferenceRun run_{GetParam(), {}};
};

// 1e-5 is the project's bound; PyTorch's own float32 run is 2.5e-7 from its float64 run.
TEST_P(TorchParity, TwentyLosses) { test::expect_relative(run_.steps().losses, stored("losses"), 1e-5); }

// Norms of gradients are less well conditioned than the loss: one digit less.
TEST_P(TorchParity, TwentyGradientNorms) { test::expect_relative(run_.steps().grad_norms, stored("grad_norms"), 1e-4); }

TEST_P(TorchParity, TwentyLearningRates) { test::expect_relative(run_.steps().learning_rates, stored("learning_rates"), 1e-12); }

// Rounding alone moves PyTorch's final weights by 2.2e-6; ten times that for another order of additions. k_proj.bias has
// no influence on the loss, so its gradient is rounding noise, scaled up by Adam.
TEST_P(TorchParity, FinalWeights) {
  for (const NamedTensor& parameter : run_.model().parameters()) {
    if (parameter.name.ends_with("k_proj.bias")) continue;
    const std::vector<double> actual = parameter.tensor.to_doubles(), expected = stored("final/" + parameter.name);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 2.2e-5) << parameter.name << " at " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, TorchParity, testing::Values(Architecture::gpt2, Architecture::llama),
                         [](const auto& info) { return std::string(info.param == Architecture::llama ? "llama" : "gpt2"); });

struct OneStep {
  double loss, grad_norm;
  std::vector<std::vector<double>> weights;
};

// One update from the examples 0..7, cut into micro-batches of `size`.
OneStep step_in_micro_batches(std::int64_t size) {
  const CausalLM model = tiny_model(tiny_config());
  AdamW optimizer(model.trainable_parameters(), {});
  const TinyData data;
  std::vector<Batch> window;
  for (std::int64_t first = 0; first < 8; first += size) window.push_back(data.train_batch(first, size));
  const WindowLoss loss = accumulate_window(model, window, nullptr);
  const UpdateResult update =
      optimizer.update({.learning_rate = 1e-3, .grad_scale = 1 / static_cast<double>(loss.labels), .max_grad_norm = 1});
  return {loss.mean(), update.grad_norm, test::values_of(model.parameters())};
}

// The sums differ in the order of float32 additions only. Adam's first update is lr * g / (|g| + eps), so a gradient
// near eps could turn rounding into a step; 1e-6 is a thousandth of the learning rate.
TEST(Accumulation, HowAWindowIsCutDoesNotMatter) {
  const OneStep whole = step_in_micro_batches(8);
  for (const std::int64_t size : {4, 2, 1}) {
    const OneStep parts = step_in_micro_batches(size);

    EXPECT_NEAR(parts.loss, whole.loss, 1e-6);
    EXPECT_NEAR(parts.grad_norm, whole.grad_norm, 1e-6);
    for (std::size_t i = 0; i < whole.weights.size(); ++i)
      for (std::size_t j = 0; j < whole.weights[i].size(); ++j)
        ASSERT_NEAR(parts.weights[i][j], whole.weights[i][j], 1e-6) << "parameter " << i << " at " << j;
  }
}

Batch batch_with_labels(std::int64_t example, const std::vector<std::int64_t>& labels) {
  Batch batch = TinyData().train_batch(example, 1);
  batch.labels = Tensor::from_vector(labels, {1, 7});
  return batch;
}

// Three tokens in one micro-batch, one in the other: the mean over four tokens, not the mean of two means.
TEST(Accumulation, EveryTokenWeighsTheSame) {
  const CausalLM model = tiny_model(tiny_config());
  constexpr std::int64_t x = kNoLoss;
  const Batch three = batch_with_labels(0, {1, 2, 3, x, x, x, x}), one = batch_with_labels(1, {x, x, 8, x, x, x, x});
  std::vector<Batch> single_tokens = {batch_with_labels(0, {1, x, x, x, x, x, x}), batch_with_labels(0, {x, 2, x, x, x, x, x}),
                                      batch_with_labels(0, {x, x, 3, x, x, x, x}), one};
  double sum = 0;
  for (const Batch& token : single_tokens) sum += accumulate_window(model, {&token, 1}, nullptr).mean();

  const std::vector<Batch> window = {three, one};
  const WindowLoss loss = accumulate_window(model, window, nullptr);

  EXPECT_EQ(loss.labels, 4);
  EXPECT_NEAR(loss.mean(), sum / 4, 1e-6);
}

TEST(Accumulation, MicroBatchWithoutLabelsAddsNothing) {
  const CausalLM model = tiny_model(tiny_config());
  const Batch some = TinyData().train_batch(0, 2), none = batch_with_labels(2, std::vector<std::int64_t>(7, kNoLoss));
  const WindowLoss alone = accumulate_window(model, {&some, 1}, nullptr);
  const auto grads = [&] {
    std::vector<std::vector<double>> out;
    for (const NamedTensor& parameter : model.parameters()) {
      out.push_back(parameter.tensor.grad().to_doubles());
      parameter.tensor.set_grad({});
    }
    return out;
  };
  const auto expected = grads();

  const std::vector<Batch> window = {some, none};
  const WindowLoss loss = accumulate_window(model, window, nullptr);

  EXPECT_EQ(loss.sum.item(), alone.sum.item());
  EXPECT_EQ(loss.labels, alone.labels);
  EXPECT_EQ(grads(), expected);
}

TEST(Accumulation, SecondPassDoublesEveryGradient) {
  const CausalLM model = tiny_model(tiny_config(Architecture::llama));
  const Batch batch = TinyData().train_batch(0, 3);
  accumulate_window(model, {&batch, 1}, nullptr);
  std::vector<std::vector<double>> once;
  for (const NamedTensor& parameter : model.parameters()) once.push_back(parameter.tensor.grad().to_doubles());

  accumulate_window(model, {&batch, 1}, nullptr);

  for (std::size_t i = 0; i < once.size(); ++i) {
    const NamedTensor parameter = model.parameters()[i];
    const std::vector<double> twice = parameter.tensor.grad().to_doubles();
    // g + g is exact, but a product may be added to the buffer term by term: a few float32 roundings.
    for (std::size_t j = 0; j < twice.size(); ++j) ASSERT_NEAR(twice[j], 2 * once[i][j], 1e-5 * std::abs(once[i][j]) + 1e-7) << parameter.name;
  }
}

}  // namespace
}  // namespace heddle::nn
