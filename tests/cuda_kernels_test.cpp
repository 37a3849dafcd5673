// The GPU kernels called directly: what the ops cannot reach, and what must hold for any of them.

#include <cmath>
#include <functional>
#include <limits>

#include "autograd/ops.h"
#include "autograd/random.h"
#include "kernels/dropout/dropout.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/gemm.h"
#include "kernels/loss/loss.h"
#include "kernels/norm/norm.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/reduce/reduce.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/host_copy.h"
#include "kernels/runtime/work_graph.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"
#include "tests/support/error_of.h"

namespace heddle::test {
namespace {

class CudaKernels : public NeedsCuda<> {
 protected:
  ExecContext& ctx() { return device_context(kCuda); }
};

Tensor random_values(const Shape& shape, DType dtype, std::uint64_t seed = 1) {
  Generator generator{.seed = seed};
  return uniform(shape, -1, 1, generator, dtype);
}

// A tensor inside a larger one: every second column of it, from the second row on. All of the larger one starts as NaN.
struct Guarded {
  Tensor whole, part;

  Guarded(std::int64_t rows, std::int64_t columns, DType dtype, Device device)
      : whole(Tensor::full({rows + 2, 2 * columns + 1}, std::nan(""), dtype, device)),
        part(whole.alias({rows, columns}, {whole.strides()[0], 2}, whole.strides()[0] + 1)) {}

  // Whether the values of the part are numbers and all others still NaN.
  bool is_exactly_written() const {
    const std::vector<double> values = whole.to_doubles();
    const std::int64_t columns = whole.size(1), rows = whole.size(0);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c) {
        const bool is_part = r > 0 && r + 1 < rows && c % 2 == 1;
        if (std::isnan(values[static_cast<std::size_t>(r * columns + c)]) == is_part) return false;
      }
    return true;
  }
};

TEST_F(CudaKernels, CopyConvertsBetweenAnyTwoTypesAsTheCpuDoes) {
  const DType all[] = {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8, DType::boolean};
  const Tensor source = Tensor::from_vector<double>({0, 1, 2.75, 3, 100, 97.5}, {2, 3});
  for (DType from : all)
    for (DType to : all)
      for (Write write : {Write::assign, Write::accumulate}) {
        const Tensor cpu_source = cast(source, from), gpu_source = cpu_source.to(kCuda);
        const Tensor cpu = cast(Tensor::full({4, 3, 2}, 1.0), to), gpu = cpu.to(kCuda);
        const Tensor cpu_out = transpose(cpu, 1, 2), gpu_out = transpose(gpu, 1, 2);

        copy({.source = cpu_source.view(), .out = cpu_out.mutable_view(), .write = write}, device_context(kCpu));
        copy({.source = gpu_source.view(), .out = gpu_out.mutable_view(), .write = write}, ctx());

        EXPECT_TRUE(all_equal(gpu, cpu.to_doubles())) << from << " to " << to;
      }
}

TEST_F(CudaKernels, CopyAcrossDevicesKeepsStridesAndConverts) {
  const Tensor host = transpose(random_values({5, 7}, DType::f64), 0, 1);
  Guarded device(7, 5, DType::f32, kCuda), back(7, 5, DType::f64, kCpu);

  device.part.copy_(host);
  back.part.copy_(device.part);

  EXPECT_TRUE(all_equal(back.part, cast(host, DType::f32).to_doubles()));
  EXPECT_TRUE(device.is_exactly_written());
  EXPECT_TRUE(back.is_exactly_written());
}

TEST_F(CudaKernels, CopyAcrossDevicesBroadcastsAndAccumulates) {
  const Tensor host = Tensor::from_vector<float>({1, 2, 3}, {3});
  const Tensor device = Tensor::full({2, 3}, 10, DType::f32, kCuda);

  copy({.source = host.view(), .out = device.mutable_view(), .write = Write::accumulate}, ctx());

  EXPECT_TRUE(all_equal(device, {11, 12, 13, 11, 12, 13}));
}

TEST_F(CudaKernels, FillReachesEveryTypeAndNothingElse) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Guarded out(3, 4, dtype, kCuda);
    fill({.out = out.part.mutable_view(), .value = 1.5}, ctx());
    EXPECT_TRUE(all_equal(out.part, std::vector<double>(12, 1.5)));
    EXPECT_TRUE(out.is_exactly_written());
  }
  for (DType dtype : {DType::i64, DType::i32, DType::u8, DType::boolean})
    EXPECT_TRUE(all_equal(Tensor::full({3}, 1, dtype, kCuda), {1, 1, 1}));
}

