#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/tensor.h"

namespace heddle {

// A tensor kept for backward: geometry and storage without a graph edge, so it cannot form a cycle, and the version it
// had when it was saved.
class SavedTensor {
 public:
  SavedTensor(std::string_view label, const Tensor& tensor);

  // The tensor, outside the graph. Throws if its memory was written since; `op` names the reader.
  Tensor unpack(std::string_view op) const;
  const Tensor& tensor() const { return tensor_; }
  std::string_view label() const { return label_; }

 private:
  std::string_view label_;
  Tensor tensor_;  // detached; undefined if the saved tensor was
  std::uint64_t version_ = 0;
};

// What the engine expects of a gradient: that of the output it belongs to.
struct GradSpec {
  Shape shape;
  DType dtype = DType::f32;
  Device device;
};

// One recorded operation. Subclasses implement `backward` and keep what it needs with save(), called after the forward
// kernel has run.
class Node {
 public:
  explicit Node(std::string_view name);
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // Gradients of the outputs in, gradients of the inputs out: one entry per edge, undefined where not needed or where
  // it was written straight to its destination. An output that received no gradient comes in undefined.
  virtual std::vector<Tensor> backward(const std::vector<Tensor>& grads) = 0;

  // What the node may use up while it runs; set by the engine before every backward.
  struct Run {
    bool is_last = false;                      // nothing will unpack the saved tensors after it
    std::vector<Tensor*> gradients_so_far = {};  // one an edge: where gradients of that input are summed; null for a leaf
  };
  void set_run(Run run) { run_ = std::move(run); }

  // Drops everything saved. Called by the engine after the node ran, unless the graph is retained.
  void release();
  bool released() const { return released_; }

  std::string_view name() const { return name_; }
  std::uint64_t sequence() const { return sequence_; }
  const std::vector<Edge>& edges() const { return edges_; }
  const std::vector<GradSpec>& outputs() const { return outputs_; }

  // Wiring, used by record().
  void connect(std::vector<Edge> edges) { edges_ = std::move(edges); }
  void add_output(const Tensor& output);

  // Nodes alive in the process, for leak tests.
  static std::int64_t live_count();

 protected:
  // Keeps a tensor for backward; returns its index for saved(). `label` must be a string literal.
  int save(std::string_view label, const Tensor& tensor);
  Tensor saved(int index) const;
  // A saved tensor whose memory the node may overwrite, or undefined: it can in the last run, if nobody else holds the memory.
  Tensor reusable(int index) const;
  // The gradient that input `index` has had from other nodes of this run, for a kernel that adds to it: what the node then returns
  // for that input is the sum. Undefined where there is none yet or its memory is shared.
  Tensor take_gradient_so_far(int index);
  // Whether input `index` wants a gradient.
  bool needs(int index) const { return static_cast<bool>(edges_[static_cast<std::size_t>(index)]); }

 private:
  std::string_view name_;
  std::uint64_t sequence_;
  bool released_ = false;
  Run run_;
  std::vector<Edge> edges_;
  std::vector<GradSpec> outputs_;
  std::vector<SavedTensor> saved_;
};

// Adds gradients into a leaf. The buffer is the leaf's own, in its grad_dtype, and is always added to, never replaced.
class AccumulateGrad final : public Node {
 public:
  explicit AccumulateGrad(const Tensor& leaf);
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override;

  // leaf.grad += grad, in the grad_dtype. A dense gradient that nobody else holds becomes the buffer.
  void add(Tensor grad);
  const Tensor& leaf() const { return leaf_; }
  DType grad_dtype() const;
  // The leaf's gradient buffer for a kernel that adds to it directly, and whether it already holds a gradient: if not,
  // its contents are undefined and the kernel assigns.
  struct Target {
    MutView view;
    Write write;
  };
  Target target();

 private:
  Tensor leaf_;
};

// Whether a dense tensor can be overwritten unseen: this handle is the only one on its memory.
bool is_only_owner(const Tensor& tensor);

// The AccumulateGrad behind an edge, or null if the edge leads elsewhere.
AccumulateGrad* as_accumulate(const Edge& edge);

// True when the op must be recorded: recording is on and some input requires a gradient.
bool needs_grad(std::initializer_list<const Tensor*> inputs);
bool needs_grad(const std::vector<Tensor>& inputs);

// Makes `output` the result of `node`, whose edges lead to `inputs` in order.
void record(const Tensor& output, const std::shared_ptr<Node>& node, std::initializer_list<const Tensor*> inputs);
void record(const std::vector<Tensor>& outputs, const std::shared_ptr<Node>& node, const std::vector<Tensor>& inputs);

}  // namespace heddle
