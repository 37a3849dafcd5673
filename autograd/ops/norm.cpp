#include "kernels/norm/norm.h"

#include "autograd/node.h"
#include "autograd/ops.h"
#include "autograd/ops/param_grad.h"

namespace heddle {
namespace {

constexpr const char* name_of(NormKind kind) { return kind == NormKind::layer ? "layer_norm" : "rms_norm"; }

ConstView view_or_none(const Tensor& tensor) { return tensor.defined() ? tensor.view() : ConstView{}; }

// [..., N] as [rows, N], outside the graph.
Tensor as_rows(const Tensor& x) { return reshape(x.detach(), {x.numel() / x.size(-1), x.size(-1)}); }

struct NormNode final : Node {
  NormNode(NormKind kind, const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd)
      : Node(name_of(kind)), kind_(kind) {
    save("x", x);
    save("weight", weight);
    save("mean", mean);
    save("rstd", rstd);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor x = saved(0), weight = saved(1), mean = saved(2), rstd = saved(3);
    const Tensor rows = as_rows(x), dout = as_rows(grads[0]);
    const Shape vector = {x.size(-1)};
    Tensor dx;
    if (needs(0)) dx = Tensor::empty(rows.shape(), x.dtype(), x.device());
    const ParamGrad dweight(edges()[1], vector, x.dtype(), x.device());
    const ParamGrad dbias(edges().size() > 2 ? edges()[2] : Edge{}, vector, x.dtype(), x.device());
    norm_backward({.kind = kind_,
                   .x = rows.view(),
                   .weight = view_or_none(weight),
                   .mean = view_or_none(mean),
                   .rstd = rstd.view(),
                   .dout = dout.view(),
                   .dx = dx.defined() ? dx.mutable_view() : MutView{},
                   .dweight = dweight.view,
                   .write_dweight = dweight.write,
                   .dbias = dbias.view,
                   .write_dbias = dbias.write},
                  device_context(x.device()));
    if (dx.defined()) dx = reshape(dx, x.shape());
    if (kind_ == NormKind::rms) return {dx, dweight.returned};
    return {dx, dweight.returned, dbias.returned};
  }

 private:
  NormKind kind_;
};

void check_vector(NormKind kind, const char* what, const Tensor& x, const Tensor& vector) {
  if (!vector.defined()) return;
  HEDDLE_CHECK(vector.shape() == Shape{x.size(-1)} && vector.dtype() == x.dtype() && vector.device() == x.device(), name_of(kind),
               ": ", what, " must be ", x.dtype(), " [", x.size(-1), "] on ", x.device(), ", got ", vector.describe());
}

Tensor norm_op(NormKind kind, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  HEDDLE_CHECK(is_floating(x.dtype()) && x.rank() >= 1 && x.size(-1) >= 1, name_of(kind),
               ": needs a floating-point tensor whose last dimension is at least 1, got ", x.describe());
  check_vector(kind, "weight", x, weight);
  check_vector(kind, "bias", x, bias);
  const Tensor rows = as_rows(x);
  const DType wide = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
  const Tensor rstd = Tensor::empty({rows.size(0)}, wide, x.device());
  const Tensor mean = kind == NormKind::layer ? Tensor::empty({rows.size(0)}, wide, x.device()) : Tensor();
  norm({.kind = kind,
        .x = rows.view(),
        .weight = view_or_none(weight),
        .bias = view_or_none(bias),
        .eps = eps,
        .out = as_rows(out).mutable_view(),
        .mean = mean.defined() ? mean.mutable_view() : MutView{},
        .rstd = rstd.mutable_view()},
       device_context(x.device()));
  if (needs_grad({&x, &weight, &bias})) {
    const auto node = std::make_shared<NormNode>(kind, x, weight, mean, rstd);
    if (kind == NormKind::layer) record(out, node, {&x, &weight, &bias});
    else record(out, node, {&x, &weight});
  }
  return out;
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return norm_op(NormKind::layer, x, weight, bias, eps);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) { return norm_op(NormKind::rms, x, weight, {}, eps); }

}  // namespace heddle