TEST_F(CudaKernels, StridedOutputsAreWrittenWholeAndNothingAroundThem) {
  const std::int64_t M = 70, N = 45;
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const DType wide = dtype == DType::f64 ? dtype : DType::f32;
    const Tensor x = random_values({M, N}, dtype).to(kCuda), rstd = Tensor::empty({M}, wide, kCuda), mean = Tensor::empty({M}, wide, kCuda);
    Guarded scaled(M, N, dtype, kCuda), summed(1, N, dtype, kCuda), normed(M, N, dtype, kCuda), dx(M, N, dtype, kCuda), dweight(1, N, dtype, kCuda);
    const Tensor dweight_row = select_index(dweight.part, 0, 0);

    unary({.op = UnaryOp::scale, .x = x.view(), .out = scaled.part.mutable_view(), .parameter = 2}, ctx());
    sum({.x = x.view(), .out = summed.part.mutable_view()}, ctx());
    norm({.kind = NormKind::layer, .x = x.view(), .weight = {}, .bias = {}, .eps = 1e-5, .out = normed.part.mutable_view(),
          .mean = mean.mutable_view(), .rstd = rstd.mutable_view()}, ctx());
    norm_backward({.kind = NormKind::layer, .x = x.view(), .weight = {}, .mean = mean.view(), .rstd = rstd.view(), .dout = x.view(),
                   .dx = dx.part.mutable_view(), .dweight = dweight_row.mutable_view(), .dbias = {}}, ctx());

    for (const Guarded* out : {&scaled, &summed, &normed, &dx, &dweight}) EXPECT_TRUE(out->is_exactly_written()) << dtype;
  }
}

TEST_F(CudaKernels, SumOfNothingIsZeroAndSumIntoNothingIsLegal) {
  const Tensor out = Tensor::full({1, 3}, 7, DType::f32, kCuda);
  sum({.x = Tensor::empty({0, 3}, DType::f32, kCuda).view(), .out = out.mutable_view()}, ctx());
  EXPECT_TRUE(all_equal(out, {0, 0, 0}));
  EXPECT_EQ(sum(Tensor::empty({0, 4}, DType::f32, kCuda), {1}).numel(), 0);
}

TEST_F(CudaKernels, RepeatsGiveTheSameBits) {
  const Tensor x = random_values({1000, 300}, DType::f32).to(kCuda);
  const Tensor weight = random_values({300, 64}, DType::f32, 2).to(kCuda);
  std::vector<std::int64_t> ids(1000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * i % 17);
  const Tensor id_tensor = Tensor::from_vector(ids, {1000}, kCuda), dweight = Tensor::empty({17, 300}, DType::f32, kCuda);
  const auto results = [&] {
    embedding_backward({.ids = id_tensor.view(), .dout = x.view(), .dweight = dweight.mutable_view()}, ctx());
    return std::vector{sum(x).to_doubles(), sum(x, {0}).to_doubles(), sum(x, {1}).to_doubles(), matmul(x, weight).to_doubles(), dweight.to_doubles()};
  };
  const auto first = results();
  for (int repeat = 0; repeat < 50; ++repeat) ASSERT_EQ(results(), first);
}

struct GemmCase {
  std::int64_t M, N, K;
  DType in, out;
};

