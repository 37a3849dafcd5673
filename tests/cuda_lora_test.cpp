// Training an adapter on a GPU: as the CPU does it, and the base as it was.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/runtime/context.h"
#include "lora/adapter_file.h"
#include "nn/checkpoint.h"
#include "nn/trainer.h"
#include "tests/support/adapters.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"
#include "tests/support/window.h"

namespace heddle::test {
namespace {

// tiny_config with heads of 8, a size that every attention kernel takes, and an MLP of a size whose products fuse a GELU.
nn::TransformerConfig cuda_config(nn::Architecture architecture) {
  nn::TransformerConfig config = tiny_config(architecture);
  config.hidden_size = 24;
  config.intermediate_size = 40;
  return config;
}

// W, A, B, x and the gradient of the result; the result and the gradients of A and B (tests/lora_test.cpp has them in float64).
struct ByHand {
  std::vector<float> w, a, b, x, dy;
  std::vector<double> y, da, db;
};

class CudaLoraLinear : public NeedsCuda<testing::TestWithParam<ByHand>> {};

TEST_P(CudaLoraLinear, ForwardGradientsAndMergeByHand) {
  const ByHand& c = GetParam();
  const auto in = static_cast<std::int64_t>(c.a.size()), out = static_cast<std::int64_t>(c.b.size());
  const auto base = std::make_shared<nn::Linear>(Tensor::from_vector(c.w, {out, in}, kCuda), Tensor());
  base->freeze();
  const Tensor a = Tensor::from_vector(c.a, {1, in}, kCuda), b = Tensor::from_vector(c.b, {out, 1}, kCuda), x = Tensor::from_vector(c.x, {1, in}, kCuda);
  const lora::LoraLinear layer(base, {.a = a, .b = b});

  const Tensor y = layer.forward(x);
  y.backward(Tensor::from_vector(c.dy, {1, out}, kCuda));

  constexpr double kBound = 1e-5;  // some float32 roundings of values up to 31
  EXPECT_TRUE(all_close(y, c.y, kBound));
  EXPECT_TRUE(all_close(a.grad(), c.da, kBound));
  EXPECT_TRUE(all_close(b.grad(), c.db, kBound));
  EXPECT_FALSE(base->weight().grad().defined());
  EXPECT_TRUE(all_close(layer.merged()->forward(x), c.y, kBound));
}

INSTANTIATE_TEST_SUITE_P(, CudaLoraLinear,
                         testing::Values(ByHand{{0.8f, 0.1f, 0.3f, 0.2f, 0.7f, 0.5f}, {0.25f, -0.5f, 0.1f}, {0.4f, 0.2f}, {10, 20, 30}, {0.5f, -0.2f},
                                                {17.2, 30.1}, {1.6, 3.2, 4.8}, {-2.25, 0.9}},
                                         ByHand{{.1f, .8f, .2f, .4f, .5f, .3f, .7f, .1f, .9f, .2f, .3f, .6f}, {.2f, -.1f, .4f, .3f}, {.5f, -.2f, .1f},
                                                {2, 1, .5f, 1.5f}, {.8f, .1f, -.4f}, {2.175, 1.61, 3.145}, {0.68, 0.34, 0.17, 0.51}, {0.76, 0.095, -0.38}}));

struct LoraRun {
  LoraRun(nn::Architecture architecture, DType dtype, Device device, const lora::LoraConfig& config)
      : model(make(architecture, dtype, device)) {
    adapter = adapt(model, config);
    adapter->attach(model);
    optimizer.emplace(model.trainable_parameters(), nn::AdamWOptions{});
  }

  static nn::CausalLM make(nn::Architecture architecture, DType dtype, Device device) {
    Generator generator{1};
    return nn::CausalLM(cuda_config(architecture), {.dtype = dtype, .device = device}, generator);
  }

  // The losses of updates on the same examples.
  std::vector<double> train(std::uint64_t first = 0, std::uint64_t last = 6) {
    const TinyData data;
    std::vector<double> losses;
    for (std::uint64_t step = first; step < last; ++step) {
      Generator dropout{step};
      const std::vector<nn::Batch> window = {data.train_batch(0, 3), data.train_batch(3, 3)};
      const test::WindowLoss loss = test::accumulate_window(model, window, &dropout);
      optimizer->update({.learning_rate = 1e-2, .grad_scale = 1 / static_cast<double>(loss.labels), .max_grad_norm = 1, .loss = loss.sum});
      optimizer->zero_grad();
      losses.push_back(loss.mean());
    }
    return losses;
  }

