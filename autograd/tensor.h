#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autograd/storage.h"
#include "kernels/runtime/view.h"

namespace heddle {

class Node;
class Tensor;

// One input slot of a node: the gradient of this output goes there. Null where no gradient is wanted.
struct Edge {
  std::shared_ptr<Node> node;
  int slot = 0;

  explicit operator bool() const { return node != nullptr; }
};

struct AutogradMeta;

// Shared body of a Tensor. `meta` is null when no gradient is involved.
struct TensorImpl {
  std::shared_ptr<Storage> storage;
  std::int64_t offset = 0;  // in elements, from the start of the storage
  Shape shape;
  Shape strides;  // in elements
  DType dtype = DType::f32;
  std::unique_ptr<AutogradMeta> meta;

  TensorImpl();
  ~TensorImpl();
};

// A handle on an n-dimensional array, cheap to copy. Views (slice, transpose, expand, ...) share storage with their
// base; the differentiable ones are in ops.h. A default-constructed Tensor is undefined.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<TensorImpl> impl) : impl_(std::move(impl)) {}

  // --- Creation. Sizes must be >= 0. Contents of `empty` are undefined. ---
  static Tensor empty(const Shape& shape, DType dtype = DType::f32, Device device = kCpu);
  static Tensor zeros(const Shape& shape, DType dtype = DType::f32, Device device = kCpu);
  static Tensor full(const Shape& shape, double value, DType dtype = DType::f32, Device device = kCpu);
  // Copies host values, in row-major order; values.size() must equal shape.numel(). dtype is that of T.
  template <typename T>
  static Tensor from_vector(const std::vector<T>& values, const Shape& shape, Device device = kCpu);
  static Tensor scalar(double value, DType dtype = DType::f32, Device device = kCpu);  // shape []

  // --- Description ---
  bool defined() const { return impl_ != nullptr; }
  const Shape& shape() const { return impl().shape; }
  const Shape& strides() const { return impl().strides; }
  int rank() const { return impl().shape.rank(); }
  std::int64_t size(int dim) const;  // negative dims count from the end
  std::int64_t numel() const { return impl().shape.numel(); }
  std::int64_t nbytes() const { return numel() * static_cast<std::int64_t>(dtype_size(dtype())); }
  DType dtype() const { return impl().dtype; }
  Device device() const { return impl().storage->device(); }
  bool is_contiguous() const { return view().is_contiguous(); }
  std::uint64_t version() const { return impl().storage->version(); }
  // The storage, for identity: two tensors share memory exactly when their storage is the same object.
  const std::shared_ptr<Storage>& storage() const { return impl().storage; }
  std::int64_t storage_offset() const { return impl().offset; }
  std::string describe() const;  // "float32 [2, 3] on cpu", for error text
  std::string to_string() const;  // description and values

  // --- Memory, for kernels. mutable_view() is the only way to write, and it counts a version. ---
  ConstView view() const;
  MutView mutable_view() const;

  // --- Host copies ---
  template <typename T>
  std::vector<T> to_vector() const;  // row-major; T must match dtype
  std::vector<double> to_doubles() const;  // any dtype, converted
  double item() const;               // the one value of a tensor with numel 1
  Tensor to(Device device) const;    // same tensor if already there; not differentiable

  // --- Autograd ---
  bool requires_grad() const;
  // Only for leaves with a floating dtype. Returns *this.
  Tensor& set_requires_grad(bool value);
  bool is_leaf() const;
  Tensor grad() const;  // undefined until a backward reached this leaf
  void set_grad(const Tensor& grad) const;  // an undefined tensor clears it
  // The dtype in which this leaf's gradient is accumulated; its own unless set (float32 for a bfloat16 weight).
  void set_grad_dtype(DType dtype) const;
  Edge gradient_edge() const;  // where gradients of this tensor go; null if it requires none
  // Runs the graph backwards from this tensor. `gradient` may be left out only when numel is 1. The graph is freed
  // unless retain_graph.
  void backward(const Tensor& gradient = {}, bool retain_graph = false) const;
  Tensor detach() const;  // shares storage and version, outside the graph
  Tensor clone() const;   // a dense copy, outside the graph

  // --- In-place writes. Refused while recording if this tensor, or the source, requires a gradient. ---
  const Tensor& copy_(const Tensor& source) const;  // broadcasts; converts dtype; devices may differ
  const Tensor& add_(const Tensor& other) const;    // broadcasts; dtype of this tensor
  const Tensor& mul_(double factor) const;
  const Tensor& fill_(double value) const;
  const Tensor& zero_() const { return fill_(0.0); }

  // A new handle on the same storage with other geometry; not part of the graph (the view ops in ops.h are).
  Tensor alias(const Shape& shape, const Shape& strides, std::int64_t offset) const;

  TensorImpl& impl() const;
  const std::shared_ptr<TensorImpl>& impl_ptr() const { return impl_; }

 private:
  std::shared_ptr<TensorImpl> impl_;
};

// Gradient state of a tensor. A leaf keeps `grad`; an op's output keeps the edge to the node that made it.
struct AutogradMeta {
  bool requires_grad = false;
  Tensor grad;
  Edge edge;                       // of a non-leaf
  std::weak_ptr<Node> accumulate;  // of a leaf: its AccumulateGrad while some graph refers to it
  DType grad_dtype = DType::f32;
};

}  // namespace heddle
