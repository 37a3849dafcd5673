#include "autograd/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <queue>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "autograd/grad_mode.h"
#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

// What the engine knows of a node while it waits for its gradients.
struct Pending {
  int dependents = 0;           // nodes of this run that have still to send their gradients here
  std::vector<Tensor> grads;    // one an output
};

using PendingMap = std::unordered_map<Node*, Pending>;

PendingMap count_dependents(Node* root) {
  PendingMap pending;
  pending[root].grads.resize(root->outputs().size());
  std::vector<Node*> stack = {root};
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->edges()) {
      if (!edge) continue;
      const auto [entry, is_new] = pending.try_emplace(edge.node.get());
      ++entry->second.dependents;
      if (!is_new) continue;
      entry->second.grads.resize(edge.node->outputs().size());
      stack.push_back(edge.node.get());
    }
  }
  return pending;
}

bool finite_checks_on() {
  const char* value = std::getenv("HEDDLE_CHECK_FINITE");
  return value != nullptr && std::string_view(value) == "1";
}

void check_finite(std::string_view node, std::string_view what, const Tensor& grad) {
  const std::vector<double> values = grad.to_doubles();
  const auto bad = std::find_if_not(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
  HEDDLE_CHECK(bad == values.end(), node, " backward: the gradient of ", what, ' ', grad.shape(), " holds ", *bad,
               " at flat index ", bad - values.begin());
}

void check_gradient(const Node& node, std::size_t input, const Edge& edge, const Tensor& grad, const AccumulateGrad* leaf) {
  const GradSpec& spec = edge.node->outputs()[static_cast<std::size_t>(edge.slot)];
  const bool dtype_fits = grad.dtype() == spec.dtype || (leaf != nullptr && grad.dtype() == leaf->grad_dtype());
  HEDDLE_CHECK(grad.shape() == spec.shape && dtype_fits && grad.device() == spec.device, node.name(),
               " backward: returned a gradient ", grad.describe(), " for input ", input, ", which is ", spec.dtype, " ",
               spec.shape, " on ", spec.device);
}

// Adds `grad` to what a slot holds; in place when nobody else can see the memory.
void accumulate(Tensor& slot, Tensor grad) {
  if (!slot.defined()) {
    slot = std::move(grad);
    return;
  }
  if (is_only_owner(slot)) {
    slot.add_(grad);
  } else {
    slot = add(slot, grad);
  }
}

struct BySequence {
  bool operator()(const Node* a, const Node* b) const { return a->sequence() < b->sequence(); }
};

// Runs one node and returns the gradients of its inputs.
std::vector<Tensor> run_node(Node& node, const std::vector<Tensor>& grads) {
  const bool any = std::any_of(grads.begin(), grads.end(), [](const Tensor& grad) { return grad.defined(); });
  if (!any) return std::vector<Tensor>(node.edges().size());
  HEDDLE_CHECK(!node.released(), node.name(),
               " backward: its saved tensors were freed by an earlier backward; pass retain_graph to the first one");
  std::vector<Tensor> input_grads = node.backward(grads);
  HEDDLE_CHECK(input_grads.size() == node.edges().size(), node.name(), " backward: returned ", input_grads.size(),
               " gradients for ", node.edges().size(), " inputs");
  return input_grads;
}

}  // namespace

void run_backward(const Tensor& root, const Tensor& gradient, bool retain_graph) {
  const NoGradGuard no_grad;
  const bool finite_checks = finite_checks_on();
  const Edge root_edge = root.gradient_edge();
  PendingMap pending = count_dependents(root_edge.node.get());
  pending[root_edge.node.get()].grads[static_cast<std::size_t>(root_edge.slot)] = gradient;

  std::priority_queue<Node*, std::vector<Node*>, BySequence> ready;
  ready.push(root_edge.node.get());
  while (!ready.empty()) {
    Node& node = *ready.top();
    ready.pop();
    std::vector<Tensor> input_grads;
    {
      // Moved out so that a node holds the last reference to its gradients and may hand them on.
      const std::vector<Tensor> grads = std::move(pending[&node].grads);
      Node::Run run{.is_last = !retain_graph};
      for (const Edge& edge : node.edges()) {
        const bool is_summed = edge && as_accumulate(edge) == nullptr;
        run.gradients_so_far.push_back(is_summed ? &pending[edge.node.get()].grads[static_cast<std::size_t>(edge.slot)] : nullptr);
      }
      node.set_run(std::move(run));
      input_grads = run_node(node, grads);
    }
    for (std::size_t i = 0; i < input_grads.size(); ++i) {
      const Edge& edge = node.edges()[i];
      if (!edge) continue;
      Pending& target = pending[edge.node.get()];
      // A leaf takes each gradient as it comes, so that they are summed in its own precision.
      AccumulateGrad* leaf = as_accumulate(edge);
      if (input_grads[i].defined()) {
        check_gradient(node, i, edge, input_grads[i], leaf);
        if (finite_checks) check_finite(node.name(), concat_text("input ", i), input_grads[i]);
        if (leaf != nullptr) leaf->add(std::move(input_grads[i]));
        else accumulate(target.grads[static_cast<std::size_t>(edge.slot)], std::move(input_grads[i]));
      } else if (finite_checks && leaf != nullptr && leaf->leaf().grad().defined()) {
        check_finite(node.name(), concat_text("input ", i), leaf->leaf().grad());  // written in place by the node
      }
      if (--target.dependents == 0) ready.push(edge.node.get());
    }
    // A leaf's node outlives the run: another graph may share it.
    if (!retain_graph && !node.edges().empty()) node.release();
  }
}

}  // namespace heddle
