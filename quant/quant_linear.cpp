#include "quant/quant_linear.h"

#include "autograd/node.h"
#include "autograd/ops.h"
#include "autograd/ops/linear_parts.h"

namespace heddle::quant {
namespace {

// Inputs x and bias. The weight takes part in the graph as a constant.
struct QuantLinearNode final : Node {
  QuantLinearNode(const Tensor& x, const QuantizedWeight& weight) : Node("quant_linear"), x_shape_(x.shape()), weight_(weight) {}

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dout = as_rows(grads[0]);  // [rows, out]
    return {needs(0) ? input_gradient(dout) : Tensor(), linear_bias_gradient(edges()[1], dout)};
  }

 private:
  Tensor input_gradient(const Tensor& dout) {
    const Tensor so_far = take_gradient_so_far(0);
    const Tensor dx = so_far.defined() ? so_far : Tensor::empty(x_shape_, dout.dtype(), dout.device());
    quant_gemm({.x = dout.view(),
                .w = weight_.view(),
                .out = as_rows(dx).mutable_view(),
                .of_rows = true,
                .write = so_far.defined() ? Write::accumulate : Write::assign},
               device_context(dout.device()));
    return dx;
  }

  Shape x_shape_;
  QuantizedWeight weight_;
};

}  // namespace

Tensor quant_linear(const Tensor& x, const QuantizedWeight& weight, const Tensor& bias, QuantCompute compute) {
  const std::int64_t out_features = weight.out_features();
  HEDDLE_CHECK(x.rank() >= 1 && x.size(-1) == weight.in_features() && is_floating(x.dtype()) && x.device() == weight.device(),
               "quant_linear: x is ", x.describe(), ", the weight [", out_features, ", ", weight.in_features(), "] on ", weight.device(),
               "; x must be floating, on the same device, and its last size the second of the weight");
  HEDDLE_CHECK(!bias.defined() || (bias.shape() == Shape{out_features} && bias.dtype() == x.dtype()), "quant_linear: bias must be ", x.dtype(),
               " [", out_features, "], got ", bias.describe());
  const Tensor rows = as_rows(x);
  Shape shape = x.shape();
  shape[x.rank() - 1] = out_features;
  const Tensor out = Tensor::empty(shape, x.dtype(), x.device());
  quant_gemm({.x = rows.view(),
              .w = weight.view(),
              .out = as_rows(out).mutable_view(),
              .bias = bias.defined() ? bias.view() : ConstView{},
              .compute = compute},
             device_context(x.device()));
  if (needs_grad({&x, &bias})) record(out, std::make_shared<QuantLinearNode>(x, weight), {&x, &bias});
  return out;
}

QuantLinear::QuantLinear(const QuantizedWeight& weight, const Tensor& bias, DType dtype, QuantCompute compute)
    : weight_(weight), bias_(bias), dtype_(dtype), compute_(compute) {
  if (!bias_.defined()) return;
  const bool was_trainable = bias_.requires_grad();
  register_parameter("bias", bias_);
  bias_.set_requires_grad(was_trainable);
}

Tensor QuantLinear::forward(const Tensor& x, Generator*) const { return quant_linear(x, weight_, bias_, compute_); }

}  // namespace heddle::quant