// Bound: K products of values in [-1, 1], each sum rounded in the accumulation type u_a: u_a K in all, for partial sums up to
// sqrt(K) 4; then one rounding to the output for values up to 4 sqrt(K) + 2.
TEST_F(CudaKernels, GemmTakesEveryLayoutAndWritesAsTold) {
  for (const GemmCase& gemm_case : std::vector<GemmCase>{{33, 17, 40, DType::f64, DType::f64}, {33, 17, 40, DType::f32, DType::f32},
                                                         {64, 48, 128, DType::bf16, DType::bf16}, {33, 17, 40, DType::bf16, DType::f32},
                                                         {33, 17, 41, DType::f16, DType::f16}, {1, 9, 300, DType::f16, DType::f32}}) {
    const auto& [M, N, K, in, out] = gemm_case;
    const double magnitude = 4 * std::sqrt(static_cast<double>(K)) + 2;
    const double bound = magnitude * (unit_roundoff(out) + static_cast<double>(K) * unit_roundoff(in == DType::f64 ? in : DType::f32));
    for (int layout = 0; layout < 16; ++layout) {
      const bool is_accumulated = (layout & 8) != 0;
      const auto turned = [](const Tensor& x, bool turns) { return turns ? transpose(contiguous(transpose(x, 0, 1)), 0, 1) : x; };
      const Tensor a = turned(random_values({M, K}, in, 1), layout & 1), b = turned(random_values({K, N}, in, 2), layout & 2);
      const Tensor c = turned(cast(random_values({M, N}, DType::f64, 3), out), layout & 4), bias = random_values({N}, in, 4);
      const Tensor expected = cast(c, DType::f64).clone();
      gemm({.a = cast(a, DType::f64).view(), .b = cast(b, DType::f64).view(), .c = expected.mutable_view(),
            .bias = is_accumulated ? ConstView{} : cast(bias, DType::f64).view(), .write = is_accumulated ? Write::accumulate : Write::assign},
           device_context(kCpu));
      const Tensor ga = turned(a.to(kCuda), layout & 1), gb = turned(b.to(kCuda), layout & 2), gc = turned(c.to(kCuda), layout & 4);
      const Tensor gbias = bias.to(kCuda);

      gemm({.a = ga.view(), .b = gb.view(), .c = gc.mutable_view(), .bias = is_accumulated ? ConstView{} : gbias.view(),
            .write = is_accumulated ? Write::accumulate : Write::assign}, ctx());

      EXPECT_TRUE(all_close(gc, expected.to_doubles(), bound)) << in << " to " << out << ", layout " << layout;
    }
  }
}

TEST_F(CudaKernels, GemmOverNothingGivesBiasOrZero) {
  const Tensor a = Tensor::empty({2, 0}, DType::f32, kCuda), b = Tensor::empty({0, 3}, DType::f32, kCuda);
  const Tensor bias = Tensor::from_vector<float>({1, 2, 3}, {3}, kCuda), c = Tensor::full({2, 3}, 9, DType::f32, kCuda);
  gemm({.a = a.view(), .b = b.view(), .c = c.mutable_view(), .bias = bias.view()}, ctx());
  EXPECT_TRUE(all_equal(c, {1, 2, 3, 1, 2, 3}));
  gemm({.a = a.view(), .b = b.view(), .c = c.mutable_view()}, ctx());
  EXPECT_TRUE(all_equal(c, {0, 0, 0, 0, 0, 0}));
}

// TF32 keeps 10 bits of mantissa, so 1 + 2^-12 loses its last bit; float32 keeps it.
TEST_F(CudaKernels, Float32ProductsAreTrueFloat32UnlessTf32IsAllowed) {
  const Tensor a = Tensor::full({64, 64}, 1 + 0x1p-12, DType::f32, kCuda), b = Tensor::full({64, 64}, 1, DType::f32, kCuda);
  EXPECT_EQ(matmul(a, b).to_doubles()[0], 64 * (1 + 0x1p-12));
  ctx().allow_tf32 = true;
  const double rounded = matmul(a, b).to_doubles()[0];
  ctx().allow_tf32 = false;
  EXPECT_EQ(rounded, 64);
}

TEST_F(CudaKernels, DropoutDropsWhatTheCpuDrops) {
  const Tensor x = Tensor::full({37, 19}, 1, DType::f32), gx = x.to(kCuda), out = Tensor::empty({37, 19}), gout = Tensor::empty({37, 19}, DType::f32, kCuda);
  dropout({.x = x.view(), .p = 0.4, .seed = 99, .offset = (1ull << 40) + 3, .out = out.mutable_view()}, device_context(kCpu));
  dropout({.x = gx.view(), .p = 0.4, .seed = 99, .offset = (1ull << 40) + 3, .out = gout.mutable_view()}, ctx());
  EXPECT_TRUE(all_equal(gout, out.to_doubles()));
}

TEST_F(CudaKernels, IdOutsideTheVocabularyIsReportedAtTheNextCopyToTheHost) {
  const Tensor weight = random_values({8, 4}, DType::f32).to(kCuda);
  for (std::int64_t bad : {std::int64_t{8}, std::int64_t{-1}, std::int64_t{1} << 31}) {
    const Tensor out = embedding(weight, Tensor::from_vector<std::int64_t>({0, 7, bad}, {3}, kCuda));
    EXPECT_EQ(error_of([&] { out.to_doubles(); }), concat_text("embedding: id ", bad, " at position 2 is outside the vocabulary [0, 8)"));
    EXPECT_TRUE(std::isnan(out.to_doubles()[8]));  // and is reported once
  }
}

