#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/runtime/work_graph.h"
#include "nn/data.h"
#include "nn/optim.h"
#include "nn/transformer.h"

namespace heddle::nn {

// Runs micro-batches forward and backward and adds the gradients of the SUM of their token losses to the leaves. Returns that sum,
// float64 [], on the model's device. Dividing once by the labels of the whole window, in the update, gives every token the same
// weight however the window was cut: neither a short micro-batch nor a short window counts more.
Tensor add_gradients(const CausalLM& model, std::span<const Batch> micro_batches, Generator* dropout);

// The sum of the losses of a batch's labels, [], with its graph.
Tensor loss_sum(const CausalLM& model, const Batch& batch, Generator* dropout);

// A step whose work has been handed to the device.
struct StartedStep {
  std::int64_t labels = 0;
  std::optional<PendingUpdate> update;  // none if no label carries loss: then nothing is updated
};

// The steps of a run: a window of micro-batches forward and backward, then the update.
//
// Note: Recorded steps
// With train.cuda_graph the steps after the first kPlainSteps are one WorkGraph (Note: Recorded work), which starts the same
// kernels on the same numbers as a plain step: a run has the same bits with it. The batches, the learning rate and the scale of
// the gradient are written to device memory before each start. Dropout is refused: its position in the random stream is an
// argument of kernels, and it moves with every step.
class TrainStep {
 public:
  // The references must outlive the object. Throws heddle::Error for config.cuda_graph without a CUDA device.
  TrainStep(const CausalLM& model, AdamW& optimizer, const TrainConfig& config);

  // Returns as soon as the work is handed to the device. All windows of a run are alike in number and shape of batches.
  // Throws heddle::Error for train.cuda_graph with dropout.
  StartedStep start(std::span<const Batch> window, double learning_rate, Generator& dropout);

 private:
  static constexpr int kPlainSteps = 2;  // make whatever kernels make on first use, and find dropout

  void issue(std::span<const Batch> window, Generator* dropout);
  void start_plain(std::span<const Batch> window, Generator& dropout);
  void start_recorded(std::span<const Batch> window);

  const CausalLM& model_;
  AdamW& optimizer_;
  double max_grad_norm_;
  bool has_graph_;
  int plain_steps_ = 0;
  std::vector<Batch> inputs_;  // on the device: what the graph reads
  std::optional<WorkGraph> graph_;
};

}  // namespace heddle::nn
