#include "kernels/softmax/softmax.h"

#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

constexpr const char* name_of(SoftmaxKind kind) { return kind == SoftmaxKind::softmax ? "softmax" : "log_softmax"; }

struct SoftmaxNode final : Node {
  SoftmaxNode(SoftmaxKind kind, const Tensor& y, int dim) : Node(name_of(kind)), kind_(kind), dim_(dim) { save("output", y); }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor y = saved(0);
    const Tensor dx = Tensor::empty(y.shape(), y.dtype(), y.device());
    softmax_backward({.kind = kind_, .y = y.view(), .dout = grads[0].view(), .dim = dim_, .dx = dx.mutable_view()},
                     device_context(y.device()));
    return {dx};
  }

 private:
  SoftmaxKind kind_;
  int dim_;
};

Tensor softmax_op(SoftmaxKind kind, const Tensor& x, int dim) {
  HEDDLE_CHECK(is_floating(x.dtype()), name_of(kind), ": needs a floating-point tensor, got ", x.describe());
  const int d = normalise_dim(dim, x.rank(), name_of(kind));
  HEDDLE_CHECK(x.size(d) >= 1, name_of(kind), ": dimension ", d, " of ", x.shape(), " has no elements");
  const Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
  softmax({.kind = kind, .x = x.view(), .dim = d, .out = out.mutable_view()}, device_context(x.device()));
  if (needs_grad({&x})) record(out, std::make_shared<SoftmaxNode>(kind, out, d), {&x});
  return out;
}

}  // namespace

Tensor softmax(const Tensor& x, int dim) { return softmax_op(SoftmaxKind::softmax, x, dim); }
Tensor log_softmax(const Tensor& x, int dim) { return softmax_op(SoftmaxKind::log_softmax, x, dim); }

}  // namespace heddle