TEST_F(CudaKernels, LabelOutsideTheClassesIsReportedAtTheNextCopyToTheHost) {
  const Tensor logits = random_values({3, 5}, DType::f32).to(kCuda);
  const Tensor loss = cross_entropy(logits, Tensor::from_vector<std::int64_t>({-100, 5, 0}, {3}, kCuda));
  EXPECT_EQ(error_of([&] { loss.item(); }), "cross_entropy: label 5 at position 1 is outside [0, 5) and is not ignore_index -100");
}

TEST_F(CudaKernels, CrossEntropyOfMinusInfinityLogitsIsExact) {
  const Tensor logits = Tensor::full({2, 2000}, -std::numeric_limits<double>::infinity(), DType::f32);
  logits.mutable_view().as<float>()[1000] = 10;
  logits.mutable_view().as<float>()[2000 + 7] = 10;
  const Tensor on_gpu = logits.to(kCuda);
  Tensor leaf = on_gpu;
  leaf.set_requires_grad(true);

  const Tensor loss = cross_entropy(leaf, Tensor::from_vector<std::int64_t>({1000, -100}, {2}, kCuda));
  loss.backward();

  EXPECT_EQ(loss.item(), 0);
  EXPECT_TRUE(all_equal(leaf.grad(), std::vector<double>(4000, 0)));
}

TEST_F(CudaKernels, AllLabelsIgnoredGivesZeroLossAndGradient) {
  Tensor logits = random_values({2, 5}, DType::bf16).to(kCuda);
  logits.set_requires_grad(true);
  const Tensor loss = cross_entropy(logits, Tensor::from_vector<std::int64_t>({-100, -100}, {2}, kCuda));
  loss.backward();
  EXPECT_EQ(loss.item(), 0);
  EXPECT_TRUE(all_equal(logits.grad(), std::vector<double>(10, 0)));
}

// More tensors than one table holds, of sizes around a block's part.
TEST_F(CudaKernels, AdamWStepsEveryParameterAsTheCpuDoes) {
  struct Set {
    std::vector<Tensor> weights, grads, first, second, rounded;
  };
  const auto make = [](Device device) {
    Set set;
    for (int i = 0; i < 60; ++i) {
      const Shape shape{i % 7 == 3 ? 0 : 1 + i * i * 3 % 9000};
      const DType dtype = i % 5 == 4 ? DType::f64 : DType::f32;
      const auto add = [&](std::vector<Tensor>& to, std::uint64_t seed) { to.push_back(random_values(shape, dtype, seed).to(device)); };
      add(set.weights, 10 + i), add(set.grads, 100 + i), add(set.first, 200 + i);
      set.second.push_back(Tensor::full(shape, 0.25, dtype, device));
      set.rounded.push_back(Tensor::zeros(shape, i % 2 == 0 ? DType::bf16 : DType::f16, device));
    }
    return set;
  };
  const auto step = [](const Set& set, Device device) {
    const auto number = [&](double value, DType dtype = DType::f64) { return Tensor::full({}, value, dtype, device); };
    const Tensor rate = number(0.01), scale = number(0.5), norm = number(8), updates = number(2, DType::i64);  // clipped to a quarter
    AdamWArgs args{.parameters = {}, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .max_grad_norm = 1, .learning_rate = rate.view(),
                   .grad_scale = scale.view(), .grad_norm = norm.view(), .step = updates.mutable_view()};
    for (std::size_t i = 0; i < set.weights.size(); ++i)
      args.parameters.push_back({set.weights[i].mutable_view(), set.grads[i].view(), set.first[i].mutable_view(), set.second[i].mutable_view(),
                                 i % 3 == 0 ? set.rounded[i].mutable_view() : MutView{}, 0.1, /*rate_scale=*/i % 2 == 0 ? 1.0 : 4.0});
    adamw(args, device_context(device));
    EXPECT_EQ(updates.item(), 3);
  };
  const Set cpu = make(kCpu), gpu = make(kCuda);

  step(cpu, kCpu);
  step(gpu, kCuda);

  // A handful of roundings of values up to 2, and one to the rounded copy.
  for (std::size_t i = 0; i < cpu.weights.size(); ++i) {
    EXPECT_TRUE(all_close(gpu.weights[i], cpu.weights[i].to_doubles(), 0x1p-20)) << i;
    EXPECT_TRUE(all_close(gpu.first[i], cpu.first[i].to_doubles(), 0x1p-20)) << i;
    EXPECT_TRUE(all_close(gpu.second[i], cpu.second[i].to_doubles(), 0x1p-20)) << i;
    EXPECT_TRUE(all_close(gpu.rounded[i], cpu.rounded[i].to_doubles(), 0x1p-7)) << i;
  }
}

