#include "nn/norm.h"

namespace heddle::nn {

Tensor Norm::forward(Residual& stream) const {
  if (!stream.branch.defined()) return forward(stream.x);
  const AddNormResult result = add_forward(stream.x, stream.branch);
  stream = {result.sum};
  return result.y;
}

LayerNorm::LayerNorm(std::int64_t size, double eps, const ModuleOptions& options)
    : weight_(Tensor::full({size}, 1.0, options.dtype, options.device)),
      bias_(Tensor::zeros({size}, options.dtype, options.device)),
      eps_(eps) {
  register_parameter("weight", weight_);
  register_parameter("bias", bias_);
}

Tensor LayerNorm::forward(const Tensor& x) const { return layer_norm(x, weight_, bias_, eps_); }

AddNormResult LayerNorm::add_forward(const Tensor& x, const Tensor& branch) const {
  return add_layer_norm(x, branch, weight_, bias_, eps_);
}

RMSNorm::RMSNorm(std::int64_t size, double eps, const ModuleOptions& options)
    : weight_(Tensor::full({size}, 1.0, options.dtype, options.device)), eps_(eps) {
  register_parameter("weight", weight_);
}

Tensor RMSNorm::forward(const Tensor& x) const { return rms_norm(x, weight_, eps_); }

AddNormResult RMSNorm::add_forward(const Tensor& x, const Tensor& branch) const { return add_rms_norm(x, branch, weight_, eps_); }

}  // namespace heddle::nn
