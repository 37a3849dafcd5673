#include "nn/train_step.h"

#include "autograd/ops.h"
#include "nn/evaluate.h"

namespace heddle::nn {
namespace {

std::int64_t labels_in(std::span<const Batch> window) {
  std::int64_t labels = 0;
  for (const Batch& batch : window) labels += count_labels(batch);
  return labels;
}

}  // namespace

Tensor loss_sum(const CausalLM& model, const Batch& batch, Generator* dropout) {
  const Device device = model.device();
  return cross_entropy(model.forward(batch.input_ids.to(device), dropout), batch.labels.to(device),
                       {.reduction = LossReduction::sum});
}

Tensor add_gradients(const CausalLM& model, std::span<const Batch> micro_batches, Generator* dropout) {
  const Tensor sum = Tensor::zeros({}, DType::f64, model.device());
  for (const Batch& batch : micro_batches) {
    const Tensor loss = loss_sum(model, batch, dropout);
    loss.backward();
    sum.add_(cast(loss.detach(), DType::f64));
  }
  return sum;
}

TrainStep::TrainStep(const CausalLM& model, AdamW& optimizer, const TrainConfig& config)
    : model_(model), optimizer_(optimizer), max_grad_norm_(config.max_grad_norm), has_graph_(config.cuda_graph) {
  HEDDLE_CHECK(!has_graph_ || model.device().is_cuda(), "train.cuda_graph: needs a CUDA device, the model is on ", model.device(),
               "; set it to false");
}

StartedStep TrainStep::start(std::span<const Batch> window, double learning_rate, Generator& dropout) {
  const std::int64_t labels = labels_in(window);
  if (labels == 0) return {};
  optimizer_.set_rates(learning_rate, 1 / static_cast<double>(labels));
  if (has_graph_ && plain_steps_ == kPlainSteps) start_recorded(window);
  else start_plain(window, dropout);
  return {labels, optimizer_.pending_update()};
}

void TrainStep::issue(std::span<const Batch> window, Generator* dropout) {
  optimizer_.issue_update(max_grad_norm_, add_gradients(model_, window, dropout));
  optimizer_.zero_grad();
}

void TrainStep::start_plain(std::span<const Batch> window, Generator& dropout) {
  const std::uint64_t before = dropout.offset;
  issue(window, &dropout);
  if (!has_graph_) return;
  HEDDLE_CHECK(dropout.offset == before, "train.cuda_graph: the model has dropout, whose random numbers change with every step; set it "
               "to false, or the dropout to 0");
  plain_steps_ += 1;
}

void TrainStep::start_recorded(std::span<const Batch> window) {
  if (!graph_) {
    for (const Batch& batch : window) inputs_.push_back({batch.input_ids.to(model_.device()), batch.labels.to(model_.device())});
    optimizer_.count_versions();  // what was made of weights is made anew, and recorded
    graph_.emplace(model_.device(), [this] { issue(inputs_, nullptr); });
  } else {
    HEDDLE_CHECK(window.size() == inputs_.size(), "train.cuda_graph: a step of ", window.size(), " micro-batches after one of ", inputs_.size());
    for (std::size_t i = 0; i < window.size(); ++i) {
      inputs_[i].input_ids.copy_(window[i].input_ids);
      inputs_[i].labels.copy_(window[i].labels);
    }
  }
  graph_->start();
  optimizer_.count_versions();
}

}  // namespace heddle::nn
