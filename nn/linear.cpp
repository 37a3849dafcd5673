#include "nn/linear.h"

#include <optional>
#include <utility>

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

Linear::Linear(const Tensor& weight, const Tensor& bias) : weight_(weight), bias_(bias) {
  register_parameter("weight", weight_);
  if (bias_.defined()) register_parameter("bias", bias_);
}

std::vector<Tensor> LinearBase::forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const {
  std::vector<Tensor> out;
  for (const LinearBase* layer : layers) out.push_back(layer->forward(x, dropout));
  return out;
}

Tensor Linear::forward(const Tensor& x, Generator*) const { return linear(x, weight_, bias_); }

std::vector<Tensor> Linear::forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const {
  std::vector<Tensor> weights, biases;
  for (const LinearBase* layer : layers)
    if (const auto* plain = dynamic_cast<const Linear*>(layer); plain != nullptr) {
      weights.push_back(plain->weight());
      biases.push_back(plain->bias());
    }
  return weights.size() == layers.size() ? linears(x, weights, biases) : LinearBase::forward_together(layers, x, dropout);
}

std::vector<Tensor> forward_all(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) {
  std::vector<LowRank> terms;
  std::vector<const LinearBase*> bases;
  std::optional<double> given;
  for (const LinearBase* layer : layers) {
    bases.push_back(&layer->base());
    const std::optional<LinearBase::Adapter> adapter = layer->adapter();
    terms.push_back(adapter ? adapter->term : LowRank{});
    if (!adapter) continue;
    const double p = given.value_or(adapter->dropout);
    HEDDLE_CHECK(adapter->dropout == p, "linear: adapters of one input have dropout ", p, " and ", adapter->dropout, "; they need the same");
    given = p;
  }
  const double p = given.value_or(0);
  HEDDLE_CHECK(p == 0 || dropout != nullptr, "linear: an adapter has dropout; give a generator or call eval()");
  std::vector<Tensor> out = bases[0]->forward_together(bases, x, dropout);
  const Tensor dropped = p > 0 ? heddle::dropout(x, p, *dropout) : x;
  out = add_low_rank(std::move(out), dropped, terms);
  for (std::size_t i = 0; i < layers.size(); ++i) out[i] = layers[i]->adapt(out[i], dropped);
  return out;
}

}  // namespace heddle::nn
