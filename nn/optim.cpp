#include "nn/optim.h"

#include <algorithm>
#include <cmath>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "kernels/optimizer/optimizer.h"
#include "nn/config_field.h"

namespace heddle::nn {
namespace {

double norm_of(const std::vector<NamedTensor>& tensors) {
  if (tensors.empty()) return 0;
  const Device device = tensors.front().tensor.device();
  const Tensor norm = Tensor::empty({}, DType::f64, device);
  GlobalNormArgs args{.tensors = {}, .out = norm.mutable_view()};
  for (const NamedTensor& named : tensors) args.tensors.push_back(named.tensor.view());
  global_norm(args, device_context(device));
  return norm.item();
}

void scale_by(const std::vector<NamedTensor>& tensors, double factor) {
  if (factor == 1 || tensors.empty()) return;
  ScaleAllArgs args{.tensors = {}, .factor = factor};
  for (const NamedTensor& named : tensors) args.tensors.push_back(named.tensor.mutable_view());
  scale_all(args, device_context(tensors.front().tensor.device()));
}

}  // namespace

std::string first_nonfinite(const std::vector<NamedTensor>& tensors) {
  for (const NamedTensor& named : tensors)
    if (is_floating(named.tensor.dtype()) && !std::isfinite(norm_of({named}))) return named.name;
  return {};
}

AdamW::AdamW(std::vector<NamedTensor> parameters, const AdamWOptions& options)
    : options_(options), step_(Tensor::zeros({}, DType::i64)) {
  for (NamedTensor& named : parameters) {
    const Tensor& parameter = named.tensor;
    HEDDLE_CHECK(parameter.is_leaf() && parameter.requires_grad() && parameter.is_contiguous(), "adamw: parameter '",
                 named.name, "' must be a dense leaf that requires a gradient");
    const bool is_half = parameter.dtype() == DType::bf16 || parameter.dtype() == DType::f16;
    const Tensor master = is_half ? cast(parameter.detach(), DType::f32) : parameter;
    parameter.set_grad_dtype(master.dtype());
    slots_.push_back({.name = std::move(named.name),
                      .parameter = parameter,
                      .master = master,
                      .exp_avg = Tensor::zeros(parameter.shape(), master.dtype(), parameter.device()),
                      .exp_avg_sq = Tensor::zeros(parameter.shape(), master.dtype(), parameter.device()),
                      .weight_decay = parameter.rank() >= 2 ? options.weight_decay : 0.0});
  }
}

UpdateResult AdamW::update(const UpdateArgs& args) {
  const std::vector<NamedTensor> grads = gradients();
  UpdateResult result{.grad_norm = args.grad_scale * norm_of(grads)};
  if (!std::isfinite(result.grad_norm)) {
    result.nonfinite = first_nonfinite(grads);
    return result;
  }
  const double clip = args.max_grad_norm > 0 ? std::min(1.0, args.max_grad_norm / (result.grad_norm + 1e-6)) : 1.0;
  scale_by(grads, args.grad_scale * clip);

  step_.copy_(Tensor::from_vector<std::int64_t>({updates() + 1}, {}));
  AdamWArgs step{.parameters = {},
                 .learning_rate = args.learning_rate,
                 .beta1 = options_.beta1,
                 .beta2 = options_.beta2,
                 .eps = options_.eps,
                 .step = updates()};
  for (const Slot& slot : slots_) {
    const Tensor grad = slot.parameter.grad();
    if (!grad.defined()) continue;
    step.parameters.push_back({.weight = slot.master.mutable_view(),
                               .grad = grad.view(),
                               .first_moment = slot.exp_avg.mutable_view(),
                               .second_moment = slot.exp_avg_sq.mutable_view(),
                               .rounded = slot.has_master() ? slot.parameter.mutable_view() : MutView{},
                               .weight_decay = slot.weight_decay});
  }
  if (!step.parameters.empty()) adamw(step, device_context(step.parameters.front().weight.device));
  result.applied = true;
  return result;
}

void AdamW::zero_grad() const {
  for (const Slot& slot : slots_) slot.parameter.set_grad({});
}

std::int64_t AdamW::updates() const { return step_.to_vector<std::int64_t>().front(); }

std::string AdamW::describe_groups() const {
  std::int64_t tensors[2] = {}, elements[2] = {};
  for (const Slot& slot : slots_) {
    const int group = slot.parameter.rank() >= 2 ? 0 : 1;
    tensors[group] += 1;
    elements[group] += slot.parameter.numel();
  }
  return concat_text("weight decay ", number_text(options_.weight_decay), ": ", tensors[0], " tensors, ", elements[0],
                     " parameters; no decay: ", tensors[1], " tensors, ", elements[1], " parameters");
}

std::vector<NamedTensor> AdamW::state() const {
  std::vector<NamedTensor> out;
  for (const Slot& slot : slots_) {
    out.push_back({"exp_avg." + slot.name, slot.exp_avg});
    out.push_back({"exp_avg_sq." + slot.name, slot.exp_avg_sq});
    if (slot.has_master()) out.push_back({"master." + slot.name, slot.master});
  }
  out.push_back({"step", step_});
  return out;
}

std::vector<NamedTensor> AdamW::gradients() const {
  std::vector<NamedTensor> out;
  for (const Slot& slot : slots_)
    if (const Tensor grad = slot.parameter.grad(); grad.defined()) out.push_back({slot.name, grad});
  return out;
}

}  // namespace heddle::nn
