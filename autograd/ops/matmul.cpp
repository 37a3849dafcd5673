#include <algorithm>

#include "autograd/node.h"
#include "autograd/ops.h"
#include "autograd/ops/param_grad.h"
#include "kernels/gemm/gemm.h"
#include "kernels/reduce/reduce.h"

namespace heddle {
namespace {

Tensor product(const Tensor& a, const Tensor& b, const Shape& shape, const Tensor& bias = {}) {
  const Tensor out = Tensor::empty(shape, a.dtype(), a.device());
  gemm({.a = a.view(), .b = b.view(), .c = out.mutable_view(), .bias = bias.defined() ? bias.view() : ConstView{}},
       device_context(a.device()));
  return out;
}

// a [..., M, K] x b [..., K, N] with equal or broadcast batch dimensions, outside the graph.
Tensor batched_product(const Tensor& a, const Tensor& b) {
  const int rank = std::max(a.rank(), b.rank());
  Shape batch_a, batch_b;
  for (int d = 0; d < a.rank() - 2; ++d) batch_a.push_back(a.shape()[d]);
  for (int d = 0; d < b.rank() - 2; ++d) batch_b.push_back(b.shape()[d]);
  Shape shape_a = broadcast_shapes(batch_a, batch_b, "matmul"), shape_b = shape_a, shape_c = shape_a;
  const auto append = [](Shape& shape, std::int64_t rows, std::int64_t cols) {
    shape.push_back(rows);
    shape.push_back(cols);
  };
  append(shape_a, a.size(-2), a.size(-1));
  append(shape_b, b.size(-2), b.size(-1));
  append(shape_c, a.size(-2), b.size(-1));
  HEDDLE_CHECK(shape_c.rank() == rank, "matmul: ranks of ", a.shape(), " and ", b.shape(), " do not fit");
  return product(expand(a.detach(), shape_a), expand(b.detach(), shape_b), shape_c);
}

struct MatmulNode final : Node {
  MatmulNode(const Tensor& a, const Tensor& b) : Node("matmul"), a_shape_(a.shape()), b_shape_(b.shape()) {
    if (b.requires_grad()) a_ = save("a", a);
    if (a.requires_grad()) b_ = save("b", b);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    Tensor da, db;
    if (needs(0)) da = sum_to(batched_product(grads[0], transpose(saved(b_), -2, -1)), a_shape_);
    if (needs(1)) db = sum_to(batched_product(transpose(saved(a_), -2, -1), grads[0]), b_shape_);
    return {da, db};
  }

 private:
  Shape a_shape_, b_shape_;
  int a_ = -1, b_ = -1;
};

// [..., C] as [rows, C], outside the graph.
Tensor as_rows(const Tensor& x) {
  std::int64_t rows = 1;
  for (int d = 0; d < x.rank() - 1; ++d) rows *= x.shape()[d];
  return reshape(x.detach(), {rows, x.size(-1)});
}

struct LinearNode final : Node {
  LinearNode(const Tensor& x, const Tensor& weight) : Node("linear") {
    if (weight.requires_grad()) x_ = save("x", x);
    if (x.requires_grad()) weight_ = save("weight", weight);
    x_shape_ = x.shape();
    weight_shape_ = weight.shape();
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dout = as_rows(grads[0]);  // [rows, out]
    Tensor dx;
    if (needs(0)) dx = input_gradient(dout);
    return {dx, needs(1) ? weight_gradient(dout) : Tensor(), needs(2) ? bias_gradient(dout) : Tensor()};
  }

 private:
  // dx = dout weight, added to what other readers of x have sent.
  Tensor input_gradient(const Tensor& dout) {
    Tensor dx = take_gradient_so_far(0);
    const Write write = dx.defined() ? Write::accumulate : Write::assign;
    if (!dx.defined()) dx = Tensor::empty(x_shape_, dout.dtype(), dout.device());
    const Tensor rows = as_rows(dx);
    gemm({.a = dout.view(), .b = saved(weight_).view(), .c = rows.mutable_view(), .write = write}, device_context(dout.device()));
    return dx;
  }

  // dweight = dout^T x.
  Tensor weight_gradient(const Tensor& dout) const {
    const Tensor x = as_rows(saved(x_));  // [rows, in]
    const ParamGrad dweight(edges()[1], weight_shape_, dout.dtype(), dout.device());
    gemm({.a = transpose(dout, 0, 1).view(), .b = x.view(), .c = dweight.view, .write = dweight.write}, device_context(x.device()));
    return dweight.returned;
  }

  // dbias = sum of the rows of dout.
  Tensor bias_gradient(const Tensor& dout) const {
    const ParamGrad dbias(edges()[2], {dout.size(1)}, dout.dtype(), dout.device());
    const MutView row = {dbias.view.data, dbias.view.dtype, dbias.view.device, {1, dout.size(1)}, {0, dbias.view.strides[0]}};
    sum({.x = dout.view(), .out = row, .write = dbias.write}, device_context(dout.device()));
    return dbias.returned;
  }

  Shape x_shape_, weight_shape_;
  int x_ = -1, weight_ = -1;
};

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  HEDDLE_CHECK(a.rank() >= 2 && b.rank() >= 2, "matmul: both operands need at least 2 dimensions, got ", a.shape(), " and ",
               b.shape());
  HEDDLE_CHECK(a.size(-1) == b.size(-2), "matmul: inner sizes differ, ", a.shape(), " x ", b.shape());
  HEDDLE_CHECK(a.dtype() == b.dtype() && a.device() == b.device(), "matmul: operands differ, ", a.describe(), " and ",
               b.describe(), "; cast or move one");
  const Tensor out = batched_product(a, b);
  if (needs_grad({&a, &b})) record(out, std::make_shared<MatmulNode>(a, b), {&a, &b});
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  HEDDLE_CHECK(weight.rank() == 2 && x.rank() >= 1 && x.size(-1) == weight.size(1), "linear: x ", x.shape(),
               " does not fit weight ", weight.shape(), "; the last size of x must be the second of weight");
  HEDDLE_CHECK(x.dtype() == weight.dtype() && x.device() == weight.device(), "linear: x is ", x.describe(), ", weight is ",
               weight.describe(), "; cast or move one");
  HEDDLE_CHECK(!bias.defined() || (bias.shape() == Shape{weight.size(0)} && bias.dtype() == x.dtype()), "linear: bias must be ",
               x.dtype(), " [", weight.size(0), "], got ", bias.describe());
  const Tensor rows = as_rows(x);
  Shape shape = x.shape();
  shape[x.rank() - 1] = weight.size(0);
  const Tensor flat = product(rows, transpose(weight.detach(), 0, 1), {rows.size(0), weight.size(0)},
                              bias.defined() ? bias.detach() : Tensor());
  const Tensor out = reshape(flat, shape);
  if (needs_grad({&x, &weight, &bias})) record(out, std::make_shared<LinearNode>(x, weight), {&x, &weight, &bias});
  return out;
}

}  // namespace heddle
