#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <sstream>

#include "nn/posix_file.h"
#include "nn/trainer.h"
#include "tests/support/tiny_run.h"

// Training of a few steps that can be cut short, resumed and recorded, to compare what it leaves behind.
namespace heddle::test {

// Every step is logged, none evaluated, and the last one saved.
inline nn::TrainConfig train_config(const std::filesystem::path& folder, std::int64_t steps) {
  nn::TrainConfig config;
  config.output_dir = folder;
  config.max_steps = steps;
  config.micro_batch_size = 3;
  config.gradient_accumulation_steps = 2;
  config.learning_rate = 1e-2;
  config.warmup_steps = std::min<std::int64_t>(2, steps);
  config.logging_steps = 1;
  config.eval_steps = 0;
  config.save_steps = 0;
  return config;
}

// Of a run that is interrupted after `steps` steps and prints to `out` as it would to a file.
inline nn::TrainerOptions trainer_options(std::ostream& out, std::int64_t steps) {
  return {.title = "test",
          .config_yaml = "train: {}\n",
          .interrupted = [steps, done = std::int64_t{0}]() mutable { return ++done >= steps; },
          .progress = {.out = out, .is_terminal = false, .width = [] { return 80; }, .now = [] { return 0.0; }}};
}

constexpr std::int64_t kShortRunSteps = 7;

struct ShortRun {
  std::int64_t interrupt_after = 100;  // steps
  bool resumes = false;
  bool has_graph = false;
};

inline nn::TrainResult train_short_run(const std::filesystem::path& folder, nn::CausalLM& model, const ShortRun& run) {
  const TinyData data;
  nn::TrainConfig config = train_config(folder, kShortRunSteps);
  config.eval_steps = 2;
  config.cuda_graph = run.has_graph;
  if (run.resumes) config.resume_from_checkpoint = "auto";
  std::ostringstream out;
  return nn::Trainer(model, data, config, trainer_options(out, run.interrupt_after)).run();
}

// Both have ended at the last step.
inline void expect_same_bits(const std::filesystem::path& run, const std::filesystem::path& other) {
  const std::string last = concat_text("checkpoint-", kShortRunSteps);
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "trainer_state.json"})
    EXPECT_TRUE(nn::read_file(run / last / name) == nn::read_file(other / last / name)) << name;
}

}  // namespace heddle::test
