#include "autograd/node.h"

#include <atomic>
#include <utility>

#include "autograd/grad_mode.h"

namespace heddle {
namespace {

std::atomic<std::int64_t> g_live_nodes{0};
std::atomic<std::uint64_t> g_next_sequence{0};
thread_local bool t_grad_enabled = true;

}  // namespace

bool grad_enabled() { return t_grad_enabled; }

GradModeGuard::GradModeGuard(bool enabled) : previous_(std::exchange(t_grad_enabled, enabled)) {}

GradModeGuard::~GradModeGuard() { t_grad_enabled = previous_; }

SavedTensor::SavedTensor(std::string_view label, const Tensor& tensor) : label_(label) {
  if (!tensor.defined()) return;
  tensor_ = tensor.detach();
  version_ = tensor.version();
}

Tensor SavedTensor::unpack(std::string_view op) const {
  HEDDLE_CHECK(!tensor_.defined() || tensor_.version() == version_, op, " backward: saved input '", label_, "' ",
               tensor_.shape(), " was modified in place (version ", tensor_.version(), ", saved at ", version_,
               "); clone it before the write");
  return tensor_;
}

Node::Node(std::string_view name) : name_(name), sequence_(g_next_sequence.fetch_add(1)) { g_live_nodes.fetch_add(1); }

// A chain of nodes is released with an explicit stack: letting each node destroy the next would recurse once per op.
Node::~Node() {
  g_live_nodes.fetch_sub(1);
  std::vector<Edge> pending = std::move(edges_);
  while (!pending.empty()) {
    const Edge edge = std::move(pending.back());
    pending.pop_back();
    if (!edge || edge.node.use_count() > 1) continue;
    for (Edge& next : edge.node->edges_) pending.push_back(std::move(next));
    edge.node->edges_.clear();
  }
}

void Node::release() {
  saved_.clear();
  released_ = true;
}

void Node::add_output(const Tensor& output) { outputs_.push_back({output.shape(), output.dtype(), output.device()}); }

std::int64_t Node::live_count() { return g_live_nodes.load(); }

int Node::save(std::string_view label, const Tensor& tensor) {
  saved_.emplace_back(label, tensor);
  return static_cast<int>(saved_.size()) - 1;
}

Tensor Node::saved(int index) const { return saved_[static_cast<std::size_t>(index)].unpack(name_); }

Tensor Node::reusable(int index) const {
  const SavedTensor& candidate = saved_[static_cast<std::size_t>(index)];
  return run_.is_last && is_only_owner(candidate.tensor()) ? candidate.unpack(name_) : Tensor();
}

Tensor Node::take_gradient_so_far(int index) {
  Tensor* slot = run_.gradients_so_far[static_cast<std::size_t>(index)];
  if (slot == nullptr || !slot->defined() || !is_only_owner(*slot)) return {};
  return std::exchange(*slot, Tensor());
}

bool is_only_owner(const Tensor& tensor) {
  return tensor.impl_ptr().use_count() == 1 && tensor.storage().use_count() == 1 && tensor.is_contiguous();
}

AccumulateGrad::AccumulateGrad(const Tensor& leaf) : Node("accumulate_grad"), leaf_(leaf) { add_output(leaf); }

DType AccumulateGrad::grad_dtype() const { return leaf_.impl().meta->grad_dtype; }

AccumulateGrad::Target AccumulateGrad::target() {
  const Tensor grad = leaf_.grad();
  if (grad.defined()) return {grad.mutable_view(), Write::accumulate};
  const Tensor fresh = Tensor::empty(leaf_.shape(), grad_dtype(), leaf_.device());
  leaf_.set_grad(fresh);
  return {fresh.mutable_view(), Write::assign};
}

void AccumulateGrad::add(Tensor incoming) {
  const NoGradGuard no_grad;
  const Tensor grad = leaf_.grad();
  if (grad.defined()) {
    grad.add_(incoming);
    return;
  }
  const bool is_whole = incoming.nbytes() == incoming.storage()->nbytes();
  if (is_only_owner(incoming) && is_whole && incoming.dtype() == grad_dtype()) {
    leaf_.set_grad(incoming);
    return;
  }
  const Tensor copy = Tensor::empty(leaf_.shape(), grad_dtype(), leaf_.device());
  copy.copy_(incoming);
  leaf_.set_grad(copy);
}

std::vector<Tensor> AccumulateGrad::backward(const std::vector<Tensor>& grads) {
  add(grads[0]);
  return {};
}

AccumulateGrad* as_accumulate(const Edge& edge) { return dynamic_cast<AccumulateGrad*>(edge.node.get()); }

bool needs_grad(std::initializer_list<const Tensor*> inputs) {
  if (!grad_enabled()) return false;
  for (const Tensor* input : inputs)
    if (input->defined() && input->requires_grad()) return true;
  return false;
}

bool needs_grad(const std::vector<Tensor>& inputs) {
  if (!grad_enabled()) return false;
  for (const Tensor& input : inputs)
    if (input.defined() && input.requires_grad()) return true;
  return false;
}

namespace {

void attach(const Tensor& output, const std::shared_ptr<Node>& node, int slot) {
  node->add_output(output);
  auto meta = std::make_unique<AutogradMeta>();
  meta->requires_grad = true;
  meta->edge = {node, slot};
  output.impl().meta = std::move(meta);
}

}  // namespace

void record(const Tensor& output, const std::shared_ptr<Node>& node, std::initializer_list<const Tensor*> inputs) {
  std::vector<Edge> edges;
  edges.reserve(inputs.size());
  for (const Tensor* input : inputs) edges.push_back(input->defined() ? input->gradient_edge() : Edge{});
  node->connect(std::move(edges));
  attach(output, node, 0);
}

void record(const std::vector<Tensor>& outputs, const std::shared_ptr<Node>& node, const std::vector<Tensor>& inputs) {
  std::vector<Edge> edges;
  edges.reserve(inputs.size());
  for (const Tensor& input : inputs) edges.push_back(input.defined() ? input.gradient_edge() : Edge{});
  node->connect(std::move(edges));
  int slot = 0;
  for (const Tensor& output : outputs) attach(output, node, slot++);
}

}  // namespace heddle
