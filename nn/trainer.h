#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/data.h"
#include "nn/metrics_log.h"
#include "nn/optim.h"
#include "nn/progress.h"
#include "nn/train_config.h"
#include "nn/train_step.h"
#include "nn/transformer.h"

namespace heddle::nn {

// Writes the graph of the loss of one batch in Graphviz's dot language. Changes neither the model nor the generator.
void write_graph(const std::filesystem::path& path, const CausalLM& model, const Batch& batch, Generator dropout = {});

struct TrainerOptions {
  std::string title;        // of loss.svg
  std::optional<AdapterState> adapter = {};  // of a model whose other parameters are frozen
  std::function<double(const NamedTensor&)> rate_scale = {};  // AdamWOptions::rate_scale
  std::string config_yaml;  // the resolved config, stored in the output folder and in every checkpoint
  std::function<bool()> interrupted = [] { return false; };  // asked after every step
  ProgressTarget progress = standard_output();
};

struct TrainResult {
  std::int64_t step = 0;             // steps done, those before a resume included
  bool interrupted = false;
  std::filesystem::path checkpoint;  // the last one, empty if there is none
};

// Trains a model and keeps its output folder.
//
// Note: Output folder
// config.yaml, metrics.jsonl, loss.svg, sample.txt (at the end) and checkpoint-<step>. A checkpoint is written every save_steps,
// whenever an evaluation is the best so far, at the end and on an interrupt; save_total_limit are kept, among them
// always the best and the last. The folder belongs to one process at a time. A run from scratch moves what an earlier
// one left there to old-<n> inside it; a resumed run moves there only the checkpoints after the one it continues, and cuts
// metrics.jsonl at that step. Both wait for the first step to succeed, so a run that cannot start changes nothing.
// No old-<n> is ever removed: that is for the user to do.
//
// A resumed run continues bit for bit: weights, moments, step, random numbers and position in the data are restored.
class Trainer {
 public:
  // Locks the output folder and restores resume_from_checkpoint: "auto" is the last checkpoint in output_dir, a run from
  // scratch if there is none; a path is a checkpoint or the output folder of a run. The references must outlive the
  // trainer. Throws heddle::Error if the folder cannot be written or is in use, or the checkpoint does not fit or comes
  // from other data.
  Trainer(CausalLM& model, const Dataset& data, const TrainConfig& config, TrainerOptions options);

  // Trains up to max_steps or an interrupt. Throws heddle::Error after max_nonfinite_steps updates in a row that were
  // skipped because the loss or a gradient was not finite, and if the run ends in such a row or with an evaluation loss
  // that is not finite. No checkpoint is written in that state, so the last one is from before it.
  TrainResult run();

  const TrainerState& state() const { return state_; }
  const AdamW& optimizer() const { return optimizer_; }

 private:
  using Clock = std::chrono::steady_clock;

  void resume_or_start();
  std::optional<Checkpoint> checkpoint_to_resume() const;
  void take_folder(Progress& progress);  // Note: Output folder

  struct PendingStep {
    StepMetrics metrics;
    StartedStep started;
  };
  // Note: Steps ahead
  // The host starts the next step while the device still works on this one, and learns a step later what became of it: nothing
  // that decides about an update is known to the host before. Evaluations, checkpoints and the end wait for all steps. On the CPU
  // a step is done when it is started.
  static constexpr std::size_t kStepsAhead = 1;
  void start_step();
  void report_attention(Progress& progress);
  void settle_steps(std::size_t may_be_pending, Progress& progress);
  void settle(PendingStep step, Progress& progress);
  void skip_nonfinite(std::int64_t step, const std::string& where, Progress& progress);
  bool evaluate_now(Progress& progress);  // whether it was the best so far
  void save_now(Progress& progress);
  void finish(Progress& progress);
  void stop_if_diverged() const;
  std::string last_checkpoint_text() const;

  void report(StepMetrics metrics, Progress& progress);
  void draw_chart() const;

  bool is_due(std::int64_t interval) const { return is_due(interval, state_.step); }
  static bool is_due(std::int64_t interval, std::int64_t step) { return interval > 0 && step % interval == 0; }
  bool is_last_step() const { return state_.step >= config_.max_steps; }
  bool is_healthy() const { return nonfinite_in_a_row_ == 0 && is_eval_finite_; }
  std::filesystem::path file(const char* name) const { return folder_.path() / name; }

  CausalLM& model_;
  const Dataset& data_;
  TrainConfig config_;
  TrainerOptions options_;
  OutputFolder folder_;
  AdamW optimizer_;
  TrainStep train_step_;
  TrainerState state_;
  std::int64_t kept_step_ = -1;  // how far the files in the output folder belong to this run
  std::optional<MetricsLog> metrics_;  // none before take_folder
  std::deque<PendingStep> pending_;
  std::int64_t nonfinite_in_a_row_ = 0;
  bool is_eval_finite_ = true;
  std::filesystem::path last_checkpoint_;
  std::size_t reported_choices_ = 0;  // of attention_choices()
  Clock::duration timed_{};  // spent in steps since the last logged one
  std::int64_t timed_steps_ = 0;
  std::int64_t timed_tokens_ = 0;
};

}  // namespace heddle::nn
