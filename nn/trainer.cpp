#include "nn/trainer.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "autograd/graphviz.h"
#include "autograd/ops.h"
#include "kernels/attention/attention.h"
#include "nn/evaluate.h"
#include "nn/posix_file.h"
#include "nn/schedule.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;

// Dropout draws from a stream of its own, so that its masks are not the numbers the weights started from.
constexpr std::uint64_t kDropoutStream = 0x9E3779B97F4A7C15u;

}  // namespace

void write_graph(const fs::path& path, const CausalLM& model, const Batch& batch, Generator dropout) {
  std::vector<std::pair<std::string, Tensor>> names;
  for (const NamedTensor& parameter : model.parameters()) names.emplace_back(parameter.name, parameter.tensor);
  std::ostringstream text;
  write_graphviz(text, loss_sum(model, batch, &dropout), names);
  write_file(path, text.str());
}

Trainer::Trainer(CausalLM& model, const Dataset& data, const TrainConfig& config, TrainerOptions options)
    : model_(model),
      data_(data),
      config_((validate(config), config)),
      options_(std::move(options)),
      folder_(config_.output_dir),
      optimizer_(model.trainable_parameters(), {.beta1 = config_.adam_beta1,
                                                .beta2 = config_.adam_beta2,
                                                .eps = config_.adam_epsilon,
                                                .weight_decay = config_.weight_decay,
                                                .rate_scale = options_.rate_scale}),
      train_step_(model_, optimizer_, config_) {
  state_.data = data_.describe();
  state_.dropout.seed = static_cast<std::uint64_t>(config_.seed) ^ kDropoutStream;
  resume_or_start();
}

std::optional<Checkpoint> Trainer::checkpoint_to_resume() const {
  if (!config_.resume_from_checkpoint) return std::nullopt;
  if (*config_.resume_from_checkpoint != "auto") return open_checkpoint(*config_.resume_from_checkpoint, Pick::last);
  return find_last_checkpoint(folder_.path(), &options_.progress.out);
}

void Trainer::resume_or_start() {
  std::ostream& out = options_.progress.out;
  if (const auto from = checkpoint_to_resume()) {
    HEDDLE_CHECK(from->state.data == state_.data, "resume: ", printable_path(from->folder), " was trained on other data. Then: ",
                 from->state.data, ". Now: ", state_.data,
                 ". A run continues only on the data it began with; restore it, or start a run in another train.output_dir");
    state_ = load_checkpoint(from->folder, model_, optimizer_, options_.adapter);
    out << "resuming from " << printable_path(from->folder) << ", step " << state_.step << std::endl;
    if (fs::canonical(from->folder).parent_path() == fs::canonical(folder_.path())) {
      kept_step_ = state_.step;
      last_checkpoint_ = from->folder;
    } else {
      state_.best_eval_loss.reset();
      state_.best_step = 0;
    }
  } else if (config_.resume_from_checkpoint) {
    out << "no checkpoint in " << printable_path(folder_.path()) << "; starting from scratch" << std::endl;
  }
  if (config_.warmup_steps > config_.max_steps)
    out << "note: warmup_steps " << config_.warmup_steps << " exceeds max_steps " << config_.max_steps
        << "; the learning rate never reaches " << config_.learning_rate << std::endl;
}

void Trainer::take_folder(Progress& progress) {
  if (const auto aside = set_aside(folder_.path(), kept_step_))
    progress.message(concat_text("moved the earlier ", kept_step_ < 0 ? "run" : "checkpoints after that step", " in ",
                                 printable_path(folder_.path()), " to ", printable_path(*aside)));
  metrics_.emplace(file("metrics.jsonl"), kept_step_);
  write_file(file("config.yaml"), options_.config_yaml);
}

TrainResult Trainer::run() {
  Progress progress(options_.progress, state_.step, config_.max_steps);
  forget_attention_choices();
  reported_choices_ = 0;
  bool is_interrupted = false;
  while (!is_last_step() && !is_interrupted) {
    start_step();
    report_attention(progress);
    const bool is_eval_due = is_last_step() || is_due(config_.eval_steps);
    is_interrupted = !is_last_step() && options_.interrupted();
    const bool is_stop = is_eval_due || is_interrupted || is_due(config_.save_steps);
    settle_steps(is_stop ? 0 : kStepsAhead, progress);
    const bool is_best = is_eval_due && evaluate_now(progress);
    if (is_last_step() || is_best || is_interrupted || is_due(config_.save_steps)) save_now(progress);
  }
  if (!metrics_) take_folder(progress);  // a resumed run that was already at its end
  if (!is_interrupted) finish(progress);
  return {.step = state_.step, .interrupted = is_interrupted, .checkpoint = last_checkpoint_};
}

