#pragma once

#include "kernels/quantize/quant_gemm.h"
#include "nn/linear.h"
#include "quant/quantized_weight.h"

namespace heddle::quant {

// x [..., in] weight^T + bias -> [..., out], the weight decoded a part at a time, or multiplied in FP8 where `compute` asks for it and
// it can be (kernels/quantize/quant_gemm.h). Differentiable in x and bias; the weight is frozen. Gradients come from decoded weights.
Tensor quant_linear(const Tensor& x, const QuantizedWeight& weight, const Tensor& bias = {}, QuantCompute compute = QuantCompute::wide);

// A Linear layer whose weight is quantised. Its only parameter is the bias, if there is one.
class QuantLinear final : public nn::LinearBase {
 public:
  // `dtype` is that of the layer's inputs and outputs, and of `bias`, which may be undefined.
  QuantLinear(const QuantizedWeight& weight, const Tensor& bias, DType dtype, QuantCompute compute = QuantCompute::wide);

  Tensor forward(const Tensor& x, Generator* dropout = nullptr) const override;
  std::int64_t in_features() const override { return weight_.in_features(); }
  std::int64_t out_features() const override { return weight_.out_features(); }
  Tensor dense_weight() const override { return weight_.dequantize(dtype_); }

  const QuantizedWeight& weight() const { return weight_; }
  DType dtype() const { return dtype_; }
  const Tensor& bias() const override { return bias_; }

 private:
  QuantizedWeight weight_;
  Tensor bias_;
  DType dtype_;
  QuantCompute compute_;
};

}  // namespace heddle::quant
