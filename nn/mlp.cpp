#include "nn/mlp.h"

#include "autograd/ops.h"

namespace heddle::nn {
namespace {

Tensor activate(Activation activation, const Tensor& x) {
  switch (activation) {
    case Activation::gelu: return gelu(x);
    case Activation::gelu_tanh: return gelu_tanh(x);
    case Activation::silu: return silu(x);
  }
  throw Error("mlp: unknown activation");
}

}  // namespace

Mlp::Mlp(const MlpConfig& config, const ModuleOptions& options, Generator& generator) : activation_(config.activation) {
  HEDDLE_CHECK(!config.is_gated || config.activation == Activation::silu, "mlp: a gated MLP needs the activation silu");
  const LinearConfig up = {config.hidden_size, config.intermediate_size, config.has_bias, config.initializer_range};
  const LinearConfig down = {config.intermediate_size, config.hidden_size, config.has_bias, config.output_range};
  if (config.is_gated) {
    gate_proj_ = std::make_shared<Linear>(up, options, generator);
    register_child("gate_proj", gate_proj_);
  }
  up_proj_ = std::make_shared<Linear>(up, options, generator);
  register_child("up_proj", up_proj_);
  down_proj_ = std::make_shared<Linear>(down, options, generator);
  register_child("down_proj", down_proj_);
}

Tensor Mlp::forward(const Tensor& x, Generator* dropout) const {
  // Two plain layers around a GELU are one op; a slot that holds anything else goes step by step.
  const auto* up_layer = dynamic_cast<const Linear*>(up_proj_.get());
  const auto* down_layer = dynamic_cast<const Linear*>(down_proj_.get());
  if (activation_ == Activation::gelu_tanh && up_layer != nullptr && down_layer != nullptr)
    return gelu_mlp(x, up_layer->weight(), up_layer->bias(), down_layer->weight(), down_layer->bias());
  if (gate_proj_ == nullptr) return down_proj_->forward(activate(activation_, up_proj_->forward(x, dropout)), dropout);
  const std::vector<Tensor> parts = forward_all({gate_proj_.get(), up_proj_.get()}, x, dropout);
  return down_proj_->forward(swiglu(parts[0], parts[1]), dropout);
}

}  // namespace heddle::nn
