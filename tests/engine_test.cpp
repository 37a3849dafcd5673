#include "autograd/engine.h"

#include <gtest/gtest.h>

#include "autograd/grad_mode.h"
#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

Tensor leaf(double value) { return Tensor::scalar(value, DType::f64).set_requires_grad(true); }

TEST(Engine, NodeRunsOnlyAfterAllItsGradientsArrived) {
  const Tensor x = leaf(2.0);
  const Tensor y = scale(x, 3.0);

  add(scale(y, 2.0), scale(y, 5.0)).backward();

  EXPECT_EQ(x.grad().item(), 21.0);  // 3 * (2 + 5); an engine that runs y's node on its first gradient gives 6
}

TEST(Engine, SharedProductsAddUp) {
  const Tensor x = leaf(1.0), a = leaf(1.0);
  const Tensor xa = mul(x, a);

  const Tensor f = add(add(mul(x, xa), mul(mul(x, x), a)), mul(x, xa));  // 3 x^2 a
  f.backward();

  EXPECT_EQ(x.grad().item(), 6.0);
  EXPECT_EQ(a.grad().item(), 3.0);
}

TEST(Engine, ChainOf200000OpsRunsAndIsFreed) {
  constexpr int kLength = 200000;  // recursion in the walk or in the release would overflow an 8 MB stack
  const std::int64_t nodes_before = Node::live_count();
  const Tensor x = leaf(1.0);
  {
    Tensor y = x;
    for (int i = 0; i < kLength; ++i) y = add_scalar(y, 1.0);
    EXPECT_EQ(y.item(), 1.0 + kLength);
    y.backward();
  }

  EXPECT_EQ(x.grad().item(), 1.0);
  EXPECT_EQ(Node::live_count(), nodes_before);
}

}  // namespace
}  // namespace heddle
