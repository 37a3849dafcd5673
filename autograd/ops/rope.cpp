#include "kernels/rope/rope.h"

#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

Tensor turned(const Tensor& x, const Tensor& positions, double theta, bool is_inverse) {
  const Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
  rope({.x = x.view(), .positions = positions.view(), .theta = theta, .is_inverse = is_inverse, .out = out.mutable_view()},
       device_context(x.device()));
  return out;
}

struct RopeNode final : Node {
  RopeNode(const Tensor& positions, double theta) : Node("rope"), theta_(theta) { save("positions", positions); }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    return {turned(grads[0], saved(0), theta_, /*is_inverse=*/true)};
  }

 private:
  double theta_;
};

}  // namespace

Tensor rope(const Tensor& x, const Tensor& positions, double theta) {
  HEDDLE_CHECK(is_floating(x.dtype()), "rope: needs a floating-point tensor, got ", x.describe());
  HEDDLE_CHECK(positions.device() == x.device(), "rope: positions are on ", positions.device(), ", x on ", x.device(), "; move one");
  const Tensor out = turned(x, positions, theta, /*is_inverse=*/false);
  if (needs_grad({&x})) record(out, std::make_shared<RopeNode>(positions, theta), {&x});
  return out;
}

}  // namespace heddle
