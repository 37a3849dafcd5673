#include <gtest/gtest.h>

#include "autograd/grad_mode.h"
#include "nn/optim.h"
#include "tests/support/tensors.h"

// Writes to memory that a graph still needs are found by the version counter; writes that a graph could not follow are
// refused.

namespace heddle {
namespace {

using test::error_of;
using test::random_leaf;
using test::random_tensor;

TEST(InPlace, ModifiedSavedTensorIsNamedWithBothVersions) {
  const Tensor a = random_leaf({16, 64}), b = random_tensor({64, 32});
  const Tensor y = matmul(a, b);
  const auto saved_at = b.version();

  b.fill_(0.0);
  const std::string error = error_of([&] { sum(y).backward(); });

  EXPECT_EQ(error, concat_text("matmul backward: saved input 'b' [64, 32] was modified in place (version ", saved_at + 1,
                               ", saved at ", saved_at, "); clone it before the write"));
}

// Every way to reach the same memory.
TEST(InPlace, WriteThroughAnyViewIsSeen) {
  const std::vector<std::pair<const char*, std::function<void(const Tensor&)>>> writes = {
      {"itself", [](const Tensor& x) { x.add_(x); }},
      {"mul_", [](const Tensor& x) { x.mul_(2.0); }},
      {"slice", [](const Tensor& x) { slice(x, 0, 1, 2).fill_(0.0); }},
      {"transpose", [](const Tensor& x) { transpose(x, 0, 1).fill_(0.0); }},
      {"reshape", [](const Tensor& x) { reshape(x, {3, 2}).zero_(); }},
      {"select_index", [](const Tensor& x) { select_index(x, 1, 0).fill_(0.0); }},
      {"split", [](const Tensor& x) { split(x, {1, 1}, 0)[0].copy_(Tensor::zeros({1, 3}, DType::f64)); }},
      {"detach", [](const Tensor& x) { x.detach().add_(Tensor::scalar(1.0, DType::f64)); }},
  };
  for (const auto& [name, write] : writes) {
    SCOPED_TRACE(name);
    const Tensor x = random_tensor({2, 3}), w = random_leaf({2, 3});
    const Tensor y = mul(w, x);

    write(x);

    EXPECT_EQ(error_of([&] { sum(y).backward(); }).substr(0, 52), "mul backward: saved input 'b' [2, 3] was modified in");
  }
}

TEST(InPlace, WriteToTheBaseOfASavedViewIsSeen) {
  const Tensor base = random_tensor({4, 3}), w = random_leaf({2, 3});
  const Tensor y = mul(w, slice(base, 0, 0, 2));

  base.fill_(1.0);

  EXPECT_NE(error_of([&] { sum(y).backward(); }), "no error");
}

TEST(InPlace, OptimiserStepBetweenForwardAndBackwardIsSeen) {
  const Tensor x = random_leaf({4, 3}, 1), w = random_leaf({5, 3}, 2);
  nn::AdamW optimizer({{.name = "w", .tensor = w}}, {});
  w.set_grad(Tensor::full({5, 3}, 1.0, w.dtype()));
  const Tensor y = linear(x, w);

  ASSERT_TRUE(optimizer.update({.learning_rate = 0.1}).applied);

  EXPECT_EQ(error_of([&] { sum(y).backward(); }),
            "linear backward: saved input 'weight' [5, 3] was modified in place (version 2, saved at 1); clone it before the write");
}

TEST(InPlace, ModifiedSavedOutputIsSeen) {
  const Tensor y = exp(random_leaf({3}));

  y.detach().fill_(0.0);

  EXPECT_EQ(error_of([&] { sum(y).backward(); }).substr(0, 54), "exp backward: saved input 'output' [3] was modified in");
}

TEST(InPlace, WriteToATensorThatWasNotSavedIsFine) {
  const Tensor x = random_tensor({3}), w = random_leaf({3});
  const Tensor y = add(w, x);

  x.fill_(0.0);
  sum(y).backward();

  EXPECT_EQ(w.grad().to_doubles(), (std::vector<double>{1, 1, 1}));
}

TEST(InPlace, CloneProtectsTheSavedValue) {
  const Tensor x = Tensor::full({2}, 3.0, DType::f64), w = random_leaf({2});
  const Tensor y = mul(w, x.clone());

  x.fill_(0.0);
  sum(y).backward();

  EXPECT_EQ(w.grad().to_doubles(), (std::vector<double>{3, 3}));
}

TEST(InPlace, TargetThatRequiresAGradientIsRefused) {
  const Tensor w = random_leaf({2}), y = exp(w), one = Tensor::full({2}, 1.0, DType::f64);
  const std::string rest =
      ": the target [2] requires a gradient; write in place only under NoGradGuard, or use the out-of-place op";

  EXPECT_EQ(error_of([&] { w.add_(one); }), "add_" + rest);
  EXPECT_EQ(error_of([&] { w.copy_(one); }), "copy_" + rest);
  EXPECT_EQ(error_of([&] { w.mul_(2.0); }), "mul_" + rest);
  EXPECT_EQ(error_of([&] { w.zero_(); }), "fill_" + rest);
  EXPECT_EQ(error_of([&] { y.add_(one); }), "add_" + rest);
  EXPECT_EQ(error_of([&] { slice(w, 0, 0, 1).mul_(2.0); }),
            "mul_: the target [1] requires a gradient; write in place only under NoGradGuard, or use the out-of-place op");
}

TEST(InPlace, SourceThatRequiresAGradientIsRefused) {
  const Tensor x = Tensor::zeros({2}, DType::f64), w = random_leaf({2});
  const std::string rest =
      ": the source requires a gradient, which an in-place write would lose; detach it or use the out-of-place op";

  EXPECT_EQ(error_of([&] { x.add_(w); }), "add_" + rest);
  EXPECT_EQ(error_of([&] { x.copy_(w); }), "copy_" + rest);
}

TEST(InPlace, RefusedWriteChangesNothing) {
  const Tensor w = Tensor::full({2}, 3.0, DType::f64).set_requires_grad(true);
  const auto version = w.version();

  error_of([&] { w.zero_(); });

  EXPECT_EQ(w.to_doubles(), (std::vector<double>{3, 3}));
  EXPECT_EQ(w.version(), version);
}

TEST(InPlace, AllowedOnALeafUnderNoGrad) {
  const Tensor w = random_leaf({2});
  const NoGradGuard no_grad;

  w.fill_(4.0);

  EXPECT_EQ(w.to_doubles(), (std::vector<double>{4, 4}));
}

}  // namespace
}  // namespace heddle
