// Adding your own differentiable operation to heddle and checking its gradient.
//
// softplus(x) = log(1 + exp(x)), with derivative 1 / (1 + exp(-x)). It is built from existing ops here; an op with a
// kernel of its own differs only in calling that kernel on x.view() and out.mutable_view().

#include <cstdio>

#include "autograd/gradcheck.h"
#include "autograd/node.h"
#include "autograd/ops.h"

namespace {

using namespace heddle;

// The recorded operation: what backward needs, and backward itself. Gradients are first order, so everything in here
// runs outside the graph.
struct SoftplusNode final : Node {
  explicit SoftplusNode(const Tensor& x) : Node("softplus") { save("x", x); }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    // saved() throws if x was written since the forward pass.
    const Tensor denominator = add_scalar(exp(neg(saved(0))), 1.0);
    return {div(grads[0], denominator)};  // one gradient an input, of the input's shape and dtype
  }
};

// The public function: check, compute outside the graph, record.
Tensor softplus(const Tensor& x) {
  HEDDLE_CHECK(is_floating(x.dtype()), "softplus: needs a floating-point tensor, got ", x.describe());
  const Tensor out = log(add_scalar(exp(x.detach()), 1.0));
  if (needs_grad({&x})) record(out, std::make_shared<SoftplusNode>(x), {&x});
  return out;
}

}  // namespace

int main() {
  Generator generator{.seed = 1};
  const Tensor x = normal({3, 4}, 0.0, 2.0, generator, DType::f64).set_requires_grad(true);

  const GradcheckResult result = gradcheck([](const std::vector<Tensor>& inputs) { return softplus(inputs[0]); }, {x});

  std::printf("softplus: worst relative error %.1e, %s\n", result.worst_error, result.ok ? "ok" : result.message.c_str());
  return result.ok ? 0 : 1;
}
