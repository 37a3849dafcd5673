#include "nn/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "autograd/grad_mode.h"
#include "nn/evaluate.h"
#include "nn/posix_file.h"
#include "tests/support/error_of.h"
#include "tests/support/short_run.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"
#include "tests/support/window.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::accumulate_window;
using test::error_of;
using test::TempFolder;
using test::tiny_config;
using test::tiny_model;
using test::TinyData;
using test::train_config;
using test::trainer_options;
using test::values_of;
using test::WindowLoss;

TransformerConfig with_dropout() {
  TransformerConfig config = tiny_config();
  config.resid_pdrop = 0.2;
  config.embd_pdrop = 0.1;
  return config;
}

// A trainer with everything it needs; what it prints is kept.
struct TestRun {
  explicit TestRun(const TrainConfig& train, const TransformerConfig& config = with_dropout(), DType dtype = DType::f32)
      : model(tiny_model(config, 1, dtype)), train(train) {}

  TrainResult go() { return go(std::numeric_limits<std::int64_t>::max()); }
  // Interrupted after `steps` steps.
  TrainResult go(std::int64_t steps) { return Trainer(model, data, train, options(steps)).run(); }
  TrainerOptions options(std::int64_t steps) { return trainer_options(out, steps); }

  CausalLM model;
  TinyData data;
  TrainConfig train;
  std::ostringstream out;
};

std::vector<json> metrics_of(const fs::path& folder) {
  std::vector<json> out;
  std::istringstream in(read_file(folder / "metrics.jsonl"));
  for (std::string line; std::getline(in, line);) out.push_back(json::parse(line));
  return out;
}

// The metrics without what depends on the clock.
std::vector<json> timeless(std::vector<json> metrics) {
  for (json& object : metrics) {
    object.erase("step_ms");
    object.erase("tokens_per_second");
  }
  return metrics;
}

void expect_same_checkpoint(const fs::path& a, const fs::path& b) {
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "trainer_state.json"})
    EXPECT_TRUE(read_file(a / name) == read_file(b / name)) << name;
}

// Resuming

class Resume : public testing::TestWithParam<DType> {};

TEST_P(Resume, EqualsTheUninterruptedRunBitForBit) {
  const TempFolder folder;
  TrainConfig whole = train_config(folder / "whole", 7), parts = train_config(folder / "parts", 7);
  whole.eval_steps = parts.eval_steps = 2;
  TestRun(whole, with_dropout(), GetParam()).go();

  const TrainResult stopped = TestRun(parts, with_dropout(), GetParam()).go(3);
  parts.resume_from_checkpoint = "auto";
  const TrainResult resumed = TestRun(parts, with_dropout(), GetParam()).go();

  EXPECT_TRUE(stopped.interrupted);
  EXPECT_EQ(stopped.checkpoint, folder / "parts/checkpoint-3");
  EXPECT_EQ(resumed.step, 7);
  expect_same_checkpoint(folder / "whole/checkpoint-7", folder / "parts/checkpoint-7");
  EXPECT_EQ(timeless(metrics_of(folder / "parts")), timeless(metrics_of(folder / "whole")));
}

INSTANTIATE_TEST_SUITE_P(, Resume, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(Trainer, NormalisesOnceByTheLabelsOfTheWholeWindow) {
  const TempFolder folder;
  const TrainConfig config = train_config(folder / "run", 1);
  TestRun(config, tiny_config()).go();

  const CausalLM model = tiny_model(tiny_config());
  AdamW optimizer(model.trainable_parameters(), {});
  const std::vector<Batch> window = {TinyData().train_batch(0, 3), TinyData().train_batch(3, 3)};
  const WindowLoss loss = accumulate_window(model, window, nullptr);
  const UpdateResult update = optimizer.update({.learning_rate = 1e-2, .grad_scale = 1 / static_cast<double>(loss.labels)});
  const json logged = metrics_of(folder / "run").at(0);
  EXPECT_EQ(logged["loss"], loss.mean());
  EXPECT_EQ(logged["grad_norm"], update.grad_norm);
}

TEST(Trainer, DropoutMasksDifferFromStepToStepAndRepeatWithTheSeed) {
  const TempFolder folder;
  TrainConfig frozen = train_config(folder / "a", 2);
  frozen.learning_rate = 1e-30;  // the weights stay, and every step reads the one training row: only masks change the loss
  frozen.micro_batch_size = 1;
  frozen.gradient_accumulation_steps = 1;
  for (const char* name : {"a", "b"}) {
    frozen.output_dir = folder / name;
    TestRun run(frozen);
    run.data = TinyData(/*train_size=*/1, /*eval_size=*/1);
    run.go();
  }

  const auto a = metrics_of(folder / "a"), b = metrics_of(folder / "b");
  EXPECT_GT(std::abs(a[0]["loss"].get<double>() - a[1]["loss"].get<double>()), 1e-4);
  EXPECT_EQ(a[0]["loss"], b[0]["loss"]);
  EXPECT_EQ(a[1]["loss"], b[1]["loss"]);
}

TEST(Trainer, ResumingFromAnEarlierCheckpointDropsWhatCameAfter) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 6);
  config.save_steps = 2;
  TestRun(config).go();
  const std::string first = read_file(folder / "run/checkpoint-6/model.safetensors");

  config.resume_from_checkpoint = folder / "run/checkpoint-2";
  TestRun(config).go();

  EXPECT_TRUE(read_file(folder / "run/checkpoint-6/model.safetensors") == first);
  EXPECT_TRUE(fs::exists(folder / "run/old-1/checkpoint-4"));
  std::vector<std::int64_t> steps;
  for (const json& object : metrics_of(folder / "run"))
    if (object.contains("loss")) steps.push_back(object["step"]);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
}

