#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/grad_mode.h"
#include "nn/safetensors.h"
#include "nn/schedule.h"
#include "nn/trainer.h"
#include "tests/support/window.h"

// The twenty training steps whose losses, norms and weights PyTorch has left in tests/data (see its README.md).
namespace heddle::test {

inline nn::TransformerConfig reference_config(nn::Architecture architecture) {
  const bool is_llama = architecture == nn::Architecture::llama;
  nn::TransformerConfig config;
  config.architecture = architecture;
  config.vocab_size = 64;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = is_llama ? 2 : 4;
  config.intermediate_size = is_llama ? 80 : 96;
  config.max_position_embeddings = 24;
  return config;
}

struct Steps {
  std::vector<double> losses, grad_norms, learning_rates;
};

inline Steps train_twenty_steps(const nn::CausalLM& model, const nn::Batch& batch,
                                std::function<double(const nn::NamedTensor&)> rate_scale = {}) {
  nn::TrainConfig train;
  train.learning_rate = 1e-2;
  train.min_learning_rate = 1e-3;
  train.warmup_steps = 4;
  train.max_steps = 20;
  nn::AdamW optimizer(model.trainable_parameters(),
                      {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .rate_scale = std::move(rate_scale)});
  Steps run;
  for (std::int64_t step = 0; step < train.max_steps; ++step) {
    const WindowLoss loss = accumulate_window(model, {&batch, 1}, nullptr);
    const double rate = nn::learning_rate_at(train, step);
    const nn::UpdateResult update =
        optimizer.update({.learning_rate = rate, .grad_scale = 1 / static_cast<double>(loss.labels), .max_grad_norm = 1});
    optimizer.zero_grad();
    run.losses.push_back(loss.mean());
    run.grad_norms.push_back(update.grad_norm);
    run.learning_rates.push_back(rate);
  }
  return run;
}

inline void expect_relative(const std::vector<double>& actual, const std::vector<double>& expected, double bound) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], bound * expected[i]) << "step " << i;
}

// A model of PyTorch's initial weights after the twenty steps, and what PyTorch stored.
class ReferenceRun {
 public:
  ReferenceRun(nn::Architecture architecture, const nn::ModuleOptions& options)
      : file_(std::string(HEDDLE_SOURCE_DIR) + (architecture == nn::Architecture::llama ? "/tests/data/train_llama.safetensors"
                                                                                       : "/tests/data/train_gpt2.safetensors")),
        model_(reference_config(architecture), options, generator_) {
    {
      const NoGradGuard no_grad;
      for (const nn::NamedTensor& parameter : model_.parameters()) parameter.tensor.copy_(file_.read("initial/" + parameter.name));
    }
    steps_ = train_twenty_steps(model_, {file_.read("input_ids"), file_.read("labels")});
  }

  const nn::CausalLM& model() const { return model_; }
  const Steps& steps() const { return steps_; }
  std::vector<double> stored(const std::string& key) const { return file_.read(key).to_doubles(); }

 private:
  nn::SafetensorsFile file_;
  Generator generator_{1};
  nn::CausalLM model_;
  Steps steps_;
};

}  // namespace heddle::test
