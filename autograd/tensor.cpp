#include "autograd/tensor.h"

#include <cmath>
#include <cstring>
#include <sstream>

#include "autograd/engine.h"
#include "autograd/grad_mode.h"
#include "autograd/node.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/runtime/context.h"

namespace heddle {
namespace {

// In-place writes keep no history, so they may not touch anything a graph would need to know about. An element that
// several indices share has no one value to hold.
void check_in_place(const char* op, const Tensor& target, const Tensor* source = nullptr) {
  for (int d = 0; d < target.rank(); ++d)
    HEDDLE_CHECK(target.strides()[d] != 0 || target.shape()[d] <= 1, op, ": the target ", target.shape(),
                 " repeats its elements along dimension ", d, "; clone it before the write");
  if (!grad_enabled()) return;
  HEDDLE_CHECK(!target.requires_grad(), op, ": the target ", target.shape(),
               " requires a gradient; write in place only under NoGradGuard, or use the out-of-place op");
  HEDDLE_CHECK(source == nullptr || !source->requires_grad(), op,
               ": the source requires a gradient, which an in-place write would lose; detach it or use the out-of-place op");
}

// The source of a write: a copy of it when it shares memory with the target under another geometry, where a kernel would
// read elements it has already written.
Tensor readable_source(const Tensor& target, const Tensor& source) {
  if (source.storage() != target.storage()) return source;
  const bool same_view = source.storage_offset() == target.storage_offset() && source.shape() == target.shape() &&
                         source.strides() == target.strides();
  return same_view ? source : source.clone();
}

}  // namespace

TensorImpl::TensorImpl() = default;
TensorImpl::~TensorImpl() = default;

TensorImpl& Tensor::impl() const {
  HEDDLE_CHECK(impl_ != nullptr, "tensor: used before it was given a value");
  return *impl_;
}

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  const std::int64_t numel = checked_numel(shape, "tensor");
  auto impl = std::make_shared<TensorImpl>();
  impl->storage = std::make_shared<Storage>(numel * static_cast<std::int64_t>(dtype_size(dtype)), device);
  impl->shape = shape;
  impl->strides = contiguous_strides(shape);
  impl->dtype = dtype;
  return Tensor(std::move(impl));
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) { return full(shape, 0.0, dtype, device); }

Tensor Tensor::full(const Shape& shape, double value, DType dtype, Device device) {
  const Tensor out = empty(shape, dtype, device);
  out.fill_(value);
  return out;
}

Tensor Tensor::scalar(double value, DType dtype, Device device) { return full({}, value, dtype, device); }

template <typename T>
Tensor Tensor::from_vector(const std::vector<T>& values, const Shape& shape, Device device) {
  HEDDLE_CHECK(static_cast<std::int64_t>(values.size()) == checked_numel(shape, "from_vector"), "from_vector: ", values.size(),
               " values given for shape ", shape);
  const Tensor host = empty(shape, dtype_of<T>(), kCpu);
  T* out = host.mutable_view().as<T>();
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = values[i];
  return host.to(device);
}

std::int64_t Tensor::size(int dim) const { return shape()[normalise_dim(dim, rank(), "size")]; }

std::string Tensor::describe() const {
  return defined() ? concat_text(dtype(), " ", shape(), " on ", device()) : "undefined";
}

std::string Tensor::to_string() const {
  std::ostringstream out;
  out << describe();
  if (!defined()) return out.str();
  constexpr std::size_t kMostPrinted = 64;
  const std::vector<double> values = to_doubles();
  out << " {";
  for (std::size_t i = 0; i < values.size() && i < kMostPrinted; ++i) {
    out << (i > 0 ? ", " : "");
    if (is_floating(dtype())) out << values[i];
    else out << static_cast<std::int64_t>(values[i]);
  }
  if (values.size() > kMostPrinted) out << ", ... (" << values.size() << " values)";
  out << '}';
  return out.str();
}

ConstView Tensor::view() const {
  const TensorImpl& body = impl();
  const auto* base = static_cast<const std::byte*>(body.storage->data());
  const std::int64_t skip = body.offset * static_cast<std::int64_t>(dtype_size(body.dtype));
  return {base == nullptr ? nullptr : base + skip, body.dtype, body.storage->device(), body.shape, body.strides};
}

MutView Tensor::mutable_view() const {
  const ConstView view = this->view();
  impl().storage->bump_version();
  return {const_cast<void*>(view.data), view.dtype, view.device, view.shape, view.strides};
}

template <typename T>
std::vector<T> Tensor::to_vector() const {
  HEDDLE_CHECK(dtype() == dtype_of<T>(), "to_vector: tensor is ", dtype(), ", asked for ", dtype_of<T>());
  const Tensor dense = to(kCpu).clone();
  const T* values = dense.view().as<T>();
  return std::vector<T>(values, values + numel());
}

std::vector<double> Tensor::to_doubles() const {
  const Tensor dense = empty(shape(), DType::f64, kCpu);
  dense.copy_(detach());
  const double* values = dense.view().as<double>();
  return std::vector<double>(values, values + numel());
}

double Tensor::item() const {
  HEDDLE_CHECK(numel() == 1, "item: needs exactly one value, tensor is ", shape());
  return to_doubles()[0];
}

