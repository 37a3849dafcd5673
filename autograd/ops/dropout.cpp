#include "kernels/dropout/dropout.h"

#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

Tensor masked(const Tensor& x, double p, std::uint64_t seed, std::uint64_t offset) {
  const Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
  dropout({.x = x.view(), .p = p, .seed = seed, .offset = offset, .out = out.mutable_view()}, device_context(x.device()));
  return out;
}

// Keeps the position in the random stream, not the mask: the backward draws the same numbers again.
struct DropoutNode final : Node {
  DropoutNode(double p, std::uint64_t seed, std::uint64_t offset) : Node("dropout"), p_(p), seed_(seed), offset_(offset) {}

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override { return {masked(grads[0], p_, seed_, offset_)}; }

 private:
  double p_;
  std::uint64_t seed_, offset_;
};

}  // namespace

Tensor dropout(const Tensor& x, double p, Generator& generator) {
  HEDDLE_CHECK(is_floating(x.dtype()), "dropout: needs a floating-point tensor, got ", x.describe());
  HEDDLE_CHECK(p >= 0.0 && p < 1.0, "dropout: p must be in [0, 1), got ", p);
  if (p == 0.0) return x;
  const std::uint64_t seed = generator.seed, offset = generator.reserve(x.numel(), 4);
  const Tensor out = masked(x, p, seed, offset);
  if (needs_grad({&x})) record(out, std::make_shared<DropoutNode>(p, seed, offset), {&x});
  return out;
}

}  // namespace heddle
