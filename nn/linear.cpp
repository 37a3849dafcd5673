#include "nn/linear.h"

#include "autograd/ops.h"

namespace heddle::nn {

Linear::Linear(const LinearConfig& config, const ModuleOptions& options, Generator& generator, const Tensor& weight, const Tensor& bias)
    : weight_(weight.defined() ? weight : Tensor::empty({config.out_features, config.in_features}, options.dtype, options.device)) {
  weight_.copy_(normal(weight_.shape(), 0.0, config.initializer_range, generator, options.dtype, options.device));
  register_parameter("weight", weight_);
  if (!config.bias) return;
  bias_ = bias.defined() ? bias : Tensor::empty({config.out_features}, options.dtype, options.device);
  bias_.zero_();
  register_parameter("bias", bias_);
}

Tensor Linear::forward(const Tensor& x, Generator*) const { return linear(x, weight_, bias_); }

}  // namespace heddle::nn
