#include <cmath>
#include <iomanip>

#include "nn/evaluate.h"
#include "nn/trainer.h"

// What a trainer tells its user: progress, metrics.jsonl, loss.svg, evaluations.

namespace heddle::nn {

void Trainer::report(StepMetrics metrics, Progress& progress) {
  if (!metrics_) take_folder(progress);  // after the first step
  const double seconds = std::chrono::duration<double>(timed_).count();
  metrics.tokens_per_second = static_cast<double>(timed_tokens_) / seconds;
  metrics.step_ms = 1000 * seconds / static_cast<double>(timed_steps_);
  const bool is_logged = metrics.step == 1 || is_due(config_.logging_steps, metrics.step) || metrics.step == config_.max_steps;
  progress.step({.step = metrics.step,
                 .loss = metrics.loss,
                 .learning_rate = metrics.learning_rate,
                 .tokens_per_second = metrics.tokens_per_second},
                is_logged);
  if (!is_logged) return;
  metrics_->write(metrics);
  timed_ = {};
  timed_steps_ = 0;
  timed_tokens_ = 0;
}

bool Trainer::evaluate_now(Progress& progress) {
  const EvalResult result = evaluate(model_, data_, config_.micro_batch_size, config_.eval_iters);
  metrics_->write(state_.step, result);
  draw_chart();
  std::string text = concat_text("step ", state_.step, ": eval loss ", std::fixed, std::setprecision(4), result.loss);
  if (result.exact_match)
    text += concat_text(", exact match ", std::fixed, std::setprecision(2), 100 * *result.exact_match, " %");
  progress.message(text);

  is_eval_finite_ = std::isfinite(result.loss);
  if (!is_healthy() || (state_.best_eval_loss && result.loss >= *state_.best_eval_loss)) return false;
  state_.best_eval_loss = result.loss;
  state_.best_step = state_.step;
  return true;
}

void Trainer::draw_chart() const {
  const MetricsLog::Curves curves = metrics_->curves();
  write_file(file("loss.svg"), to_svg(loss_chart(options_.title, curves.train, curves.eval)));
}

}  // namespace heddle::nn
