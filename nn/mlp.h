#pragma once

#include "nn/linear.h"
#include "nn/transformer_config.h"

namespace heddle::nn {

struct MlpConfig {
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  Activation activation = Activation::gelu_tanh;
  bool is_gated = false;  // SwiGLU; the activation must be silu
  bool has_bias = false;
  double initializer_range = 0.02;
  double output_range = 0.02;  // initial standard deviation of down_proj
};

// down_proj(act(up_proj(x))), or gated: down_proj(silu(gate_proj(x)) * up_proj(x)).
class Mlp final : public Module {
 public:
  Mlp(const MlpConfig& config, const ModuleOptions& options, Generator& generator);
  // [..., hidden_size] -> the same. `dropout` is for projections that have some.
  Tensor forward(const Tensor& x, Generator* dropout = nullptr) const;

 private:
  std::shared_ptr<LinearBase> gate_proj_;  // null unless gated
  std::shared_ptr<LinearBase> up_proj_;
  std::shared_ptr<LinearBase> down_proj_;
  Activation activation_;
};

}  // namespace heddle::nn
