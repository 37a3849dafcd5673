// What the bench commands rest on: timed runs, and the check that refuses a wrong attention kernel.

#include <cmath>

#include "autograd/ops.h"
#include "examples/attention_check.h"
#include "examples/bench_timer.h"
#include "kernels/runtime/timing.h"
#include "tests/support/devices.h"
#include "tests/support/error_of.h"

namespace heddle::examples {
namespace {

// Attention of 3 batch entries and 4 heads over 2, whose results are right.
AttentionTensors right_results(DType dtype, bool is_causal, std::int64_t S = 150, std::int64_t D = 16) {
  RandomTable random(dtype, kCpu);
  AttentionTensors t;
  t.q = random.tensor({3, S, 4, D}), t.k = random.tensor({3, S, 2, D}), t.v = random.tensor({3, S, 2, D});
  t.dout = random.tensor({3, S, 4, D});
  t.out = Tensor::empty(t.q.shape(), dtype), t.dq = Tensor::empty(t.q.shape(), dtype);
  t.dk = Tensor::empty(t.k.shape(), dtype), t.dv = Tensor::empty(t.k.shape(), dtype);
  t.lse = Tensor::empty({3, 4, S}, DType::f32);
  t.is_causal = is_causal;
  t.scale = 0.25;
  attention_forward(t.forward_args(), "cpu", device_context(kCpu));
  attention_backward(t.backward_args(), "cpu", device_context(kCpu));
  return t;
}

TEST(AttentionCheck, AcceptsRightResults) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (bool is_causal : {false, true})
      for (std::int64_t S : {1, 64, 150}) {
        const AttentionTensors t = right_results(dtype, is_causal, S);
        EXPECT_EQ(attention_fault(t, AttentionPass::forward), "") << dtype << ' ' << S;
        EXPECT_EQ(attention_fault(t, AttentionPass::backward), "") << dtype << ' ' << S;
      }
}

// One element off by a tenth of the typical size, in the last batch entry, the last head and the last row.
TEST(AttentionCheck, RefusesOneWrongElement) {
  for (Tensor AttentionTensors::*member : {&AttentionTensors::out, &AttentionTensors::dq, &AttentionTensors::dk, &AttentionTensors::dv}) {
    const AttentionTensors t = right_results(DType::f32, true);
    const Tensor& x = t.*member;
    const Tensor last = x.alias({1}, {1}, x.numel() - 1);
    last.fill_(last.item() + 0.1);
    const AttentionPass pass = member == &AttentionTensors::out ? AttentionPass::forward : AttentionPass::backward;
    EXPECT_NE(attention_fault(t, pass), "");
  }
}

TEST(AttentionCheck, RefusesNaN) {
  const AttentionTensors t = right_results(DType::bf16, false);
  t.lse.fill_(std::nan(""));
  EXPECT_EQ(attention_fault(t, AttentionPass::forward).substr(0, 23), "lse of rows 0 to 64 is ");
}

// A kernel that takes the other mask, or forgets the scale, gives results of the right size.
TEST(AttentionCheck, RefusesTheOtherMaskAndAnotherScale) {
  AttentionTensors masked = right_results(DType::bf16, true), scaled = masked;
  masked.is_causal = false;
  scaled.scale = 0.3;
  for (AttentionPass pass : {AttentionPass::forward, AttentionPass::backward}) {
    EXPECT_NE(attention_fault(masked, pass), "");
    EXPECT_NE(attention_fault(scaled, pass), "");
  }
}

TEST(TimeRuns, CallsTheWorkOncePerRun) {
  int calls = 0;
  std::vector<double> seconds{7};
  time_runs({.work = [&] { ++calls; }, .runs = 4, .seconds = seconds}, ExecContext{});
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(seconds.size(), 4u);
  EXPECT_EQ(test::error_of([&] { time_runs({.work = [] {}, .runs = 0, .seconds = seconds}, ExecContext{}); }),
            "time_runs: needs at least one run, got 0");
}

class TimeRunsOnCuda : public test::NeedsCuda<> {};

// A captured call runs when the graph does: twice the runs here, once for each way to launch.
TEST_F(TimeRunsOnCuda, GraphAndStreamBothRunTheWork) {
  const Tensor x = Tensor::zeros({1}, DType::f32, test::kCuda), one = Tensor::full({1}, 1, DType::f32, test::kCuda);
  for (Launch launch : {Launch::stream, Launch::graph}) {
    std::vector<double> seconds;
    time_runs({.work = [&] { x.add_(one); }, .runs = 5, .launch = launch, .seconds = seconds}, device_context(test::kCuda));
    ASSERT_EQ(seconds.size(), 5u);
    for (double value : seconds) EXPECT_GT(value, 0);
  }
  EXPECT_EQ(x.item(), 10);
}

TEST_F(TimeRunsOnCuda, AFailedCaptureLeavesTheStreamUsable) {
  std::vector<double> seconds;
  const auto fail = [] { throw Error("no"); };
  const TimeRunsArgs args{.work = fail, .runs = 2, .launch = Launch::graph, .seconds = seconds};
  EXPECT_EQ(test::error_of([&] { time_runs(args, device_context(test::kCuda)); }), "no");
  EXPECT_EQ(Tensor::full({1}, 3, DType::f32, test::kCuda).item(), 3);
}

}  // namespace
}  // namespace heddle::examples
