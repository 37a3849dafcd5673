#pragma once

#include <cstdint>
#include <span>

#include "nn/evaluate.h"
#include "nn/train_step.h"

// Gradients of the micro-batches between two updates.
namespace heddle::test {

struct WindowLoss {
  Tensor sum;               // float64 [], on the model's device: of the losses of all labels
  std::int64_t labels = 0;  // that carry loss

  double mean() const { return sum.item() / static_cast<double>(labels); }
};

inline WindowLoss accumulate_window(const nn::CausalLM& model, std::span<const nn::Batch> micro_batches, Generator* dropout) {
  std::int64_t labels = 0;
  for (const nn::Batch& batch : micro_batches) labels += nn::count_labels(batch);
  return {nn::add_gradients(model, micro_batches, dropout), labels};
}

}  // namespace heddle::test
