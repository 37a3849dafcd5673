#include <algorithm>

#include "autograd/ops.h"
#include "autograd/ops/joined.h"
#include "autograd/ops/linear_parts.h"
#include "autograd/ops/param_grad.h"
#include "kernels/gemm/gemm.h"
#include "kernels/reduce/reduce.h"

namespace heddle {
namespace {

struct LinearNode final : Node {
  LinearNode(const Tensor& x, const Tensor& weight) : Node("linear"), x_shape_(x.shape()) {
    if (weight.requires_grad()) x_ = save("x", x);
    if (x.requires_grad()) weight_ = save("weight", weight);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dout = as_rows(grads[0]);  // [rows, out]
    Tensor dx, dweight;
    if (needs(0)) dx = linear_input_gradient(take_gradient_so_far(0), dout, saved(weight_), x_shape_);
    if (needs(1)) dweight = linear_weight_gradient(edges()[1], as_rows(saved(x_)), dout);
    return {dx, dweight, linear_bias_gradient(edges()[2], dout)};
  }

 private:
  Shape x_shape_;
  int x_ = -1, weight_ = -1;
};

// Inputs x, the weights, the biases.
struct LinearsNode final : Node {
  LinearsNode(const Tensor& x, const std::vector<Tensor>& weights) : Node("linears"), x_shape_(x.shape()), count_(weights.size()) {
    for (const Tensor& weight : weights) save("weight", weight);
    if (std::ranges::any_of(weights, &Tensor::requires_grad)) x_ = save("x", x);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    std::vector<Tensor> out(edges().size()), weights, douts;
    const Tensor x = x_ < 0 ? Tensor() : as_rows(saved(x_));
    for (std::size_t i = 0; i < count_; ++i) {
      if (!grads[i].defined()) continue;
      weights.push_back(saved(static_cast<int>(i)));
      douts.push_back(as_rows(grads[i]));
      out[1 + i] = linear_weight_gradient(edges()[1 + i], x, douts.back());
      out[1 + count_ + i] = linear_bias_gradient(edges()[1 + count_ + i], douts.back());
    }
    if (!needs(0)) return out;
    if (const Tensor weight = joined_rows(weights), dout = joined_columns(douts); weight.defined() && dout.defined()) {
      weights = {weight};
      douts = {dout};
    }
    Tensor dx = take_gradient_so_far(0);
    for (std::size_t i = 0; i < weights.size(); ++i) dx = linear_input_gradient(dx, douts[i], weights[i], x_shape_);
    out[0] = dx;
    return out;
  }

 private:
  Shape x_shape_;
  std::size_t count_;
  int x_ = -1;
};

// The results of linears side by side where the layers are joined, else one by one: [rows, out] each.
std::vector<Tensor> linears_rows(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases) {
  const bool have_biases = biases[0].defined();
  const Tensor weight = joined_rows(weights), bias = have_biases ? joined_rows(biases) : Tensor();
  std::vector<Tensor> out;
  if (!weight.defined() || have_biases != bias.defined()) {
    for (std::size_t i = 0; i < weights.size(); ++i) out.push_back(linear_rows(x, weights[i], biases[i]));
    return out;
  }
  const Tensor all = linear_rows(x, weight, bias);
  std::int64_t start = 0;
  for (const Tensor& part : weights) {
    out.push_back(slice(all, 1, start, start + part.size(0)));
    start += part.size(0);
  }
  return out;
}

}  // namespace

Tensor as_rows(const Tensor& x) {
  std::int64_t rows = 1;
  for (int d = 0; d < x.rank() - 1; ++d) rows *= x.shape()[d];
  return reshape(x.detach(), {rows, x.size(-1)});
}

Tensor linear_rows(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor out = Tensor::empty({x.size(0), weight.size(0)}, x.dtype(), x.device());
  gemm({.a = x.view(),
        .b = transpose(weight.detach(), 0, 1).view(),
        .c = out.mutable_view(),
        .bias = bias.defined() ? bias.view() : ConstView{}},
       device_context(x.device()));
  return out;
}

void check_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  HEDDLE_CHECK(weight.rank() == 2 && x.rank() >= 1 && x.size(-1) == weight.size(1), op, ": x ", x.shape(), " does not fit weight ",
               weight.shape(), "; the last size of x must be the second of weight");
  HEDDLE_CHECK(x.dtype() == weight.dtype() && x.device() == weight.device(), op, ": x is ", x.describe(), ", weight is ",
               weight.describe(), "; cast or move one");
  HEDDLE_CHECK(!bias.defined() || (bias.shape() == Shape{weight.size(0)} && bias.dtype() == x.dtype()), op, ": bias must be ",
               x.dtype(), " [", weight.size(0), "], got ", bias.describe());
}

Tensor linear_input_gradient(Tensor so_far, const Tensor& dout, const Tensor& weight, const Shape& x_shape) {
  const Write write = so_far.defined() ? Write::accumulate : Write::assign;
  const Tensor dx = so_far.defined() ? so_far : Tensor::empty(x_shape, dout.dtype(), dout.device());
  gemm({.a = dout.view(), .b = weight.view(), .c = as_rows(dx).mutable_view(), .write = write}, device_context(dout.device()));
  return dx;
}

Tensor linear_weight_gradient(const Edge& edge, const Tensor& x, const Tensor& dout, double scale) {
  if (!edge) return {};
  const ParamGrad dweight(edge, {dout.size(1), x.size(1)}, dout.dtype(), dout.device());
  gemm({.a = transpose(dout, 0, 1).view(), .b = x.view(), .c = dweight.view, .write = dweight.write, .scale = scale},
       device_context(x.device()));
  return dweight.returned;
}

Tensor linear_bias_gradient(const Edge& edge, const Tensor& dout) {
  if (!edge) return {};
  const ParamGrad dbias(edge, {dout.size(1)}, dout.dtype(), dout.device());
  const MutView row = {dbias.view.data, dbias.view.dtype, dbias.view.device, {1, dout.size(1)}, {0, dbias.view.strides[0]}};
  sum({.x = dout.view(), .out = row, .write = dbias.write}, device_context(dout.device()));
  return dbias.returned;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_linear("linear", x, weight, bias);
  Shape shape = x.shape();
  shape[x.rank() - 1] = weight.size(0);
  const Tensor out = reshape(linear_rows(as_rows(x), weight, bias), shape);
  if (needs_grad({&x, &weight, &bias})) record(out, std::make_shared<LinearNode>(x, weight), {&x, &weight, &bias});
  return out;
}

std::vector<Tensor> linears(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases) {
  HEDDLE_CHECK(!weights.empty() && weights.size() == biases.size(), "linears: needs as many biases as weights and at least one, got ",
               biases.size(), " and ", weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) check_linear("linears", x, weights[i], biases[i]);
  std::vector<Tensor> out = linears_rows(as_rows(x), weights, biases);
  for (Tensor& result : out) {
    Shape shape = x.shape();
    shape[x.rank() - 1] = result.size(1);
    result = reshape(result, shape);
  }
  std::vector<Tensor> inputs = {x};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  inputs.insert(inputs.end(), biases.begin(), biases.end());
  if (needs_grad(inputs)) record(out, std::make_shared<LinearsNode>(x, weights), inputs);
  return out;
}

}  // namespace heddle