TEST(Trainer, AutoWithoutACheckpointStartsFromScratchAndSaysSo) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 1);
  config.resume_from_checkpoint = "auto";
  TestRun run(config);

  EXPECT_EQ(run.go().step, 1);
  EXPECT_NE(run.out.str().find("no checkpoint in " + (folder / "run").string() + "; starting from scratch"), std::string::npos);
}

TEST(Trainer, ResumingAnotherModelIsRefused) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 1);
  TestRun(config).go();
  config.resume_from_checkpoint = "auto";
  TransformerConfig wider = with_dropout();
  wider.intermediate_size = 24;

  EXPECT_THROW(TestRun(config, wider).go(), Error);
}

TEST(Trainer, NamesTheAttentionKernelsOnce) {
  const TempFolder folder;
  TestRun run(train_config(folder / "run", 3));

  run.go();

  const std::string out = run.out.str();
  for (const char* pass : {"forward", "backward"}) {
    const std::string line = concat_text("attention ", pass, ": cpu on cpu (float32, 3 query and 3 key heads of size 4, causal)\n");
    const std::size_t at = out.find(line);
    ASSERT_NE(at, std::string::npos) << out;
    EXPECT_EQ(out.find(line, at + 1), std::string::npos) << out;
  }
}

TEST(Trainer, ResumingOnOtherDataIsRefused) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 1);
  TestRun first(config);
  first.go();
  config.resume_from_checkpoint = "auto";
  TestRun second(config);
  second.data = TinyData(/*train_size=*/5, /*eval_size=*/1);

  EXPECT_EQ(error_of([&] { second.go(); }),
            "resume: " + (folder / "run/checkpoint-1").string() + " was trained on other data. Then: " + first.data.describe() +
                ". Now: " + second.data.describe() +
                ". A run continues only on the data it began with; restore it, or start a run in another train.output_dir");
}

TEST(Trainer, WarmupLongerThanTheRunIsNoted) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 1);
  config.warmup_steps = 2;
  TestRun run(config);
  run.go();

  EXPECT_NE(run.out.str().find("note: warmup_steps 2 exceeds max_steps 1; the learning rate never reaches 0.01\n"), std::string::npos);
}

// Output folder

TEST(Trainer, SecondRunFromScratchKeepsTheFirst) {
  const TempFolder folder;
  const TrainConfig config = train_config(folder / "run", 2);
  TestRun(config).go();
  TestRun second(config);

  second.go();

  EXPECT_TRUE(fs::exists(folder / "run/old-1/checkpoint-2/model.safetensors"));
  EXPECT_TRUE(fs::exists(folder / "run/old-1/metrics.jsonl"));
  EXPECT_TRUE(fs::exists(folder / "run/checkpoint-2/model.safetensors"));
  EXPECT_NE(second.out.str().find("moved the earlier run in " + (folder / "run").string()), std::string::npos);
}

// Data whose rows cannot be read.
class BrokenData final : public Dataset {
 public:
  BrokenData() : Dataset(1) { set_sizes(2, 2, 7); }
  bool has_exact_match() const override { return false; }
  std::string describe() const override { return "broken"; }

 private:
  void write_example(Split, std::int64_t, std::span<std::int64_t>, std::span<std::int64_t>) const override { throw Error("broken"); }
};

TEST(Trainer, RunWhoseFirstStepFailsLeavesTheEarlierRunInPlace) {
  const TempFolder folder;
  TestRun first(train_config(folder / "run", 2));
  first.go();
  const std::string metrics = read_file(folder / "run/metrics.jsonl");
  write_file(folder / "run/config.yaml", "# by hand\n");
  TestRun second(first.train);
  const BrokenData data;

  EXPECT_THROW(Trainer(second.model, data, second.train, second.options(9)).run(), Error);

  EXPECT_TRUE(fs::exists(folder / "run/checkpoint-2/model.safetensors"));
  EXPECT_EQ(read_file(folder / "run/metrics.jsonl"), metrics);
  EXPECT_EQ(read_file(folder / "run/config.yaml"), "# by hand\n");
  EXPECT_FALSE(fs::exists(folder / "run/old-1"));
}

