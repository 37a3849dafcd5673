#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "autograd/grad_mode.h"
#include "nn/data.h"
#include "nn/transformer.h"

namespace heddle::nn {

// Evaluation mode and no recording for the life of the object; the destructor restores the mode that was.
class EvalMode {
 public:
  explicit EvalMode(CausalLM& model) : model_(model), was_training_(model.is_training()) { model.eval(); }
  ~EvalMode() { model_.train(was_training_); }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  CausalLM& model_;
  bool was_training_;
  NoGradGuard no_grad_;
};

// The labels of a batch that carry loss.
std::int64_t count_labels(const Batch& batch);

struct EvalResult {
  double loss = 0;                    // mean over the labels
  std::optional<double> exact_match;  // share of examples answered right, where the data have answers
};

// Loss on the held-out examples, in batches of `batch_size`: the first eval_iters batches, or every one where examples
// are answers, right or wrong. The same examples each time, and no random number is drawn, so evaluating neither
// depends on training nor disturbs it.
EvalResult evaluate(CausalLM& model, const Dataset& data, std::int64_t batch_size, std::int64_t eval_iters);

// What the model makes of held-out data, for reading: problems with its answers, each marked right or wrong, where the
// data have answers; otherwise a passage and its continuation. Byte tokens.
std::string sample_text(CausalLM& model, const Dataset& data, std::uint64_t seed);

}  // namespace heddle::nn
