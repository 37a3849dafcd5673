#include "kernels/reduce/reduce.h"

#include <array>

#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

// Shape of x with the given dimensions (all when empty) reduced to 1.
Shape reduced_shape(const char* op, const Tensor& x, const std::vector<int>& dims) {
  if (dims.empty()) return Shape::filled(x.rank(), 1);
  Shape shape = x.shape();
  std::array<bool, kMaxRank> seen{};
  for (int dim : dims) {
    const int d = normalise_dim(dim, x.rank(), op);
    HEDDLE_CHECK(!seen[static_cast<std::size_t>(d)], op, ": dimension ", d, " is given twice");
    seen[static_cast<std::size_t>(d)] = true;
    shape[d] = 1;
  }
  return shape;
}

// The shape after the same reduction without keepdim.
Shape dropped_shape(const Tensor& x, const std::vector<int>& dims) {
  Shape shape;
  for (int d = 0; d < x.rank() && !dims.empty(); ++d) {
    bool kept = true;
    for (int dim : dims) kept = kept && normalise_dim(dim, x.rank(), "reduce") != d;
    if (kept) shape.push_back(x.shape()[d]);
  }
  return shape;
}

Tensor keepdim_sum(const Tensor& x, const Shape& shape, double factor) {
  const Tensor out = Tensor::empty(shape, x.dtype(), x.device());
  sum({.x = x.view(), .out = out.mutable_view(), .factor = factor}, device_context(x.device()));
  return out;
}

// The gradient of a sum: dout repeated along the reduced dimensions, without a copy.
struct SumNode final : Node {
  SumNode(std::string_view name, const Tensor& x, const Shape& keepdim, double factor)
      : Node(name), shape_(x.shape()), keepdim_(keepdim), factor_(factor) {}

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dout = factor_ == 1.0 ? grads[0] : scale(grads[0], factor_);
    return {expand(reshape(dout, keepdim_), shape_)};
  }

 private:
  Shape shape_, keepdim_;
  double factor_;
};

Tensor scaled_sum(const char* op, const Tensor& x, const std::vector<int>& dims, bool keepdim, double factor) {
  HEDDLE_CHECK(is_floating(x.dtype()), op, ": needs a floating-point tensor, got ", x.describe());
  const Shape kept = reduced_shape(op, x, dims);
  Tensor out = keepdim_sum(x, kept, factor);
  if (!keepdim) out = reshape(out, dropped_shape(x, dims));
  if (needs_grad({&x})) record(out, std::make_shared<SumNode>(op, x, kept, factor), {&x});
  return out;
}

struct MaxNode final : Node {
  MaxNode(const Tensor& x, const Tensor& index, int dim) : Node("max"), shape_(x.shape()), dim_(dim) { save("index", index); }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor index = saved(0);
    const Tensor dout = reshape(grads[0], index.shape());
    const Tensor dx = Tensor::empty(shape_, dout.dtype(), dout.device());
    max_backward({.dout = dout.view(), .index = index.view(), .dim = dim_, .dx = dx.mutable_view()},
                 device_context(dout.device()));
    return {dx};
  }

 private:
  Shape shape_;
  int dim_;
};

}  // namespace

Tensor sum(const Tensor& x, const std::vector<int>& dims, bool keepdim) { return scaled_sum("sum", x, dims, keepdim, 1.0); }

Tensor mean(const Tensor& x, const std::vector<int>& dims, bool keepdim) {
  const std::int64_t outputs = reduced_shape("mean", x, dims).numel();
  HEDDLE_CHECK(x.numel() > 0 || outputs == 0, "mean: ", x.describe(), " has no elements to average");
  const double count = outputs == 0 ? 1.0 : static_cast<double>(x.numel() / outputs);
  return scaled_sum("mean", x, dims, keepdim, 1.0 / count);
}

Tensor max(const Tensor& x, int dim, bool keepdim) {
  HEDDLE_CHECK(is_floating(x.dtype()), "max: needs a floating-point tensor, got ", x.describe());
  const int d = normalise_dim(dim, x.rank(), "max");
  const Shape kept = reduced_shape("max", x, {d});
  const Tensor index = Tensor::empty(kept, DType::i64, x.device());
  Tensor out = Tensor::empty(kept, x.dtype(), x.device());
  max({.x = x.view(), .dim = d, .out = out.mutable_view(), .index = index.mutable_view()}, device_context(x.device()));
  if (!keepdim) out = reshape(out, dropped_shape(x, {d}));
  if (needs_grad({&x})) record(out, std::make_shared<MaxNode>(x, index, d), {&x});
  return out;
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  HEDDLE_CHECK(broadcast_shapes(shape, x.shape(), "sum_to") == x.shape(), "sum_to: ", shape, " does not broadcast to ", x.shape());
  if (shape == x.shape()) return x.requires_grad() ? x.detach() : x;
  Shape kept = Shape::filled(x.rank() - shape.rank(), 1);
  for (std::int64_t size : shape) kept.push_back(size);
  return reshape(keepdim_sum(x, kept, 1.0), shape);
}

}  // namespace heddle
