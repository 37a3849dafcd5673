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

// Inputs x, weight, bias for a layer norm only, and the residual if there is one. Outputs y, and the sum if there is a residual.
struct NormNode final : Node {
  NormNode(NormKind kind, const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool has_residual)
      : Node(name_of(kind)), kind_(kind), has_residual_(has_residual) {
    save("x", x);
    save("weight", weight);
    save("mean", mean);
    save("rstd", rstd);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const std::size_t residual = kind_ == NormKind::layer ? 3 : 2;  // its edge
    const Tensor dsum = has_residual_ ? grads[1] : Tensor();
    std::vector<Tensor> out(edges().size());
    if (grads[0].defined()) run(grads[0], dsum, residual, out);
    else out[0] = dsum;
    if (has_residual_) out[residual] = out[0];
    return out;
  }

 private:
  bool wants_dx(std::size_t residual) const { return needs(0) || (has_residual_ && needs(static_cast<int>(residual))); }

  void run(const Tensor& dy, const Tensor& dsum, std::size_t residual, std::vector<Tensor>& out) const {
    const Tensor x = saved(0), weight = saved(1), mean = saved(2), rstd = saved(3);
    const Tensor rows = as_rows(x), dout = as_rows(dy), added = dsum.defined() ? as_rows(dsum) : Tensor();
    const Shape vector = {x.size(-1)};
    Tensor dx;
    if (wants_dx(residual)) dx = Tensor::empty(rows.shape(), x.dtype(), x.device());
    const ParamGrad dweight(edges()[1], vector, x.dtype(), x.device());
    const ParamGrad dbias(kind_ == NormKind::layer ? edges()[2] : Edge{}, vector, x.dtype(), x.device());
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
                   .write_dbias = dbias.write,
                   .dsum = view_or_none(added)},
                  device_context(x.device()));
    if (dx.defined()) out[0] = reshape(dx, x.shape());
    out[1] = dweight.returned;
    if (kind_ == NormKind::layer) out[2] = dbias.returned;
  }

  NormKind kind_;
  bool has_residual_;
};

void check_vector(NormKind kind, const char* what, const Tensor& x, const Tensor& vector) {
  if (!vector.defined()) return;
  HEDDLE_CHECK(vector.shape() == Shape{x.size(-1)} && vector.dtype() == x.dtype() && vector.device() == x.device(), name_of(kind),
               ": ", what, " must be ", x.dtype(), " [", x.size(-1), "] on ", x.device(), ", got ", vector.describe());
}

// With a defined residual, sum and y of the sum; else y alone.
AddNormResult norm_op(NormKind kind, const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias, double eps) {
  HEDDLE_CHECK(is_floating(x.dtype()) && x.rank() >= 1 && x.size(-1) >= 1, name_of(kind),
               ": needs a floating-point tensor whose last dimension is at least 1, got ", x.describe());
  check_vector(kind, "weight", x, weight);
  check_vector(kind, "bias", x, bias);
  HEDDLE_CHECK(!residual.defined() || (residual.shape() == x.shape() && residual.dtype() == x.dtype() && residual.device() == x.device()),
               name_of(kind), ": the residual must be ", x.describe(), " like x, got ", residual.describe());
  const Tensor rows = as_rows(x), added = residual.defined() ? as_rows(residual) : Tensor();
  const DType wide = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  const Tensor sum = residual.defined() ? Tensor::empty(x.shape(), x.dtype(), x.device()) : Tensor();
  const Tensor rstd = Tensor::empty({rows.size(0)}, wide, x.device());
  const Tensor mean = kind == NormKind::layer ? Tensor::empty({rows.size(0)}, wide, x.device()) : Tensor();
  norm({.kind = kind,
        .x = rows.view(),
        .weight = view_or_none(weight),
        .bias = view_or_none(bias),
        .eps = eps,
        .out = as_rows(y).mutable_view(),
        .mean = mean.defined() ? mean.mutable_view() : MutView{},
        .rstd = rstd.mutable_view(),
        .residual = view_or_none(added),
        .sum = sum.defined() ? as_rows(sum).mutable_view() : MutView{}},
       device_context(x.device()));
  std::vector<Tensor> inputs = {x, weight}, outputs = {y};
  if (kind == NormKind::layer) inputs.push_back(bias);
  if (residual.defined()) inputs.push_back(residual), outputs.push_back(sum);
  if (needs_grad(inputs))
    record(outputs, std::make_shared<NormNode>(kind, sum.defined() ? sum : x, weight, mean, rstd, residual.defined()), inputs);
  return {sum, y};
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return norm_op(NormKind::layer, x, {}, weight, bias, eps).y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) { return norm_op(NormKind::rms, x, {}, weight, {}, eps).y; }

AddNormResult add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias, double eps) {
  return norm_op(NormKind::layer, x, residual, weight, bias, eps);
}

AddNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  return norm_op(NormKind::rms, x, residual, weight, {}, eps);
}

}  // namespace heddle
