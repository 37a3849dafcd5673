#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>
#include <tuple>

#include "lora/adapter_file.h"
#include "nn/posix_file.h"
#include "nn/safetensors.h"
#include "nn/trainer.h"
#include "tests/support/adapters.h"
#include "tests/support/error_of.h"
#include "tests/support/short_run.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"

// Training an adapter with the trainer.

namespace heddle::lora {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::TempFolder;
using test::tiny_config;
using test::tiny_model;
using test::train_config;
using test::values_of;

struct LoraRun {
  explicit LoraRun(const nn::TrainConfig& train, const LoraConfig& config = {.r = 4, .lora_dropout = 0.3, .use_dora = true},
                   DType dtype = DType::f32, std::uint64_t seed = 1, nn::Architecture architecture = nn::Architecture::llama)
      : model(tiny_model(tiny_config(architecture), seed, dtype)), train(train) {
    adapter = test::adapt(model, config);
    adapter->attach(model);
  }

  // Interrupted after `steps` steps.
  nn::TrainResult go(std::int64_t steps = 1000) {
    nn::TrainerOptions options = test::trainer_options(out, steps);
    options.adapter = nn::AdapterState{.tensors = adapter->parameters(),
                                       .write_files = [&](const fs::path& folder) { save_adapter(folder, model, *adapter, "base"); },
                                       .base = base_fingerprint(model)};
    options.rate_scale = [&](const nn::NamedTensor& parameter) { return adapter->rate_scale(parameter); };
    return nn::Trainer(model, data, train, std::move(options)).run();
  }

  std::vector<nn::NamedTensor> base() const {
    std::vector<nn::NamedTensor> all = model.parameters();
    std::erase_if(all, [](const nn::NamedTensor& named) { return named.tensor.requires_grad(); });
    return all;
  }

