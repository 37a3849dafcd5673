#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/quantize/quant_gemm.h"
#include "nn/linear.h"
#include "quant/quantized_weight.h"

namespace heddle::quant {

// x [..., in] weight^T + bias -> [..., out], computed as `compute` says (kernels/quantize/quant_gemm.h). Differentiable in x and bias; the
// weight is frozen. Gradients come from weights decoded to the dtype of x.
Tensor quant_linear(const Tensor& x, const QuantizedWeight& weight, const Tensor& bias = {}, QuantCompute compute = QuantCompute::wide);

// A Linear layer whose weight is quantised. Its only parameter is the bias, if there is one.
class QuantLinear final : public nn::LinearBase {
 public:
  // `dtype` is that of the layer's inputs and outputs, and of `bias`, which may be undefined. What `compute` leaves open is computed in FP8
  // for FP8 weights where that can be (fp8_products() in kernels/quantize/quant_gemm.h), and else wide. Throws nn::BadValue, naming
  // quantize.compute, where it asks for FP8 that cannot be.
  QuantLinear(const QuantizedWeight& weight, const Tensor& bias, DType dtype, std::optional<QuantCompute> compute = {});

  Tensor forward(const Tensor& x, Generator* dropout = nullptr) const override;
  // Layers in FP8 share what x is rounded to.
  std::vector<Tensor> forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const override;
  std::int64_t in_features() const override { return weight_.in_features(); }
  std::int64_t out_features() const override { return weight_.out_features(); }
  Tensor dense_weight() const override { return weight_.dequantize(dtype_); }

  const QuantizedWeight& weight() const { return weight_; }
  DType dtype() const { return dtype_; }
  QuantCompute compute() const { return compute_; }
  const Tensor& bias() const override { return bias_; }

 private:
  QuantizedWeight weight_;
  Tensor bias_;
  DType dtype_;
  QuantCompute compute_;
};

// Throws nn::BadValue, of the key quantize.compute, unless products of x in `dtype` with such a weight run in FP8 on the device.
void require_fp8_products(const QuantSpec& spec, std::int64_t out_features, std::int64_t in_features, DType dtype, Device device);

// Of a model's quantised layers, what is computed in few bits and what is only stored so: a sentence for each way there is.
std::vector<std::string> describe_products(const nn::Module& model);

}  // namespace heddle::quant
