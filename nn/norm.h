#pragma once

#include "autograd/ops.h"
#include "nn/module.h"

namespace heddle::nn {

// A residual stream. Its value is x + branch: the addition is left to the norm that reads the stream next, which does it on the way.
struct Residual {
  Tensor x;
  Tensor branch = {};  // undefined: nothing is left to add
};

// A normalisation over the last dimension, whose size is `size`.
class Norm : public Module {
 public:
  virtual Tensor forward(const Tensor& x) const = 0;
  // The norm of the stream, whose branch is added to its x.
  Tensor forward(Residual& stream) const;

 private:
  virtual AddNormResult add_forward(const Tensor& x, const Tensor& branch) const = 0;
};

// See layer_norm in autograd/ops.h. weight starts at 1, bias at 0.
class LayerNorm final : public Norm {
 public:
  LayerNorm(std::int64_t size, double eps, const ModuleOptions& options);
  using Norm::forward;
  Tensor forward(const Tensor& x) const override;

 private:
  AddNormResult add_forward(const Tensor& x, const Tensor& branch) const override;

  Tensor weight_;
  Tensor bias_;
  double eps_;
};

// See rms_norm in autograd/ops.h. weight starts at 1.
class RMSNorm final : public Norm {
 public:
  RMSNorm(std::int64_t size, double eps, const ModuleOptions& options);
  using Norm::forward;
  Tensor forward(const Tensor& x) const override;

 private:
  AddNormResult add_forward(const Tensor& x, const Tensor& branch) const override;

  Tensor weight_;
  double eps_;
};

}  // namespace heddle::nn
