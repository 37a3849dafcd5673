#include "autograd/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>

#include "autograd/grad_mode.h"
#include "autograd/node.h"
#include "tests/support/tensors.h"

namespace heddle {
namespace {

using test::error_of;
using test::random_leaf;
using test::random_tensor;

Tensor leaf(double value) { return Tensor::scalar(value, DType::f64).set_requires_grad(true); }

// An identity op whose backward does what the test says.
struct CustomNode final : Node {
  using Backward = std::function<std::vector<Tensor>(const Tensor&)>;
  explicit CustomNode(Backward fn) : Node("custom"), fn_(std::move(fn)) {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override { return fn_(grads[0]); }

 private:
  Backward fn_;
};

Tensor custom(const Tensor& x, CustomNode::Backward backward) {
  const Tensor out = x.clone();
  if (needs_grad({&x})) record(out, std::make_shared<CustomNode>(std::move(backward)), {&x});
  return out;
}

// --- Order and accumulation ---

TEST(Engine, NodeRunsOnlyAfterAllItsGradientsArrived) {
  const Tensor x = leaf(2.0);
  const Tensor y = scale(x, 3.0);

  add(scale(y, 2.0), scale(y, 5.0)).backward();

  EXPECT_EQ(x.grad().item(), 21.0);  // 3 * (2 + 5); an engine that runs y's node on its first gradient gives 6
}

TEST(Engine, DiamondRunsTheSharedNodeOnce) {
  int runs = 0;
  const Tensor x = leaf(2.0);
  const Tensor y = custom(x, [&](const Tensor& dout) { return ++runs, std::vector<Tensor>{dout}; });

  add(mul(y, y), exp(scale(y, 0.0))).backward();

  EXPECT_EQ(runs, 1);
  EXPECT_EQ(x.grad().item(), 4.0);
}

TEST(Engine, SharedProductsAddUp) {
  const Tensor x = leaf(1.0), a = leaf(1.0);
  const Tensor xa = mul(x, a);

  const Tensor f = add(add(mul(x, xa), mul(mul(x, x), a)), mul(x, xa));  // 3 x^2 a
  f.backward();

  EXPECT_EQ(x.grad().item(), 6.0);
  EXPECT_EQ(a.grad().item(), 3.0);
}

TEST(Engine, GradientHandedToTwoInputsIsNotShared) {
  const Tensor a = leaf(1.0), b = leaf(2.0);
  add(a, b).backward();  // both inputs receive the same tensor

  const NoGradGuard no_grad;
  a.grad().fill_(7.0);

  EXPECT_EQ(b.grad().item(), 1.0);
}

TEST(Engine, GivenGradientIsNotTheLeafsBuffer) {
  const Tensor x = leaf(1.0), gradient = Tensor::scalar(2.0, DType::f64);

  x.backward(gradient);
  x.backward(gradient);

  EXPECT_EQ(x.grad().item(), 4.0);
  EXPECT_EQ(gradient.item(), 2.0);
}

TEST(Engine, UnusedInputReceivesNothing) {
  const Tensor used = leaf(2.0), unused = leaf(3.0);
  const std::vector<Tensor> halves = split(random_leaf({4}), {2, 2}, 0);

  add(scale(used, 2.0), sum(halves[0])).backward();

  EXPECT_EQ(used.grad().item(), 2.0);
  EXPECT_FALSE(unused.grad().defined());
}

TEST(Engine, UnusedOutputOfASplitCountsAsZero) {
  const Tensor x = random_leaf({4});

  sum(split(x, {1, 3}, 0)[1]).backward();

  EXPECT_EQ(x.grad().to_doubles(), (std::vector<double>{0, 1, 1, 1}));
}

TEST(Engine, NodeWithoutAnyGradientIsSkippedButItsInputsStillRun) {
  const Tensor x = leaf(2.0);
  const Tensor dead = custom(scale(x, 3.0), [](const Tensor&) { return std::vector<Tensor>{Tensor()}; });

  add(dead, scale(x, 5.0)).backward();

  EXPECT_EQ(x.grad().item(), 5.0);
}

// --- Depth and memory ---

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

TEST(Engine, ChainThatIsNeverRunIsFreedWithoutRecursion) {
  const std::int64_t nodes_before = Node::live_count();
  {
    Tensor y = leaf(1.0);
    for (int i = 0; i < 200000; ++i) y = mul(y, y);
  }

  EXPECT_EQ(Node::live_count(), nodes_before);
}

TEST(Engine, SavedTensorsAreFreedByBackward) {
  const Tensor x = random_leaf({1000});
  const Tensor loss = sum(mul(exp(x), exp(x)));
  const std::int64_t before = memory_stats(kCpu).current_bytes;

  loss.backward();

  // Two saved outputs of exp go, one gradient comes.
  EXPECT_EQ(memory_stats(kCpu).current_bytes, before - 8000);
}

TEST(Engine, NothingIsRecordedWithoutNeed) {
  const std::int64_t nodes_before = Node::live_count();
  const Tensor x = leaf(1.0);
  const NoGradGuard no_grad;

  const Tensor y = exp(mul(x, x));

  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(Node::live_count(), nodes_before);
}

// --- A second backward ---

TEST(Engine, SecondBackwardNamesTheFreedNode) {
  const Tensor x = leaf(2.0);
  const Tensor y = mul(x, x);
  y.backward();

  EXPECT_EQ(error_of([&] { y.backward(); }),
            "mul backward: its saved tensors were freed by an earlier backward; pass retain_graph to the first one");
}

TEST(Engine, SecondLossThroughASharedFreedPartIsRefused) {
  const Tensor t = random_leaf({2, 2}, 1), a = random_leaf({2, 2}, 2), x = random_tensor({2, 2}, DType::f64, 3);
  const Tensor y = matmul(t, a);
  sum(matmul(t, add(x, y))).backward();

  EXPECT_EQ(error_of([&] { sum(matmul(t, add(x, y))).backward(); }),
            "matmul backward: its saved tensors were freed by an earlier backward; pass retain_graph to the first one");
}

TEST(Engine, RetainedGraphGivesTheSameGradientsAgain) {
  const Tensor x = random_leaf({3, 2}, 1), w = random_leaf({4, 2}, 2);
  const Tensor loss = sum(gelu(linear(x, w)));
  loss.backward({}, /*retain_graph=*/true);
  const std::vector<double> dx = x.grad().to_doubles(), dw = w.grad().to_doubles();
  x.set_grad({});
  w.set_grad({});

  loss.backward();

  EXPECT_EQ(x.grad().to_doubles(), dx);
  EXPECT_EQ(w.grad().to_doubles(), dw);
}

// --- Refusals ---

TEST(Engine, NonScalarRootNeedsAGradient) {
  const Tensor y = scale(random_leaf({3}), 2.0);

  EXPECT_EQ(error_of([&] { y.backward(); }),
            "backward: needs a gradient of shape [3]; only a single value can do without");
  EXPECT_EQ(error_of([&] { y.backward(Tensor::zeros({1, 3}, DType::f64)); }),
            "backward: needs a gradient of shape [3] and dtype float64 on cpu, got float64 [1, 3] on cpu");
  EXPECT_EQ(error_of([&] { y.backward(Tensor::zeros({3}, DType::f32)); }),
            "backward: needs a gradient of shape [3] and dtype float64 on cpu, got float32 [3] on cpu");
}

TEST(Engine, TensorWithoutGraphIsRefused) {
  EXPECT_EQ(error_of([] { Tensor::scalar(1.0).backward(); }), "backward: the tensor [] does not require a gradient");
  EXPECT_EQ(error_of([] { Tensor::zeros({2}, DType::i64).set_requires_grad(true); }),
            "set_requires_grad: int64 tensors have no gradient");
}

TEST(Engine, WrongGradientOfACustomNodeIsNamed) {
  const auto message_for = [](const Tensor& wrong) {
    const Tensor y = custom(random_leaf({2, 3}), [&](const Tensor&) { return std::vector<Tensor>{wrong}; });
    return error_of([&] { sum(y).backward(); });
  };

  EXPECT_EQ(message_for(Tensor::zeros({3, 2}, DType::f64)),
            "custom backward: returned a gradient float64 [3, 2] on cpu for input 0, which is float64 [2, 3] on cpu");
  EXPECT_EQ(message_for(Tensor::zeros({2, 3}, DType::f32)),
            "custom backward: returned a gradient float32 [2, 3] on cpu for input 0, which is float64 [2, 3] on cpu");
}

TEST(Engine, WrongNumberOfGradientsIsNamed) {
  const Tensor y = custom(leaf(1.0), [](const Tensor& dout) { return std::vector<Tensor>{dout, dout}; });

  EXPECT_EQ(error_of([&] { y.backward(); }), "custom backward: returned 2 gradients for 1 inputs");
}

// --- Exceptions ---

TEST(Engine, ExceptionInBackwardLeavesTheThreadClean) {
  const std::int64_t nodes_before = Node::live_count();
  const Tensor x = leaf(2.0);
  {
    const Tensor y = custom(scale(x, 3.0), [](const Tensor&) -> std::vector<Tensor> { throw Error("custom: on purpose"); });
    EXPECT_EQ(error_of([&] { y.backward(); }), "custom: on purpose");
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_EQ(Node::live_count(), nodes_before);

  mul(x, x).backward();

  EXPECT_EQ(x.grad().item(), 4.0);
}

TEST(Engine, ExceptionUnderNoGradRestoresRecording) {
  error_of([] {
    const NoGradGuard no_grad;
    throw Error("on purpose");
  });

  EXPECT_TRUE(grad_enabled());
}

TEST(Engine, BackwardInsideNoGradAndNestedBackwardWork) {
  const Tensor inner = leaf(3.0), x = leaf(2.0);
  const Tensor y = custom(x, [&](const Tensor& dout) {
    const GradModeGuard recording(true);
    mul(inner, inner).backward();
    return std::vector<Tensor>{dout};
  });
  {
    const NoGradGuard no_grad;
    y.backward();
  }

  EXPECT_EQ(x.grad().item(), 1.0);
  EXPECT_EQ(inner.grad().item(), 6.0);
}

// --- Finite checks ---

class CheckFinite : public ::testing::Test {
 protected:
  void SetUp() override { setenv("HEDDLE_CHECK_FINITE", "1", 1); }
  void TearDown() override { unsetenv("HEDDLE_CHECK_FINITE"); }
};

TEST_F(CheckFinite, NamesTheNodeThatMadeTheFirstInfinity) {
  const Tensor x = Tensor::from_vector<double>({1.0, 0.0}, {2}).set_requires_grad(true);
  const Tensor y = scale(sum(log(x)), 2.0);

  EXPECT_EQ(error_of([&] { y.backward(); }),
            "log backward: the gradient of input 0 [2] holds inf at flat index 1");
}

TEST_F(CheckFinite, SeesGradientsWrittenStraightIntoALeaf) {
  const Tensor x = Tensor::full({2, 1}, INFINITY, DType::f64), w = random_leaf({1, 1});

  EXPECT_EQ(error_of([&] { sum(linear(x, w)).backward(); }),
            "linear backward: the gradient of input 1 [1, 1] holds inf at flat index 0");
}

TEST(Engine, InfinityPassesWithoutTheCheck) {
  const Tensor x = leaf(0.0);

  log(x).backward();

  EXPECT_EQ(x.grad().item(), INFINITY);
}

// --- Accumulation over several backwards ---

TEST(Engine, LinearAddsToWeightAndBiasAcrossCalls) {
  const Tensor x = random_tensor({3, 2}, DType::f64, 1), w = random_leaf({4, 2}, 2), b = random_leaf({4}, 3);
  sum(linear(x, w, b)).backward();
  const std::vector<double> dw = w.grad().to_doubles(), db = b.grad().to_doubles();

  sum(linear(x, w, b)).backward();

  for (std::size_t i = 0; i < dw.size(); ++i) EXPECT_EQ(w.grad().to_doubles()[i], 2.0 * dw[i]);
  EXPECT_EQ(db, (std::vector<double>{3, 3, 3, 3}));
  EXPECT_EQ(b.grad().to_doubles(), (std::vector<double>{6, 6, 6, 6}));
}

TEST(Engine, SharedParameterOfOneGraphAddsUp) {
  const Tensor x = random_tensor({3, 2}, DType::f64, 1), w = random_leaf({2, 2}, 2);
  const auto loss = [&](const Tensor& first, const Tensor& second) { return sum(linear(linear(x, first), second)); };
  loss(w, w.detach()).backward();
  loss(w.detach(), w).backward();
  const std::vector<double> apart = w.grad().to_doubles();
  // The same terms, six products of three normal numbers an element, added in another order: a few roundings of about 10.
  constexpr double kTolerance = 100 * std::numeric_limits<double>::epsilon();
  w.set_grad({});

  loss(w, w).backward();

  for (std::size_t i = 0; i < apart.size(); ++i) EXPECT_NEAR(w.grad().to_doubles()[i], apart[i], kTolerance);
}

TEST(Engine, MulAddsAcrossCalls) {
  const Tensor x = leaf(3.0);

  mul(x, x).backward();
  mul(x, x).backward();

  EXPECT_EQ(x.grad().item(), 12.0);
}

TEST(Engine, Bfloat16LeafAccumulatesInFloat32) {
  const Tensor w = Tensor::full({1, 1}, 1.0, DType::bf16).set_requires_grad(true);
  const Tensor b = Tensor::full({1}, 1.0, DType::bf16).set_requires_grad(true);
  const Tensor v = Tensor::full({1}, 1.0, DType::bf16).set_requires_grad(true);
  for (const Tensor& parameter : {w, b, v}) parameter.set_grad_dtype(DType::f32);
  const Tensor one = Tensor::full({1, 1}, 1.0, DType::bf16);

  // 257 is the first integer that bfloat16 cannot hold: a bfloat16 sum of ones stops at 256.
  Tensor loss = Tensor::zeros({1, 1}, DType::bf16);
  for (int i = 0; i < 257; ++i) loss = add(loss, mul(linear(one, w, b), v));
  sum(loss).backward();

  for (const Tensor& parameter : {w, b}) {
    EXPECT_EQ(parameter.grad().dtype(), DType::f32);
    EXPECT_EQ(parameter.grad().item(), 257.0);
  }
  EXPECT_EQ(v.grad().item(), 514.0);
}

}  // namespace
}  // namespace heddle
