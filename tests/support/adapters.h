#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "autograd/grad_mode.h"
#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "lora/adapter.h"

namespace heddle::test {

// A fresh adapter, not attached.
inline lora::Adapter adapt(nn::Module& model, const lora::LoraConfig& config, std::uint64_t seed = 7) {
  Generator generator{seed};
  return lora::Adapter(model, lora::plan_layers(lora::linear_layers(model), config), config, generator);
}

// Values as after training: none is zero.
inline void randomise(const lora::Adapter& adapter, std::uint64_t seed = 5) {
  const NoGradGuard no_grad;
  Generator generator{seed};
  for (const auto& [name, tensor] : adapter.parameters())
    tensor.copy_(normal(tensor.shape(), 0, 0.3, generator, tensor.dtype(), tensor.device()));
}

inline lora::Adapter random_adapter(nn::Module& model, const lora::LoraConfig& config, std::uint64_t seed = 5) {
  lora::Adapter out = adapt(model, config);
  randomise(out, seed);
  return out;
}

// A layer whose weight is no parameter, as a quantised one.
class CodedLinear final : public nn::LinearBase {
 public:
  explicit CodedLinear(const Tensor& weight) : weight_(weight) {}
  Tensor forward(const Tensor& x, Generator* = nullptr) const override { return linear(x, weight_); }
  std::int64_t in_features() const override { return weight_.size(1); }
  std::int64_t out_features() const override { return weight_.size(0); }
  Tensor dense_weight() const override { return weight_; }
  const Tensor& bias() const override { return bias_; }

 private:
  Tensor weight_, bias_;
};

// Against finite differences of a function of leaves that it holds itself.
inline void expect_gradients(const std::function<Tensor()>& fn, const std::vector<Tensor>& leaves) {
  const GradcheckResult result = gradcheck([&](const std::vector<Tensor>&) { return fn(); }, leaves);
  EXPECT_TRUE(result.ok) << result.message;
}

}  // namespace heddle::test