  nn::AdapterState state() const {
    return {.tensors = adapter->parameters(),
            .write_files = [this](const std::filesystem::path& folder) { lora::save_adapter(folder, model, *adapter, "base"); },
            .base = lora::base_fingerprint(model)};
  }

  nn::CausalLM model;
  std::optional<lora::Adapter> adapter;
  std::optional<nn::AdamW> optimizer;
};

class CudaLora : public NeedsCuda<testing::TestWithParam<nn::Architecture>> {
 protected:
  // The kinds of adapter whose work differs.
  static std::vector<lora::LoraConfig> configs() {
    return {{.r = 4}, {.r = 4, .target_modules = {"c_attn", "o_proj"}}, {.r = 8, .lora_dropout = 0.25, .target_modules = {"all-linear"}},
            {.r = 4, .use_dora = true}};
  }
};

TEST_P(CudaLora, LossesAreTheCpus) {
  for (const lora::LoraConfig& config : configs()) {
    const std::vector<double> cpu = LoraRun(GetParam(), DType::f32, kCpu, config).train();
    const std::vector<double> gpu = LoraRun(GetParam(), DType::f32, kCuda, config).train();

    // Sums in another order, over six steps: the project's bound for losses.
    for (std::size_t i = 0; i < cpu.size(); ++i) EXPECT_NEAR(gpu[i], cpu[i], 1e-4 * cpu[i]) << i;
  }
}

TEST_P(CudaLora, TrainsInBfloat16AndLeavesTheBase) {
  for (const lora::LoraConfig& config : configs()) {
    LoraRun run(GetParam(), DType::bf16, kCuda, config);
    std::vector<nn::NamedTensor> base = run.model.parameters();
    std::erase_if(base, [](const nn::NamedTensor& named) { return named.tensor.requires_grad(); });
    const auto before = values_of(base);

    const std::vector<double> losses = run.train();

    EXPECT_LT(losses.back(), losses.front());
    EXPECT_EQ(values_of(base), before);
    for (const nn::NamedTensor& named : base) EXPECT_FALSE(named.tensor.grad().defined()) << named.name;
  }
}

struct DeterministicKernels {
  DeterministicKernels() { device_context(kCuda).deterministic = true; }
  ~DeterministicKernels() { device_context(kCuda).deterministic = false; }
};

TEST_P(CudaLora, ContinuesFromACheckpointBitForBit) {
  const DeterministicKernels deterministic;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const lora::LoraConfig& config : configs()) {
      const TempFolder folder;
      LoraRun whole(GetParam(), dtype, kCuda, config), stopped(GetParam(), dtype, kCuda, config), resumed(GetParam(), dtype, kCuda, config);
      whole.train();
      stopped.train(0, 3);

      const auto checkpoint = nn::save_checkpoint(folder.path(), stopped.model, *stopped.optimizer, {.step = 3}, "train: {}\n", stopped.state());
      nn::load_checkpoint(checkpoint, resumed.model, *resumed.optimizer, resumed.state());
      resumed.train(3);

      EXPECT_EQ(values_of(resumed.adapter->parameters()), values_of(whole.adapter->parameters())) << dtype << config.target_modules[0];
    }
}

double largest(const std::vector<double>& values) {
  double out = 0;
  for (const double value : values) out = std::max(out, std::abs(value));
  return out;
}

TEST_P(CudaLora, FreshAdapterLeavesTheOutputBitForBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    nn::CausalLM model = LoraRun::make(GetParam(), dtype, kCuda);
    const Tensor ids = TinyData().train_batch(0, 3).input_ids.to(kCuda);
    const std::vector<double> before = model.forward(ids).to_doubles();
    for (lora::LoraConfig config : configs())
      for (const bool use_dora : {false, true}) {
        config.use_dora = use_dora;
        Generator dropout{5};
        const lora::Adapter adapter = adapt(model, config);
        adapter.attach(model);

        // What a product with a GELU in it gives is not rounded before the GELU, which a slot with an adapter does: some roundings of
        // 2^-9 in the sums of two layers.
        const bool had_fused_gelu = dtype == DType::bf16 && GetParam() == nn::Architecture::gpt2 && config.target_modules[0] == "all-linear";
        const double bound = had_fused_gelu ? largest(before) / 64 : 0;
        EXPECT_TRUE(all_close(model.forward(ids, &dropout), before, bound)) << dtype << use_dora << config.target_modules[0];
        adapter.detach(model);
      }
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaLora, testing::Values(nn::Architecture::gpt2, nn::Architecture::llama),
                         [](const auto& info) { return std::string(info.param == nn::Architecture::llama ? "llama" : "gpt2"); });

}  // namespace
}  // namespace heddle::test
