#pragma once

#include "nn/module.h"

namespace heddle::nn {

// A normalisation over the last dimension, whose size is `size`.
class Norm : public Module {
 public:
  virtual Tensor forward(const Tensor& x) const = 0;
};

// See layer_norm in autograd/ops.h. weight starts at 1, bias at 0.
class LayerNorm final : public Norm {
 public:
  LayerNorm(std::int64_t size, double eps, const ModuleOptions& options);
  Tensor forward(const Tensor& x) const override;

 private:
  Tensor weight_;
  Tensor bias_;
  double eps_;
};

// See rms_norm in autograd/ops.h. weight starts at 1.
class RMSNorm final : public Norm {
 public:
  RMSNorm(std::int64_t size, double eps, const ModuleOptions& options);
  Tensor forward(const Tensor& x) const override;

 private:
  Tensor weight_;
  double eps_;
};

}  // namespace heddle::nn
