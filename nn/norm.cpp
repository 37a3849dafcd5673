#include "nn/norm.h"

#include "autograd/ops.h"

namespace heddle::nn {

LayerNorm::LayerNorm(std::int64_t size, double eps, const ModuleOptions& options)
    : weight_(Tensor::full({size}, 1.0, options.dtype, options.device)),
      bias_(Tensor::zeros({size}, options.dtype, options.device)),
      eps_(eps) {
  register_parameter("weight", weight_);
  register_parameter("bias", bias_);
}

Tensor LayerNorm::forward(const Tensor& x) const { return layer_norm(x, weight_, bias_, eps_); }

RMSNorm::RMSNorm(std::int64_t size, double eps, const ModuleOptions& options)
    : weight_(Tensor::full({size}, 1.0, options.dtype, options.device)), eps_(eps) {
  register_parameter("weight", weight_);
}

Tensor RMSNorm::forward(const Tensor& x) const { return rms_norm(x, weight_, eps_); }

}  // namespace heddle::nn