TEST(Trainer, CheckpointThatCannotBeSavedNamesTheLastOne) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 3);
  config.save_steps = 1;
  TestRun run(config);
  TrainerOptions options = run.options(9);
  options.interrupted = [&] {  // after the first checkpoint, a file where the second should go
    if (fs::exists(folder / "run/checkpoint-1")) write_file(folder / "run/checkpoint-2", "");
    return false;
  };

  EXPECT_EQ(test::error_of([&] { Trainer(run.model, run.data, config, options).run(); }),
            "train: no checkpoint of step 2: cannot write folder " + (folder / "run/checkpoint-2").string() +
                ": it exists and is not a folder; the last checkpoint is " + (folder / "run/checkpoint-1").string());
}

TEST(Trainer, ClosingLinesComeAfterTheBar) {
  const TempFolder folder;
  TestRun run(train_config(folder / "run", 1));
  TrainerOptions options = run.options(9);
  options.progress.is_terminal = true;

  Trainer(run.model, run.data, run.train, options).run();

  const std::string out = run.out.str();
  EXPECT_LT(out.rfind("1/1"), out.find("results in ")) << out;
}

TEST(Trainer, SecondTrainerOnOneFolderIsRefused) {
  const TempFolder folder;
  TestRun first(train_config(folder / "run", 1)), second(first.train);
  const Trainer holder(first.model, first.data, first.train, first.options(1));

  EXPECT_THROW(Trainer(second.model, second.data, second.train, second.options(1)), Error);
}

TEST(Trainer, OutputPathThatIsAFileIsRefusedBeforeTheFirstStep) {
  const TempFolder folder;
  write_file(folder / "run", "a file");

  EXPECT_THROW(TestRun(train_config(folder / "run", 1)).go(), Error);
}

TEST(Trainer, WritesEveryFileOfARun) {
  const TempFolder folder;
  TestRun(train_config(folder / "run", 2)).go();

  for (const char* name : {"config.yaml", "metrics.jsonl", "loss.svg", "sample.txt", "checkpoint-2/config.yaml"})
    EXPECT_TRUE(fs::exists(folder / "run" / name)) << name;
}

TEST(Trainer, KeepsBestAndLastWithinTheLimit) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 8);
  config.eval_steps = 2;
  config.save_steps = 1;
  config.save_total_limit = 3;
  TestRun(config).go();

  const std::vector<Checkpoint> kept = find_checkpoints(folder / "run");
  double best = std::numeric_limits<double>::infinity();
  std::int64_t best_step = 0;
  for (const json& object : metrics_of(folder / "run"))
    if (object.contains("eval_loss") && object["eval_loss"] < best) {
      best = object["eval_loss"];
      best_step = object["step"];
    }
  EXPECT_EQ(kept.size(), 3u);
  EXPECT_EQ(kept.back().state.step, 8);
  EXPECT_EQ(find_best_checkpoint(folder / "run")->state.step, best_step);
}

// Metrics

TEST(Trainer, MetricsHaveExactlyTheDocumentedKeys) {
  const TempFolder folder;
  TestRun(train_config(folder / "run", 3)).go();

  const std::vector<json> metrics = metrics_of(folder / "run");
  ASSERT_EQ(metrics.size(), 4u);
  for (std::size_t i = 0; i < 3; ++i) {
    std::vector<std::string> keys;
    for (const auto& item : metrics[i].items()) keys.push_back(item.key());
    EXPECT_EQ(keys, (std::vector<std::string>{"grad_norm", "learning_rate", "loss", "step", "step_ms", "tokens", "tokens_per_second"}));
    EXPECT_EQ(metrics[i]["step"], i + 1);
    EXPECT_EQ(metrics[i]["tokens"], (i + 1) * 2 * 3 * 7);
  }
  EXPECT_EQ(metrics[0]["learning_rate"], 5e-3);
  EXPECT_EQ(metrics[1]["learning_rate"], 1e-2);
  EXPECT_EQ(metrics[3].size(), 2u);
  EXPECT_EQ(metrics[3]["step"], 3);
  EXPECT_TRUE(metrics[3]["eval_loss"].is_number());
}

TEST(MetricsLog, NumbersThatAreNotFiniteAreNull) {
  const TempFolder folder;
  const MetricsLog log(folder / "metrics.jsonl", 0);

  log.write({.step = 1, .loss = std::nan(""), .grad_norm = std::numeric_limits<double>::infinity()});

  const json object = metrics_of(folder.path()).at(0);
  EXPECT_TRUE(object["loss"].is_null());
  EXPECT_TRUE(object["grad_norm"].is_null());
}

