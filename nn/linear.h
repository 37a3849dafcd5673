#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "autograd/ops.h"
#include "nn/module.h"

namespace heddle::nn {

// What attention and MLP layers hold for a projection: a dense layer, one with an adapter, or a quantised one.
class LinearBase : public Module {
 public:
  // x [..., in_features] -> [..., out_features]. In training mode `dropout` draws the masks of a layer that has dropout.
  virtual Tensor forward(const Tensor& x, Generator* dropout = nullptr) const = 0;
  // forward(x, dropout) of layers that share an input, this one being the first of them. A kind of layer whose layers can share work
  // says how; here they are asked one by one.
  virtual std::vector<Tensor> forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const;
  virtual std::int64_t in_features() const = 0;
  virtual std::int64_t out_features() const = 0;
  // The weight [out_features, in_features] in a floating dtype, outside the graph.
  virtual Tensor dense_weight() const = 0;
  virtual const Tensor& bias() const = 0;  // [out_features]; undefined if the layer has none

  // The steps of forward, for forward_all: the result of base(), to which a layer that adapts it adds a low-rank term, and of which
  // adapt() makes the layer's own.
  struct Adapter {
    LowRank term;        // undefined where adapt() does it all
    double dropout = 0;  // of the input of both
  };
  virtual const LinearBase& base() const { return *this; }
  virtual std::optional<Adapter> adapter() const { return std::nullopt; }
  virtual Tensor adapt(const Tensor& result, const Tensor& /*dropped_x*/) const { return result; }
};

struct LinearConfig {
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  bool bias = false;
  double initializer_range = 0.02;
};

// y = x weight^T + bias, weight [out, in] drawn from N(0, initializer_range), bias [out] zero.
class Linear final : public LinearBase {
 public:
  // Where `weight` and `bias` are given, the parameters take their memory (Note: Joined tensors, autograd/ops/joined.h).
  Linear(const LinearConfig& config, const ModuleOptions& options, Generator& generator, const Tensor& weight = {}, const Tensor& bias = {});
  // A layer of these weights; bias may be undefined.
  Linear(const Tensor& weight, const Tensor& bias);

  Tensor forward(const Tensor& x, Generator* dropout = nullptr) const override;
  std::vector<Tensor> forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const override;
  std::int64_t in_features() const override { return weight_.size(1); }
  std::int64_t out_features() const override { return weight_.size(0); }
  Tensor dense_weight() const override { return weight_.detach(); }

  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const override { return bias_; }

 private:
  Tensor weight_;
  Tensor bias_;
};

// layer->forward(x, dropout) of every layer. Layers that share an input share work: those under adapters go together, where plain ones
// whose weights lie one after another in memory are one product (Note: Joined tensors, autograd/ops/joined.h), low-rank terms are added
// together, and all adapters see one dropout mask.
std::vector<Tensor> forward_all(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout = nullptr);

}  // namespace heddle::nn