  nn::CausalLM model;
  std::optional<Adapter> adapter;
  test::TinyData data;
  nn::TrainConfig train;
  std::ostringstream out;
};

// Separate projections of Llama, and GPT-2's with one A for three.
class LoraTrainingIn : public testing::TestWithParam<std::tuple<nn::Architecture, DType>> {
 protected:
  static LoraRun run(const nn::TrainConfig& train, LoraConfig config) {
    const auto [architecture, dtype] = GetParam();
    if (architecture == nn::Architecture::gpt2) config.target_modules = {"c_attn", "o_proj"};
    return LoraRun(train, config, dtype, /*seed=*/1, architecture);
  }
};

TEST_P(LoraTrainingIn, LeavesTheBasesBytesAndMovesTheAdapter) {
  const TempFolder folder;
  LoraRun trained_run = run(train_config(folder / "run", 3), {.r = 2});
  const auto base = values_of(trained_run.base()), factors = values_of(trained_run.adapter->parameters());
  const std::string fingerprint = base_fingerprint(trained_run.model);

  trained_run.go();

  EXPECT_EQ(values_of(trained_run.base()), base);
  EXPECT_EQ(base_fingerprint(trained_run.model), fingerprint);
  const auto trained = values_of(trained_run.adapter->parameters());
  for (std::size_t i = 0; i < trained.size(); ++i) EXPECT_NE(trained[i], factors[i]) << i;
}

TEST_P(LoraTrainingIn, ResumedRunEqualsTheUninterruptedOneBitForBit) {
  const TempFolder folder;
  nn::TrainConfig whole = train_config(folder / "whole", 7), parts = train_config(folder / "parts", 7);
  const LoraConfig config{.r = 4, .lora_dropout = 0.3, .use_dora = true, .loraplus_lr_ratio = 4};
  LoraRun uninterrupted = run(whole, config);
  uninterrupted.go();

  run(parts, config).go(3);
  parts.resume_from_checkpoint = "auto";
  LoraRun resumed = run(parts, config);
  resumed.go();

  EXPECT_EQ(values_of(resumed.adapter->parameters()), values_of(uninterrupted.adapter->parameters()));
  for (const char* name : {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "trainer_state.json"})
    EXPECT_TRUE(nn::read_file(folder / "whole/checkpoint-7" / name) == nn::read_file(folder / "parts/checkpoint-7" / name)) << name;
}

INSTANTIATE_TEST_SUITE_P(, LoraTrainingIn,
                         testing::Combine(testing::Values(nn::Architecture::gpt2, nn::Architecture::llama), testing::Values(DType::f32, DType::bf16)),
                         [](const auto& info) {
                           const bool is_llama = std::get<0>(info.param) == nn::Architecture::llama;
                           return concat_text(is_llama ? "llama_" : "gpt2_", dtype_name(std::get<1>(info.param)));
                         });

TEST(LoraTraining, EvaluatingChangesNothingAndDropsNothing) {
  const TempFolder folder;
  nn::TrainConfig silent = train_config(folder / "silent", 4), checked = train_config(folder / "checked", 4);
  checked.eval_steps = 1;
  LoraRun a(silent), b(checked);
  a.go();
  b.go();

  EXPECT_EQ(values_of(a.adapter->parameters()), values_of(b.adapter->parameters()));
}

TEST(LoraTraining, AccumulationEqualsOneLargeBatch) {
  const TempFolder folder;
  nn::TrainConfig parts = train_config(folder / "parts", 2), whole = train_config(folder / "whole", 2);
  whole.micro_batch_size = 6;
  whole.gradient_accumulation_steps = 1;
  LoraRun a(parts, {.r = 2}, DType::f64), b(whole, {.r = 2}, DType::f64);
  a.go();
  b.go();

  // Sums of some hundred float64 terms in another order, through two updates that divide by their own size.
  const auto x = values_of(a.adapter->parameters()), y = values_of(b.adapter->parameters());
  for (std::size_t i = 0; i < x.size(); ++i)
    for (std::size_t j = 0; j < x[i].size(); ++j) ASSERT_NEAR(x[i][j], y[i][j], 1e-9) << i << ' ' << j;
}

TEST(LoraTraining, CheckpointHoldsTheAdapterThatOthersReadAndNotTheBase) {
  const TempFolder folder;
  LoraRun run(train_config(folder / "run", 2), {.r = 2});
  const nn::TrainResult result = run.go();
  run.model.eval();
  const std::vector<double> trained = run.model.forward(Tensor::zeros({1, 5}, DType::i64)).to_doubles();

  EXPECT_FALSE(fs::exists(result.checkpoint / "model.safetensors"));
  for (const std::string& name : nn::SafetensorsFile(result.checkpoint / "optimizer.safetensors").names())
    EXPECT_TRUE(name == "step" || name.find(".lora_") != std::string::npos) << name;  // no state of the base's weights
  EXPECT_EQ(nn::open_adapter(folder / "run"), result.checkpoint);
  fs::create_directory(folder / "bin");
  fs::copy_file(result.checkpoint / "adapter_config.json", folder / "bin/adapter_config.json");
  EXPECT_EQ(error_of([&] { nn::open_adapter(folder / "bin"); }),
            (folder / "bin").string() + " has adapter_config.json and no adapter_model.safetensors; save the adapter in that form");
  EXPECT_NE(error_of([&] { nn::open_weights(folder / "run"); }).find("holds an adapter and not the model it was trained on"), std::string::npos);
  nn::CausalLM model = tiny_model(tiny_config(nn::Architecture::llama));
  load_adapter(result.checkpoint, model).attach(model);
  model.eval();
  EXPECT_EQ(model.forward(Tensor::zeros({1, 5}, DType::i64)).to_doubles(), trained);
}

TEST(LoraTraining, PissaIsWrittenAsPlainLoraOfTheBaseAndResumes) {
  const TempFolder folder;
  const LoraConfig config{.r = 2, .lora_alpha = 3, .use_rslora = true, .init_lora_weights = InitLoraWeights::pissa};
  nn::TrainConfig whole = train_config(folder / "whole", 4), parts = train_config(folder / "parts", 4);
  LoraRun run(whole, config);
  const nn::TrainResult result = run.go();
  LoraRun(parts, config).go(2);
  parts.resume_from_checkpoint = "auto";
  LoraRun resumed(parts, config);
  resumed.go();
  run.model.eval();
  const std::vector<double> trained = run.model.forward(Tensor::zeros({1, 5}, DType::i64)).to_doubles();

  nn::CausalLM model = tiny_model(tiny_config(nn::Architecture::llama));
  const Adapter loaded = load_adapter(result.checkpoint, model);
  loaded.attach(model);
  model.eval();
  const std::vector<double> from_file = model.forward(Tensor::zeros({1, 5}, DType::i64)).to_doubles();

  EXPECT_EQ(values_of(resumed.adapter->parameters()), values_of(run.adapter->parameters()));
  EXPECT_EQ(loaded.layers()[0].a.size(0), 4);
  // Logits below 1 from float32 weights that were split and summed again: some ten roundings of 6e-8.
  for (std::size_t i = 0; i < trained.size(); ++i) EXPECT_NEAR(from_file[i], trained[i], 1e-6);
}

TEST(LoraTraining, ResumeRefusesAnotherRankAnotherBaseAndAWholeModel) {
  const TempFolder folder;
  nn::TrainConfig config = train_config(folder / "run", 2);
  LoraRun(config, {.r = 2, .target_modules = {"q_proj"}}).go(1);
  config.resume_from_checkpoint = "auto";
  const std::string checkpoint = folder / "run/checkpoint-1";

  const std::string rank = error_of([&] { LoraRun(config, {.r = 4, .target_modules = {"q_proj"}}).go(); });
  EXPECT_NE(rank.find("weight.model.layers.0.self_attn.q_proj.lora_A.weight is float32 [2, 12], expected float32 [4, 12]"), std::string::npos) << rank;
  EXPECT_EQ(error_of([&] { LoraRun(config, {.r = 2, .target_modules = {"q_proj"}}, DType::f32, /*seed=*/2).go(); }),
            checkpoint + " was trained on another base than this one; restore it");
  nn::CausalLM whole = tiny_model(tiny_config(nn::Architecture::llama));
  const test::TinyData data;
  std::ostringstream out;
  EXPECT_EQ(error_of([&] { nn::Trainer(whole, data, config, test::trainer_options(out, 2)); }),
            checkpoint + " holds an adapter, and this run trains a whole model");
}

TEST(LoraPlus, RateOfBIsMultiplied) {
  const TempFolder folder;
  const auto moved = [&](double ratio) {
    LoraRun run(train_config(folder / std::to_string(ratio), 1), {.r = 2, .target_modules = {"q_proj"}, .loraplus_lr_ratio = ratio});
    const auto before = values_of(run.adapter->parameters());
    run.go();
    const auto after = values_of(run.adapter->parameters());
    double out = 0;
    for (std::size_t i = 0; i < after[1].size(); ++i) out = std::max(out, std::abs(after[1][i] - before[1][i]));
    return out;
  };

  // B is zero, so nothing decays and AdamW's first step is rate * g / (|g| + 1e-8): the rate to 1e-3 where |g| is 1e-5 or more.
  EXPECT_NEAR(moved(1), 1e-2, 1e-5);
  EXPECT_NEAR(moved(16), 16e-2, 16e-5);
}

}  // namespace
}  // namespace heddle::lora
