// Training an adapter on a GPU: as the CPU does it, and the base as it was.

#include <gtest/gtest.h>

#include "lora/adapter.h"
#include "nn/trainer.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"
#include "tests/support/tiny_run.h"

namespace heddle::test {
namespace {

// tiny_config with heads of 8, a size that every attention kernel takes.
nn::TransformerConfig cuda_config(nn::Architecture architecture) {
  nn::TransformerConfig config = tiny_config(architecture);
  config.hidden_size = 24;
  return config;
}

struct LoraRun {
  LoraRun(nn::Architecture architecture, DType dtype, Device device, const lora::LoraConfig& config)
      : model(make(architecture, dtype, device)) {
    Generator generator{7};
    adapter.emplace(model, lora::plan_layers(lora::linear_layers(model), config), config, generator);
    adapter->attach(model);
  }

  static nn::CausalLM make(nn::Architecture architecture, DType dtype, Device device) {
    Generator generator{1};
    return nn::CausalLM(cuda_config(architecture), {.dtype = dtype, .device = device}, generator);
  }

  // The losses of six updates on the same examples.
  std::vector<double> train() {
    nn::AdamW optimizer(model.trainable_parameters(), {});
    const TinyData data;
    Generator dropout{5};
    std::vector<double> losses;
    for (int step = 0; step < 6; ++step) {
      const std::vector<nn::Batch> window = {data.train_batch(0, 3), data.train_batch(3, 3)};
      const nn::WindowLoss loss = nn::accumulate_window(model, window, &dropout);
      optimizer.update({.learning_rate = 1e-2, .grad_scale = 1 / static_cast<double>(loss.labels), .max_grad_norm = 1, .loss = loss.sum});
      optimizer.zero_grad();
      losses.push_back(loss.mean());
    }
    return losses;
  }

  nn::CausalLM model;
  std::optional<lora::Adapter> adapter;
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

TEST_P(CudaLora, FreshAdapterLeavesTheOutputBitForBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    nn::CausalLM model = LoraRun::make(GetParam(), dtype, kCuda);
    const Tensor ids = TinyData().train_batch(0, 3).input_ids.to(kCuda);
    const std::vector<double> before = model.forward(ids).to_doubles();
    for (lora::LoraConfig config : configs())
      for (const bool use_dora : {false, true}) {
        config.use_dora = use_dora;
        Generator generator{7}, dropout{5};
        const lora::Adapter adapter(model, lora::plan_layers(lora::linear_layers(model), config), config, generator);
        adapter.attach(model);

        EXPECT_TRUE(all_equal(model.forward(ids, &dropout), before)) << dtype << use_dora << config.target_modules[0];
        adapter.detach(model);
      }
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaLora, testing::Values(nn::Architecture::gpt2, nn::Architecture::llama),
                         [](const auto& info) { return std::string(info.param == nn::Architecture::llama ? "llama" : "gpt2"); });

}  // namespace
}  // namespace heddle::test
