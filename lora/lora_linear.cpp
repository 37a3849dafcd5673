#include "lora/lora_linear.h"

#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"

namespace heddle::lora {
namespace {

DType wide_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// From sums of the squares of rows, and what has to be added to them.
Tensor row_norms(const Tensor& weight, const Tensor& added) {
  const NoGradGuard no_grad;
  const Tensor squares = sum(mul(wide(weight), wide(weight)), {1});
  return sqrt(added.defined() ? add(squares, added) : squares);
}

void check_factors(const nn::LinearBase& base, const Tensor& weight, const LoraFactors& factors) {
  const std::int64_t out = base.out_features(), in = base.in_features();
  const auto& [a, b, scale, dropout, magnitude] = factors;
  HEDDLE_CHECK(a.rank() == 2 && a.size(1) == in && b.shape() == (Shape{out, a.size(0)}), "lora: a layer [", out, ", ", in,
               "] needs A [r, ", in, "] and B [", out, ", r], got ", a.shape(), " and ", b.shape());
  HEDDLE_CHECK(!magnitude.defined() || magnitude.shape() == Shape{out}, "lora: the magnitude must be [", out, "], got ", magnitude.shape());
  HEDDLE_CHECK(b.dtype() == a.dtype() && (a.dtype() == weight.dtype() || a.dtype() == wide_dtype(weight.dtype())), "lora: A and B of a ",
               weight.dtype(), " layer must both be ", weight.dtype(), ", or float32 beside a 16-bit layer, got ", a.dtype(), " and ", b.dtype());
  HEDDLE_CHECK(!magnitude.defined() || magnitude.dtype() == wide_dtype(weight.dtype()), "lora: the magnitude of a ", weight.dtype(),
               " layer must be ", wide_dtype(weight.dtype()), ", got ", magnitude.dtype());
  for (const Tensor* factor : {&a, &b, &magnitude})
    HEDDLE_CHECK(!factor->defined() || factor->device() == weight.device(), "lora: the layer is on ", weight.device(), ", a factor on ",
                 factor->device());
  HEDDLE_CHECK(dropout >= 0 && dropout < 1, "lora: dropout must be in [0, 1), got ", dropout);
}

}  // namespace

Tensor wide(const Tensor& x) { return cast(x, wide_dtype(x.dtype())); }

Tensor row_norms(const Tensor& weight) { return row_norms(weight, {}); }

LoraLinear::LoraLinear(std::shared_ptr<nn::LinearBase> base, const LoraFactors& factors, std::shared_ptr<nn::LinearBase> residual)
    : base_(std::move(base)), adapted_(residual != nullptr ? std::move(residual) : base_), factors_(factors) {
  const Tensor weight = base_->dense_weight();
  check_factors(*base_, weight, factors_);
  has_dtype_of_base_ = factors_.a.dtype() == weight.dtype();
  register_child("base_layer", base_);
  register_parameter("lora_A.weight", factors_.a);
  register_parameter("lora_B.weight", factors_.b);
  if (factors_.magnitude.defined()) register_parameter("lora_magnitude_vector", factors_.magnitude);
}

std::optional<nn::LinearBase::Adapter> LoraLinear::adapter() const {
  return Adapter{.term = is_plain() ? term() : LowRank{}, .dropout = active_dropout()};
}

Tensor LoraLinear::forward(const Tensor& x, Generator* dropout) const { return nn::forward_all({this}, x, dropout)[0]; }

Tensor LoraLinear::adapt(const Tensor& result, const Tensor& dropped_x) const {
  if (is_plain()) return result;
  const DType dtype = factors_.a.dtype();
  const auto add_term = [&](const Tensor& product) { return add_low_rank({cast(product, dtype)}, cast(dropped_x, dtype), {term()})[0]; };
  if (!factors_.magnitude.defined()) return cast(add_term(result), result.dtype());

  // DoRA rescales what depends on the weight: not the bias, and of a dropped input the part that it adds. Written as what is added, the
  // start adds zeros.
  const Tensor product = active_dropout() > 0 ? adapted_->forward(dropped_x) : result;
  const Tensor adapted = wide(add_term(product));
  const Tensor without_bias = base_->bias().defined() ? sub(adapted, wide(base_->bias())) : adapted;
  const Tensor gain = div(factors_.magnitude, adapted_norms());
  const Tensor added = add(sub(adapted, wide(product)), mul(without_bias, add_scalar(gain, -1)));
  return cast(add(wide(result), added), result.dtype());
}

Tensor LoraLinear::adapted_norms() const {
  const NoGradGuard no_grad;
  // |W + sBA|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B, row by row; what is added is 0 where B is.
  const Tensor weight = wide(adapted_->dense_weight()), a = wide(factors_.a.detach()), b = wide(factors_.b.detach());
  const Tensor twice = scale(matmul(weight, transpose(a, 0, 1)), 2);                                       // [out, r]
  const Tensor square = scale(matmul(b, matmul(a, transpose(a, 0, 1))), factors_.scale);                   // [out, r]
  const Tensor added = scale(sum(mul(add(twice, square), b), {1}), factors_.scale);                        // [out]
  return row_norms(weight, added);
}

Tensor LoraLinear::dense_weight() const {
  const NoGradGuard no_grad;
  const Tensor own = adapted_->dense_weight();
  Tensor weight = add(wide(own), scale(matmul(wide(factors_.b.detach()), wide(factors_.a.detach())), factors_.scale));
  if (factors_.magnitude.defined()) {
    const Tensor gain = div(factors_.magnitude.detach(), row_norms(weight));  // [out]
    weight = mul(weight, unsqueeze(gain, 1));
  }
  return cast(weight, own.dtype());
}

std::shared_ptr<nn::Linear> LoraLinear::merged() const {
  const auto out = std::make_shared<nn::Linear>(dense_weight(), bias().defined() ? bias().clone() : Tensor());
  out->freeze();
  return out;
}

}  // namespace heddle::lora
