// Training on a GPU: PyTorch's losses, runs that resume bit for bit, and steps for which the host never waits.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/runtime/context.h"
#include "nn/checkpoint.h"
#include "tests/support/devices.h"
#include "tests/support/error_of.h"
#include "tests/support/reference_training.h"
#include "tests/support/short_run.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"
#include "tests/support/window.h"

namespace heddle::test {
namespace {

namespace fs = std::filesystem;

class CudaTorchParity : public NeedsCuda<testing::TestWithParam<nn::Architecture>> {};

// Products, attention and sums in another order than PyTorch's, over twenty steps: the project's bound.
TEST_P(CudaTorchParity, TwentyLossesInFloat32) {
  const ReferenceRun run(GetParam(), {.device = kCuda});
  expect_relative(run.steps().losses, run.stored("losses"), 1e-4);
}

// A rounding to bfloat16 is up to 2^-9 of the value. The residual stream, every weight and every activation are rounded, some ten
// times a block; the errors are independent, so an activation is off by about sqrt(20) 2^-9 = 0.9 %, the logits by as much of
// their size, which grows to about 2, and the loss by less than 2 %.
TEST_P(CudaTorchParity, TwentyLossesInBfloat16) {
  const ReferenceRun run(GetParam(), {.dtype = DType::bf16, .device = kCuda});
  expect_relative(run.steps().losses, run.stored("losses"), 0.02);
}

INSTANTIATE_TEST_SUITE_P(, CudaTorchParity, testing::Values(nn::Architecture::gpt2, nn::Architecture::llama),
                         [](const auto& info) { return std::string(info.param == nn::Architecture::llama ? "llama" : "gpt2"); });

// tiny_config with heads of 8, a size that every attention kernel takes.
nn::TransformerConfig cuda_config() {
  nn::TransformerConfig config = tiny_config();
  config.hidden_size = 24;
  return config;
}

nn::CausalLM model_on(Device device, DType dtype, std::uint64_t seed = 1, double dropout = 0.2) {
  nn::TransformerConfig config = cuda_config();
  config.resid_pdrop = dropout;
  Generator generator{seed};
  return nn::CausalLM(config, {.dtype = dtype, .device = device}, generator);
}

class CudaTraining : public NeedsCuda<testing::TestWithParam<DType>> {
 protected:
  void SetUp() override {
    NeedsCuda::SetUp();
    if (device_support(kCuda).ok) device_context(kCuda).deterministic = true;
  }
  void TearDown() override {
    if (device_support(kCuda).ok) device_context(kCuda).deterministic = false;
  }
};

INSTANTIATE_TEST_SUITE_P(, CudaTraining, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

nn::TrainResult train(const fs::path& folder, DType dtype, const ShortRun& options, double dropout = 0.2) {
  nn::CausalLM model = model_on(kCuda, dtype, 1, dropout);
  return train_short_run(folder, model, options);
}

TEST_P(CudaTraining, ResumedRunEqualsTheUninterruptedOneBitForBit) {
  const TempFolder folder;
  train(folder / "whole", GetParam(), {});

  const nn::TrainResult stopped = train(folder / "parts", GetParam(), {.interrupt_after = 3});
  train(folder / "parts", GetParam(), {.resumes = true});

  EXPECT_EQ(stopped.step, 3);
  expect_same_bits(folder / "whole", folder / "parts");
}

// Evaluations and checkpoints come between recorded steps, and a resumed run records its own.
TEST_P(CudaTraining, RecordedStepsEqualPlainOnesBitForBit) {
  const TempFolder folder;
  train(folder / "plain", GetParam(), {}, 0);

  train(folder / "recorded", GetParam(), {.has_graph = true}, 0);
  train(folder / "parts", GetParam(), {.interrupt_after = 4, .has_graph = true}, 0);
  train(folder / "parts", GetParam(), {.resumes = true, .has_graph = true}, 0);

  expect_same_bits(folder / "plain", folder / "recorded");
  expect_same_bits(folder / "plain", folder / "parts");
}

TEST_P(CudaTraining, RecordedStepsRefuseDropout) {
  const TempFolder folder;

  EXPECT_EQ(error_of([&] { train(folder.path(), GetParam(), {.has_graph = true}); }),
            "train.cuda_graph: the model has dropout, whose random numbers change with every step; set it to false, or the dropout to 0");
}

TEST_P(CudaTraining, CheckpointGoesFromOneDeviceToTheOtherUnchanged) {
  for (const auto& [from, to] : {std::pair{kCuda, kCpu}, std::pair{kCpu, kCuda}}) {
    const TempFolder folder;
    const nn::CausalLM written = model_on(from, GetParam(), 1), read = model_on(to, GetParam(), 2);
    const nn::AdamW first(written.trainable_parameters(), {}), second(read.trainable_parameters(), {});
    const fs::path checkpoint = nn::save_checkpoint(folder.path(), written, first, {.step = 4}, "train: {}\n");

    EXPECT_EQ(nn::load_checkpoint(checkpoint, read, second).step, 4);

    EXPECT_EQ(values_of(read.parameters()), values_of(written.parameters()));
    EXPECT_EQ(values_of(second.state()), values_of(first.state()));
  }
}

TEST_P(CudaTraining, HostNeverWaitsWithinAStep) {
  const nn::CausalLM model = model_on(kCuda, GetParam());
  nn::AdamW optimizer(model.trainable_parameters(), {});
  const TinyData data;
  Generator dropout{5};
  const auto step = [&](std::int64_t example) {
    const std::vector<nn::Batch> window = {data.train_batch(example, 3), data.train_batch(example + 3, 3)};
    const test::WindowLoss loss = test::accumulate_window(model, window, &dropout);
    nn::PendingUpdate update = optimizer.start_update({.learning_rate = 1e-3, .max_grad_norm = 1, .loss = loss.sum});
    optimizer.zero_grad();
    return update;
  };
  step(0).result();
  const std::int64_t before = wait_count(kCuda);

  const nn::PendingUpdate second = step(6), third = step(12);

  EXPECT_EQ(wait_count(kCuda), before);
  EXPECT_TRUE(second.result().applied && third.result().applied);
  EXPECT_EQ(optimizer.updates(), 3);
}

TEST_P(CudaTraining, NonFiniteGradientChangesNothingAndNamesTheParameter) {
  const nn::CausalLM model = model_on(kCuda, GetParam());
  const std::vector<nn::NamedTensor> parameters = model.trainable_parameters();
  nn::AdamW optimizer(parameters, {});
  for (const nn::NamedTensor& parameter : parameters) parameter.tensor.set_grad(Tensor::full(parameter.tensor.shape(), 0.5, DType::f32, kCuda));
  optimizer.update({.learning_rate = 1e-2, .max_grad_norm = 1});
  const auto weights = values_of(parameters), state = values_of(optimizer.state());

  parameters[3].tensor.grad().fill_(std::numeric_limits<double>::infinity());
  const nn::UpdateResult result = optimizer.update({.learning_rate = 1e-2, .max_grad_norm = 1});

  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.nonfinite, parameters[3].name);
  EXPECT_EQ(values_of(parameters), weights);
  EXPECT_EQ(values_of(optimizer.state()), state);
}

}  // namespace
}  // namespace heddle::test