TEST_F(CudaKernels, GlobalNormTakesEveryTensorOfTheListAndFindsTheFirstBadOne) {
  GlobalNormArgs norms;
  const DType dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
  std::vector<Tensor> tensors;
  std::int64_t count = 0;
  for (int i = 0; i < 70; ++i) {
    tensors.push_back(Tensor::full({1 + i * 131}, 2, dtypes[i % 4], kCuda));
    count += tensors.back().numel();
    norms.tensors.push_back(tensors.back().view());
  }
  const Tensor norm = Tensor::empty({}, DType::f64, kCuda), first = Tensor::empty({}, DType::f64, kCuda);
  norms.out = norm.mutable_view();
  norms.first_nonfinite = first.mutable_view();

  global_norm(norms, ctx());
  EXPECT_EQ(norm.item(), std::sqrt(4.0 * static_cast<double>(count)));
  EXPECT_EQ(first.item(), -1);

  for (int i : {66, 53}) slice(tensors[static_cast<std::size_t>(i)], 0, 5000, 5001).fill_(std::nan(""));
  global_norm(norms, ctx());
  EXPECT_TRUE(std::isnan(norm.item()));
  EXPECT_EQ(first.item(), 53);
}

TEST_F(CudaKernels, HostCopyHoldsWhatWasThereWhenItWasMade) {
  const Tensor x = Tensor::from_vector<double>({1, 2, 3}, {3}, kCuda);
  const std::int64_t waits = wait_count(kCuda);

  const HostCopy before(x.view());
  x.fill_(7);
  const HostCopy after(x.view());

  EXPECT_EQ(before.value<double>(2), 3);
  EXPECT_EQ(after.value<double>(2), 7);
  EXPECT_EQ(wait_count(kCuda), waits);
}

TEST_F(CudaKernels, RecordedWorkRunsAtEachStartOnWhatTheMemoryHoldsThen) {
  const Tensor x = Tensor::full({3}, 1, DType::f32, kCuda), total = Tensor::zeros({}, DType::f32, kCuda);
  const auto work = [&] { total.add_(sum(scale(x, 2))); };
  work();
  const WorkGraph graph(kCuda, work);
  EXPECT_EQ(total.item(), 6);

  graph.start();
  x.fill_(5);
  graph.start();

  EXPECT_EQ(total.item(), 6 + 6 + 30);
}

TEST_F(CudaKernels, RecordedWorkNeitherCopiesNorWaits) {
  const Tensor x = Tensor::full({3}, 1, DType::f32, kCuda), host = Tensor::zeros({3});
  const auto error_within = [](const std::function<void()>& issue) { return error_of([&] { WorkGraph(kCuda, issue); }); };

  EXPECT_EQ(error_within([&] { x.copy_(host); }), "work_graph: a copy to the device within recorded work; do it before or after");
  EXPECT_EQ(error_within([&] { HostCopy copy(x.view()); }), "work_graph: a copy to the host within recorded work; do it before or after");
  EXPECT_EQ(error_within([&] { x.to_doubles(); }), "work_graph: a wait for the device within recorded work; do it before or after");
  EXPECT_EQ(x.to_doubles(), std::vector<double>({1, 1, 1}));
}

TEST_F(CudaKernels, OffsetsBeyondTwoToThe31Work) {
  const std::int64_t count = (std::int64_t{1} << 31) + 4096;
  const Tensor x = Tensor::full({count}, 1, DType::bf16, kCuda);
  const Tensor tail = slice(x, 0, count - 3, count);
  tail.fill_(3);
  x.mul_(2);

  EXPECT_TRUE(all_equal(slice(x, 0, count - 5, count), {2, 2, 6, 6, 6}));
  // Every partial sum is a multiple of 2 with few bits; only the last additions round.
  EXPECT_NEAR(sum(cast(x, DType::f32)).item(), 2.0 * static_cast<double>(count) + 12, 0x1p-22 * 2.0 * static_cast<double>(count));
}

TEST_F(CudaKernels, MemoryComesBack) {
  const std::int64_t before = memory_stats(kCuda).current_bytes;
  {
    const Tensor x = random_values({100, 100}, DType::f32).to(kCuda);
    EXPECT_EQ(memory_stats(kCuda).current_bytes, before + x.nbytes());
    softmax(sum(x, {0}));
  }
  EXPECT_EQ(memory_stats(kCuda).current_bytes, before);
}

}  // namespace
}  // namespace heddle::test
