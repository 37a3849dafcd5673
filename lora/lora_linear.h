#pragma once

#include <memory>
#include <optional>

#include "nn/linear.h"

namespace heddle::lora {

// What a layer is adapted with. A and B have the layer's dtype, or float32 beside a 16-bit layer.
struct LoraFactors {
  Tensor a;               // [r, in]
  Tensor b;               // [out, r]
  double scale = 1;       // alpha / r, or alpha / sqrt(r)
  double dropout = 0;     // of the input of A, in training mode
  Tensor magnitude = {};  // [out]: DoRA's norms of the rows of the adapted weight, float32 beside 16 bits; undefined without
};

// What sums over weights are computed in: float32 for 16 bits, else the dtype itself.
Tensor wide(const Tensor& x);

// The norms of the rows of a weight [out, in], in its wide dtype: the magnitude with which DoRA changes nothing.
Tensor row_norms(const Tensor& weight);

// base(x) + scale * (drop(x) A^T) B^T, BA never being formed. The base is held as it is, dense or quantised, and not written.
//
// With a magnitude m (DoRA; Liu et al. 2024, equations 5 and 11): g * (W x + scale B A x) + bias with g = m / |W + scale B A|, norms of
// rows that gradients do not go through. Dropout then gives base(x) + (g - 1) * W drop(x) + g * scale B A drop(x), as in PEFT.
// Factors in float32 beside a 16-bit layer are applied in float32 and the sum is rounded once; the result has x's dtype. With g = 1 and
// B = 0 it is base(x) bit for bit.
//
// Parameters: base_layer.*, lora_A.weight, lora_B.weight and lora_magnitude_vector.
class LoraLinear final : public nn::LinearBase {
 public:
  // Factors may be shared with other layers. Where a residual is given it takes the base's part in everything computed (PiSSA); it is
  // not among the parameters. Throws heddle::Error if shapes, dtypes or devices do not fit.
  LoraLinear(std::shared_ptr<nn::LinearBase> base, const LoraFactors& factors, std::shared_ptr<nn::LinearBase> residual = nullptr);

  Tensor forward(const Tensor& x, Generator* dropout = nullptr) const override;
  std::int64_t in_features() const override { return base_->in_features(); }
  std::int64_t out_features() const override { return base_->out_features(); }
  // The adapted weight, computed in float32 (float64 for float64) and rounded once to the dtype of the base's.
  Tensor dense_weight() const override;
  const Tensor& bias() const override { return base_->bias(); }
  const nn::LinearBase& base() const override { return *adapted_; }
  std::optional<Adapter> adapter() const override;
  Tensor adapt(const Tensor& result, const Tensor& dropped_x) const override;

  const std::shared_ptr<nn::LinearBase>& base_layer() const { return base_; }
  const LoraFactors& factors() const { return factors_; }

  // A plain, frozen layer of dense_weight() and a copy of the bias, sharing no memory with this one.
  std::shared_ptr<nn::Linear> merged() const;

 private:
  LowRank term() const { return {factors_.a, factors_.b, factors_.scale}; }
  bool is_plain() const { return !factors_.magnitude.defined() && has_dtype_of_base_; }
  double active_dropout() const { return is_training() ? factors_.dropout : 0; }
  Tensor adapted_norms() const;  // [out] of W + scale B A, from products that are no larger than B

  std::shared_ptr<nn::LinearBase> base_;
  std::shared_ptr<nn::LinearBase> adapted_;  // the base, or the residual
  LoraFactors factors_;
  bool has_dtype_of_base_ = true;
};

}  // namespace heddle::lora
