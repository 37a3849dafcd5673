#include "autograd/ops.h"
#include "autograd/ops/linear_parts.h"
#include "kernels/gemm/gemm.h"

namespace heddle {
namespace {

// The GELU runs inside the products: over the output of the first forward, and over the gradient of the second's input backward.
struct GeluMlpNode final : Node {
  GeluMlpNode(const Tensor& x, const Tensor& up, const Tensor& down, const Tensor& inner, const Tensor& activated)
      : Node("gelu_mlp"), x_shape_(x.shape()) {
    save("up", up);
    save("down", down);
    save("inner", inner);
    if (up.requires_grad()) x_ = save("x", x);
    if (down.requires_grad()) activated_ = save("activated", activated);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dout = as_rows(grads[0]);                                        // [rows, out]
    Tensor dx, up_grad, up_bias_grad, down_grad;
    if (needs(3)) down_grad = linear_weight_gradient(edges()[3], saved(activated_), dout);  // [out, inner]
    const Tensor down_bias_grad = linear_bias_gradient(edges()[4], dout);
    if (needs(0) || needs(1) || needs(2)) {
      const Tensor dinner = inner_gradient(dout);
      if (needs(0)) dx = linear_input_gradient(take_gradient_so_far(0), dinner, saved(0), x_shape_);
      if (needs(1)) up_grad = linear_weight_gradient(edges()[1], as_rows(saved(x_)), dinner);
      up_bias_grad = linear_bias_gradient(edges()[2], dinner);
    }
    return {dx, up_grad, up_bias_grad, down_grad, down_bias_grad};
  }

 private:
  // Of what goes into the GELU, [rows, inner].
  Tensor inner_gradient(const Tensor& dout) const {
    const Tensor inner = saved(2), dinner = Tensor::empty(inner.shape(), inner.dtype(), inner.device());
    gemm({.a = dout.view(), .b = saved(1).view(), .c = dinner.mutable_view(), .dgelu_at = inner.view()}, device_context(dout.device()));
    return dinner;
  }

  Shape x_shape_;
  int x_ = -1, activated_ = -1;
};

}  // namespace

Tensor gelu_mlp(const Tensor& x, const Tensor& up, const Tensor& up_bias, const Tensor& down, const Tensor& down_bias) {
  check_linear("gelu_mlp", x, up, up_bias);
  const Tensor rows = as_rows(x);
  const Tensor inner = Tensor::empty({rows.size(0), up.size(0)}, x.dtype(), x.device());
  const Tensor activated = Tensor::empty(inner.shape(), x.dtype(), x.device());
  check_linear("gelu_mlp", activated, down, down_bias);
  gemm({.a = rows.view(),
        .b = transpose(up.detach(), 0, 1).view(),
        .c = activated.mutable_view(),
        .bias = up_bias.defined() ? up_bias.view() : ConstView{},
        .before_gelu = inner.mutable_view()},
       device_context(x.device()));
  Shape shape = x.shape();
  shape[x.rank() - 1] = down.size(0);
  const Tensor out = reshape(linear_rows(activated, down, down_bias), shape);
  if (needs_grad({&x, &up, &up_bias, &down, &down_bias}))
    record(out, std::make_shared<GeluMlpNode>(x, up, down, inner, activated), {&x, &up, &up_bias, &down, &down_bias});
  return out;
}

}  // namespace heddle