void Trainer::start_step() {
  const auto start = Clock::now();
  const std::int64_t batch_size = config_.micro_batch_size;
  std::vector<Batch> window;
  for (std::int64_t i = 0; i < config_.gradient_accumulation_steps; ++i) {
    window.push_back(data_.train_batch(state_.examples, batch_size));
    state_.examples += batch_size;
  }
  const double learning_rate = learning_rate_at(config_, state_.step);
  StartedStep started = train_step_.start(window, learning_rate, state_.dropout);

  state_.step += 1;
  state_.tokens += config_.gradient_accumulation_steps * batch_size * data_.row_length();
  pending_.push_back({.metrics = {.step = state_.step, .learning_rate = learning_rate, .tokens = state_.tokens},
                      .started = std::move(started)});
  timed_ += Clock::now() - start;
}

// Which kernels attention has run on: a line for each that is new.
void Trainer::report_attention(Progress& progress) {
  for (; reported_choices_ < attention_choices().size(); ++reported_choices_)
    progress.message(concat_text(attention_choices()[reported_choices_]));
}

void Trainer::settle_steps(std::size_t may_be_pending, Progress& progress) {
  const auto is_done = [](const PendingStep& step) { return !step.started.update || step.started.update->is_ready(); };
  while (!pending_.empty() && (pending_.size() > may_be_pending || is_done(pending_.front()))) {
    PendingStep step = std::move(pending_.front());
    pending_.pop_front();
    settle(std::move(step), progress);
  }
}

void Trainer::settle(PendingStep step, Progress& progress) {
  const auto start = Clock::now();
  const auto& [labels, pending] = step.started;
  const UpdateResult update = pending ? pending->result() : UpdateResult{};
  timed_ += Clock::now() - start;
  timed_steps_ += 1;
  timed_tokens_ += config_.gradient_accumulation_steps * config_.micro_batch_size * data_.row_length();

  StepMetrics& metrics = step.metrics;
  metrics.loss = update.loss / static_cast<double>(labels);  // NaN without labels
  metrics.grad_norm = update.grad_norm;
  if (!pending) {
    progress.message(concat_text("warning: step ", metrics.step, ": no token carries loss; update skipped"));
  } else if (update.applied) {
    nonfinite_in_a_row_ = 0;
  } else if (!std::isfinite(update.loss)) {
    metrics.grad_norm = std::nan("");
    skip_nonfinite(metrics.step, "the loss", progress);
  } else {
    skip_nonfinite(metrics.step, "the gradient of " + update.nonfinite, progress);
  }
  report(metrics, progress);
  if (nonfinite_in_a_row_ >= config_.max_nonfinite_steps) stop_if_diverged();
}

void Trainer::skip_nonfinite(std::int64_t step, const std::string& where, Progress& progress) {
  nonfinite_in_a_row_ += 1;
  progress.message(concat_text("warning: step ", step, ": ", where, " is not finite; update skipped (", nonfinite_in_a_row_, " in a row)"));
}

void Trainer::save_now(Progress& progress) {
  if (!is_healthy()) {
    progress.message(concat_text("warning: step ", state_.step, ": no checkpoint, because the loss or a gradient is not finite"));
    return;
  }
  try {
    last_checkpoint_ = save_checkpoint(folder_.path(), model_, optimizer_, state_, options_.config_yaml, options_.adapter);
  } catch (const Error& error) {
    throw Error(concat_text("train: no checkpoint of step ", state_.step, ": ", error.what(), "; ", last_checkpoint_text()));
  }
  prune_checkpoints(folder_.path(), config_.save_total_limit);
  progress.message("saved " + printable_path(last_checkpoint_));
}

void Trainer::stop_if_diverged() const {
  if (is_healthy()) return;
  draw_chart();
  const std::string what = nonfinite_in_a_row_ > 0
                               ? concat_text("loss or a gradient was not finite ", nonfinite_in_a_row_, " times in a row")
                               : std::string("evaluation loss is not finite");
  throw Error(concat_text("train: stopped at step ", state_.step, ": the ", what, "; ", last_checkpoint_text(),
                          "; try a lower learning_rate or a longer warm-up"));
}

std::string Trainer::last_checkpoint_text() const {
  return last_checkpoint_.empty() ? "there is no checkpoint" : "the last checkpoint is " + printable_path(last_checkpoint_);
}

void Trainer::finish(Progress& progress) {
  stop_if_diverged();
  draw_chart();
  write_file(file("sample.txt"), sample_text(model_, data_, static_cast<std::uint64_t>(config_.seed)));
  progress.finish();
  if (state_.best_eval_loss)
    progress.message(concat_text("best eval loss ", *state_.best_eval_loss, " at step ", state_.best_step));
  progress.message(concat_text("results in ", printable_path(folder_.path()), ": metrics.jsonl, loss.svg, sample.txt"));
}

}  // namespace heddle::nn