TEST(MetricsLog, HalfALineFromAKillIsDropped) {
  const TempFolder folder;
  write_file(folder / "metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":2.25}\n{\"step\":3,\"lo");

  const MetricsLog log(folder / "metrics.jsonl", 1);

  EXPECT_EQ(read_file(folder / "metrics.jsonl"), "{\"step\":1,\"loss\":2.5}\n");
}

// Evaluation

TEST(Evaluate, DoesNotChangeTraining) {
  const TempFolder folder;
  TrainConfig often = train_config(folder / "often", 5), rarely = train_config(folder / "rarely", 5);
  often.eval_steps = 1;
  TestRun(often).go();
  TestRun(rarely).go();

  for (const char* name : {"model.safetensors", "optimizer.safetensors"})
    EXPECT_TRUE(read_file(folder / "often/checkpoint-5" / name) == read_file(folder / "rarely/checkpoint-5" / name)) << name;
}

// Divergence

TEST(Trainer, LossThatStaysNanStopsTheRunAndKeepsTheLastGoodCheckpoint) {
  const TempFolder folder;
  TrainConfig config = train_config(folder / "run", 3);
  TestRun(config).go();
  config.max_steps = 20;
  config.max_nonfinite_steps = 4;
  config.resume_from_checkpoint = "auto";
  config.save_steps = 1;
  TestRun run(config);
  Trainer trainer(run.model, run.data, config, run.options(100));
  {
    const NoGradGuard no_grad;
    run.model.parameters().front().tensor.fill_(std::nan(""));
  }
  const auto moments = values_of(trainer.optimizer().state());

  std::string message;
  try {
    trainer.run();
  } catch (const Error& error) {
    message = error.what();
  }

  EXPECT_EQ(message, "train: stopped at step 7: the loss or a gradient was not finite 4 times in a row; the last checkpoint is " +
                         (folder / "run/checkpoint-3").string() + "; try a lower learning_rate or a longer warm-up");
  EXPECT_EQ(find_last_checkpoint(folder / "run")->state.step, 3);
  EXPECT_EQ(values_of(trainer.optimizer().state()), moments);
  EXPECT_NE(run.out.str().find("warning: step 5: the loss is not finite; update skipped (2 in a row)"), std::string::npos);
}

TEST(Trainer, RunThatEndsWithNanIsAFailureEvenBeforeTheLimit) {
  const TempFolder folder;
  TestRun run(train_config(folder / "run", 2));
  {
    const NoGradGuard no_grad;
    run.model.parameters().front().tensor.fill_(std::nan(""));
  }

  EXPECT_THROW(run.go(), Error);
  EXPECT_FALSE(find_last_checkpoint(folder / "run"));
}

// Small data and windows

TEST(Trainer, DataSmallerThanAWindowStillTrainsEveryStep) {
  const TempFolder folder;
  TestRun run(train_config(folder / "run", 3));
  run.data = TinyData(/*train_size=*/2, /*eval_size=*/1);
  const auto before = values_of(run.model.parameters());

  EXPECT_EQ(run.go().step, 3);
  EXPECT_NE(values_of(run.model.parameters()), before);
}

class NoLossData final : public Dataset {
 public:
  NoLossData() : Dataset(1) { set_sizes(2, 2, 7); }
  bool has_exact_match() const override { return false; }
  std::string describe() const override { return "no loss"; }

 private:
  void write_example(Split split, std::int64_t, std::span<std::int64_t> ids, std::span<std::int64_t> labels) const override {
    std::fill(ids.begin(), ids.end(), 1);
    std::fill(labels.begin(), labels.end(), split == Split::train ? kNoLoss : 1);
  }
};

TEST(Trainer, WindowWithoutLabelsIsSkippedWithAWarning) {
  const TempFolder folder;
  TestRun run(train_config(folder / "run", 2));
  const NoLossData data;
  const auto before = values_of(run.model.parameters());

  Trainer trainer(run.model, data, run.train, run.options(100));
  trainer.run();

  EXPECT_EQ(values_of(run.model.parameters()), before);
  EXPECT_EQ(trainer.optimizer().updates(), 0);
  EXPECT_NE(run.out.str().find("warning: step 1: no token carries loss; update skipped"), std::string::npos);
}

TEST(Trainer, RecordedStepsNeedACudaDevice) {
  const TempFolder folder;
  TrainConfig config = train_config(folder.path(), 1);
  config.cuda_graph = true;

  EXPECT_EQ(error_of([&] { TestRun(config).go(); }), "train.cuda_graph: needs a CUDA device, the model is on cpu; set it to false");
}

}  // namespace
}  // namespace heddle::nn