Tensor Tensor::to(Device target) const {
  if (target == device()) return *this;
  const Tensor out = empty(shape(), dtype(), target);
  out.copy_(detach());
  return out;
}

bool Tensor::requires_grad() const { return impl().meta != nullptr && impl().meta->requires_grad; }

Tensor& Tensor::set_requires_grad(bool value) {
  HEDDLE_CHECK(is_leaf(), "set_requires_grad: only a leaf can change it; this tensor is the result of ",
               impl().meta->edge.node->name(), "; detach it first");
  HEDDLE_CHECK(!value || is_floating(dtype()), "set_requires_grad: ", dtype(), " tensors have no gradient");
  if (impl().meta == nullptr) {
    if (!value) return *this;
    impl().meta = std::make_unique<AutogradMeta>();
    impl().meta->grad_dtype = dtype();
  }
  impl().meta->requires_grad = value;
  return *this;
}

bool Tensor::is_leaf() const { return impl().meta == nullptr || !impl().meta->edge; }

Tensor Tensor::grad() const { return impl().meta == nullptr ? Tensor() : impl().meta->grad; }

void Tensor::set_grad(const Tensor& grad) const {
  if (!grad.defined() && impl().meta == nullptr) return;
  HEDDLE_CHECK(impl().meta != nullptr, "set_grad: the tensor ", shape(), " does not require a gradient");
  HEDDLE_CHECK(!grad.defined() || grad.shape() == shape(), "set_grad: gradient ", grad.shape(), " for a tensor ", shape());
  impl().meta->grad = grad;
}

void Tensor::set_grad_dtype(DType grad_dtype) const {
  HEDDLE_CHECK(is_leaf() && impl().meta != nullptr, "set_grad_dtype: needs a leaf that requires a gradient");
  impl().meta->grad_dtype = grad_dtype;
}

Edge Tensor::gradient_edge() const {
  if (!requires_grad()) return {};
  AutogradMeta& meta = *impl().meta;
  if (meta.edge) return meta.edge;
  std::shared_ptr<Node> node = meta.accumulate.lock();
  if (node == nullptr) {
    node = std::make_shared<AccumulateGrad>(*this);
    meta.accumulate = node;
  }
  return {std::move(node), 0};
}

void Tensor::backward(const Tensor& gradient, bool retain_graph) const {
  HEDDLE_CHECK(requires_grad(), "backward: the tensor ", shape(), " does not require a gradient");
  Tensor seed = gradient;
  if (!seed.defined()) {
    HEDDLE_CHECK(numel() == 1, "backward: needs a gradient of shape ", shape(), "; only a single value can do without");
    seed = full(shape(), 1.0, dtype(), device());
  }
  HEDDLE_CHECK(seed.shape() == shape() && seed.dtype() == dtype() && seed.device() == device(),
               "backward: needs a gradient of shape ", shape(), " and dtype ", dtype(), " on ", device(), ", got ",
               seed.describe());
  run_backward(*this, seed.detach(), retain_graph);
}

Tensor Tensor::detach() const { return alias(shape(), strides(), storage_offset()); }

Tensor Tensor::clone() const {
  const Tensor out = empty(shape(), dtype(), device());
  out.copy_(detach());
  return out;
}

Tensor Tensor::alias(const Shape& shape, const Shape& strides, std::int64_t offset) const {
  auto body = std::make_shared<TensorImpl>();
  body->storage = impl().storage;
  body->offset = offset;
  body->shape = shape;
  body->strides = strides;
  body->dtype = dtype();
  return Tensor(std::move(body));
}

const Tensor& Tensor::copy_(const Tensor& source) const {
  check_in_place("copy_", *this, &source);
  // A cross-device copy runs on the CUDA side of the pair.
  const Device where = device().is_cuda() ? device() : source.device();
  copy({.source = readable_source(*this, source).view(), .out = mutable_view(), .write = Write::assign}, device_context(where));
  return *this;
}

const Tensor& Tensor::add_(const Tensor& other) const {
  check_in_place("add_", *this, &other);
  copy({.source = readable_source(*this, other).view(), .out = mutable_view(), .write = Write::accumulate}, device_context(device()));
  return *this;
}

const Tensor& Tensor::mul_(double factor) const {
  check_in_place("mul_", *this);
  const ConstView before = view();
  unary({.op = UnaryOp::scale, .x = before, .out = mutable_view(), .parameter = factor}, device_context(device()));
  return *this;
}

const Tensor& Tensor::fill_(double value) const {
  check_in_place("fill_", *this);
  fill({.out = mutable_view(), .value = value}, device_context(device()));
  return *this;
}

#define HEDDLE_INSTANTIATE(T)                                                                      \
  template Tensor Tensor::from_vector<T>(const std::vector<T>&, const Shape&, Device);              \
  template std::vector<T> Tensor::to_vector<T>() const;
HEDDLE_INSTANTIATE(double)
HEDDLE_INSTANTIATE(float)
HEDDLE_INSTANTIATE(bfloat16)
HEDDLE_INSTANTIATE(float16)
HEDDLE_INSTANTIATE(std::int64_t)
HEDDLE_INSTANTIATE(std::int32_t)
HEDDLE_INSTANTIATE(std::uint8_t)
HEDDLE_INSTANTIATE(bool)
#undef HEDDLE_INSTANTIATE

}  // namespace heddle
