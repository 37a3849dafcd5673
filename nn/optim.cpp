#include "nn/optim.h"

#include <cmath>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "kernels/optimizer/optimizer.h"
#include "nn/config_field.h"

namespace heddle::nn {
namespace {

// Element i of a float64 vector, as a scalar.
Tensor element(const Tensor& vector, std::int64_t i) { return select_index(vector, 0, i); }

}  // namespace

std::string first_nonfinite(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> names;
  GlobalNormArgs args;
  for (const NamedTensor& named : tensors) {
    if (!is_floating(named.tensor.dtype())) continue;
    names.push_back(named.name);
    args.tensors.push_back(named.tensor.view());
  }
  if (names.empty()) return {};
  const Device device = args.tensors.front().device;
  const Tensor norm = Tensor::empty({}, DType::f64, device), index = Tensor::empty({}, DType::f64, device);
  args.out = norm.mutable_view();
  args.first_nonfinite = index.mutable_view();
  global_norm(args, device_context(device));
  const double found = index.item();
  return found < 0 ? std::string() : names[static_cast<std::size_t>(found)];
}

UpdateResult PendingUpdate::result() const {
  UpdateResult out{.grad_norm = grad_scale_ * numbers_.value<double>(0), .loss = numbers_.value<double>(2)};
  out.applied = std::isfinite(out.grad_norm) && std::isfinite(out.loss);
  const double index = numbers_.value<double>(1);
  if (index >= 0) out.nonfinite = names_[static_cast<std::size_t>(index)];
  return out;
}

AdamW::AdamW(std::vector<NamedTensor> parameters, const AdamWOptions& options)
    : options_(options) {
  const Device device = parameters.empty() ? kCpu : parameters.front().tensor.device();
  step_ = Tensor::zeros({}, DType::i64, device);
  rates_ = Tensor::zeros({2}, DType::f64, device);
  numbers_ = Tensor::zeros({3}, DType::f64, device);
  for (NamedTensor& named : parameters) {
    const Tensor& parameter = named.tensor;
    HEDDLE_CHECK(parameter.is_leaf() && parameter.requires_grad() && parameter.is_contiguous(), "adamw: parameter '",
                 named.name, "' must be a dense leaf that requires a gradient");
    const bool is_half = parameter.dtype() == DType::bf16 || parameter.dtype() == DType::f16;
    const double rate_scale = options.rate_scale ? options.rate_scale(named) : 1;
    const Tensor master = is_half ? cast(parameter.detach(), DType::f32) : parameter;
    parameter.set_grad_dtype(master.dtype());
    slots_.push_back({.name = std::move(named.name),
                      .parameter = parameter,
                      .master = master,
                      .exp_avg = Tensor::zeros(parameter.shape(), master.dtype(), parameter.device()),
                      .exp_avg_sq = Tensor::zeros(parameter.shape(), master.dtype(), parameter.device()),
                      .weight_decay = parameter.rank() >= 2 ? options.weight_decay : 0.0,
                      .rate_scale = rate_scale});
  }
}

PendingUpdate AdamW::start_update(const UpdateArgs& args) {
  set_rates(args.learning_rate, args.grad_scale);
  issue_update(args.max_grad_norm, args.loss);
  return pending_update();
}

void AdamW::set_rates(double learning_rate, double grad_scale) {
  grad_scale_ = grad_scale;
  rates_.copy_(Tensor::from_vector<double>({learning_rate, grad_scale}, {2}));
}

void AdamW::issue_update(double max_grad_norm, const Tensor& given_loss) {
  const Tensor norm = element(numbers_, 0), nonfinite = element(numbers_, 1), loss = element(numbers_, 2);
  if (given_loss.defined()) loss.copy_(given_loss);
  else loss.zero_();
  GlobalNormArgs norms{.tensors = {}, .out = norm.mutable_view(), .first_nonfinite = nonfinite.mutable_view()};
  AdamWArgs step{.parameters = {},
                 .beta1 = options_.beta1,
                 .beta2 = options_.beta2,
                 .eps = options_.eps,
                 .max_grad_norm = max_grad_norm,
                 .learning_rate = element(rates_, 0).view(),
                 .grad_scale = element(rates_, 1).view(),
                 .grad_norm = norm.view(),
                 .loss = loss.view(),
                 .step = step_.mutable_view()};
  updated_.clear();
  for (const Slot& slot : slots_) {
    const Tensor grad = slot.parameter.grad();
    if (!grad.defined()) continue;
    updated_.push_back(slot.name);
    norms.tensors.push_back(grad.view());
    step.parameters.push_back({.weight = slot.master.mutable_view(),
                               .grad = grad.view(),
                               .first_moment = slot.exp_avg.mutable_view(),
                               .second_moment = slot.exp_avg_sq.mutable_view(),
                               .rounded = slot.has_master() ? slot.parameter.mutable_view() : MutView{},
                               .weight_decay = slot.weight_decay,
                               .rate_scale = slot.rate_scale});
  }
  ExecContext& context = device_context(numbers_.device());
  global_norm(norms, context);
  adamw(step, context);
}

void AdamW::zero_grad() const {
  for (const Slot& slot : slots_) slot.parameter.set_grad({});
}

void AdamW::count_versions() const {
  for (const Slot& slot : slots_) slot.parameter.mutable_view();
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

}  // namespace heddle::nn
