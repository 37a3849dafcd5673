#include <algorithm>

#include "autograd/node.h"
#include "autograd/ops.h"
#include "kernels/gemm/gemm.h"

namespace heddle {
namespace {

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
  const Tensor out = Tensor::empty(shape_c, a.dtype(), a.device());
  gemm({.a = expand(a.detach(), shape_a).view(), .b = expand(b.detach(), shape_b).view(), .c = out.mutable_view()},
       device_context(a.device()));
  return out;
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

}  // namespace heddle
