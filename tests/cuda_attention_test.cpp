// Every attention kernel of the GPU, on every kind of shape, against the CPU variant in float64.
//
// A variant is left out of a case only where its supports() refuses it; the tests of the grid fail if one never ran.

#include "tests/support/attention_check.h"

namespace heddle::test {
namespace {

class CudaAttention : public NeedsCuda<> {
 protected:
  // Runs every variant's forward, and every variant's backward on each of their results, and checks all of it. With `with_cpu`
  // the CPU variant takes part on both sides.
  void check_all(const AttentionSizes& sizes, const AttentionValues& values, DType dtype, const AttentionOutputs& truth,
                 const AttentionLayouts& at = {}, bool with_cpu = false) {
    const AttentionTensors tensors(sizes, values, dtype, kCuda, at);
    const Bounds bounds(sizes, values, dtype, truth);
    std::vector<std::pair<std::string, Forward>> saved;
    for (std::string_view variant : gpu_variants()) {
      Forward f = tensors.forward(variant);
      if (!tally_.count(variant, "forward", dtype, f.refusal)) continue;
      bounds.check(f, concat_text(variant, " forward"));
      saved.emplace_back(variant, std::move(f));
    }
    if (with_cpu) {
      const AttentionTensors host(sizes, values, dtype, kCpu, at);
      saved.emplace_back("cpu", moved(host.forward("cpu"), kCuda, at.out));
      for (const auto& [forward, f] : saved)
        bounds.check(host.backward("cpu", moved(f, kCpu, at.out)), concat_text("cpu backward after ", forward));
    }
    for (std::string_view variant : gpu_variants())
      for (const auto& [forward, f] : saved) {
        const Backward b = tensors.backward(variant, f);
        if (tally_.count(variant, "backward", dtype, b.refusal)) bounds.check(b, concat_text(variant, " backward after ", forward));
      }
  }

  // The same for every dtype; the two of 16 bits share their inputs and the truth. `with_float32` false leaves that one out.
  void check_all_dtypes(const AttentionSizes& sizes, std::uint64_t seed, const AttentionLayouts& at = {}, bool with_cpu = false,
                        bool with_float32 = true) {
    AttentionValues values;
    AttentionOutputs truth;
    DType made = DType::f64;
    for (DType dtype : tested_dtypes()) {
      if (dtype == DType::f32 && !with_float32) continue;
      const DType kind = dtype == DType::f32 ? DType::f32 : DType::bf16;
      if (kind != made) values = held_inputs(sizes, kind, seed), truth = exact_attention(sizes, values), made = kind;
      check_all(sizes, values, dtype, truth, at, with_cpu);
    }
  }

  Tally tally_;
};

TEST_F(CudaAttention, OnlyAnotherGpuIsAReasonToRefuseAPlainProblem) {
  const AttentionProblem problem{
      .B = 1, .Sq = 128, .Sk = 128, .Hq = 2, .Hkv = 2, .D = 64, .dtype = DType::bf16, .is_causal = true, .device = kCuda};
  for (const AttentionVariant& variant : attention_variants()) {
    if (variant.name == "cpu") continue;
    const AttentionSupport support = variant.supports(problem, AttentionPass::forward);
    EXPECT_TRUE(support.ok || support.reason.find("compute capability") != std::string::npos) << variant.name << ": " << support.reason;
  }
}

constexpr std::pair<std::int64_t, std::int64_t> kLengths[] = {
    {1, 1},     {64, 128},  {128, 192}, {256, 256}, {239, 1},   {799, 3},   {113, 203}, {113, 128},   {128, 217},   {113, 211},
    {108, 256}, {256, 512}, {384, 256}, {640, 128}, {512, 256}, {130, 200}, {1, 300},   {1024, 1024}, {1023, 1024}, {1024, 1023}};

TEST_F(CudaAttention, EveryLengthMatchesFloat64) {
  std::uint64_t seed = 100;
  for (const auto& [Sq, Sk] : kLengths)
    for (std::int64_t D : {64, 128})
      for (std::int64_t Hkv : {6, 2, 1})
        for (bool is_causal : {false, true}) {
          if (Sq * Sk > 500000 && Hkv == 6) continue;
          const std::int64_t B = Sq * Sk > 500000 ? 1 : 2;
          const AttentionLayouts at = all_of({.gaps = seed % 2 == 0 ? Gaps::none : Gaps::aligned});
          check_all_dtypes({B, Sq, Sk, 6, Hkv, D, is_causal, default_scale(D)}, seed += 5, at, /*with_cpu=*/false, /*with_float32=*/Hkv == 2);
        }
  tally_.expect_all_ran();
}

TEST_F(CudaAttention, LongSequencesMatchFloat64) {
  for (const auto& [S, D] : {std::pair{4096, 128}, {4224, 64}})
    for (bool is_causal : {false, true})
      check_all_dtypes({.Sq = S, .Sk = S, .Hq = 2, .Hkv = 1, .D = D, .is_causal = is_causal, .scale = default_scale(D)}, 7);
}

TEST_F(CudaAttention, EveryHeadSizeMatchesFloat64) {
  std::uint64_t seed = 900;
  for (std::int64_t D : {1, 3, 8, 16, 24, 30, 32, 33, 40, 64, 72, 80, 96, 104, 128, 136, 160, 192, 200, 255, 256})
    for (const auto& [Sq, Sk] : {std::pair{113, 203}, {300, 65}, {129, 256}})
      for (std::int64_t Hkv : {4, 2})
        check_all_dtypes({2, Sq, Sk, 4, Hkv, D, /*is_causal=*/Hkv == 2, default_scale(D)}, seed += 5);
  tally_.expect_all_ran();
}

// The diagonal crosses two key tiles of one query tile wherever Sk - Sq is no multiple of a tile.
TEST_F(CudaAttention, EveryDiagonalMatchesFloat64) {
  for (std::int64_t offset = -66; offset < 200; offset += 7)
    check_all_dtypes({.Sq = 130, .Sk = 130 + offset, .Hq = 2, .Hkv = 1, .D = offset % 2 == 0 ? 64 : 128, .is_causal = true, .scale = 0.1},
                     static_cast<std::uint64_t>(1000 + offset));
}

TEST_F(CudaAttention, EveryForwardFeedsEveryBackward) {
  for (std::int64_t D : {64, 80, 128})
    for (bool is_causal : {false, true})
      check_all_dtypes({2, 150, 131, 4, 2, D, is_causal, default_scale(D)}, 31, {}, /*with_cpu=*/true);
  tally_.expect_all_ran();
}

// Scores of one row that differ by thousands, and rows whose scores all lie near 1000.
TEST_F(CudaAttention, OutliersAndCommonOffsetsMatchFloat64) {
  for (std::int64_t D : {64, 128})
    for (bool is_causal : {false, true}) {
      const AttentionSizes sizes{2, 256, 384, 4, 2, D, is_causal, default_scale(D)};
      AttentionValues outliers = held_inputs(sizes, DType::bf16, 51), offset = held_inputs(sizes, DType::bf16, 61);
      for (const Tensor& x : {outliers.q, outliers.k, outliers.v}) {
        double* values = x.mutable_view().as<double>();
        for (std::int64_t i = 0; i < x.numel(); i += 997) values[i] *= 128;
      }
      const double common = std::sqrt(1000 / std::sqrt(static_cast<double>(D)));  // of queries and keys: their scores are near 1000
      for (const Tensor& x : {offset.q, offset.k}) x.copy_(cast(add_scalar(x, common), DType::bf16));
      for (const AttentionValues& values : {outliers, offset}) {
        const AttentionOutputs truth = exact_attention(sizes, values);
        for (DType dtype : tested_dtypes()) check_all(sizes, values, dtype, truth);
      }
    }
}

TEST_F(CudaAttention, WithoutGradientOfLseMatchesFloat64) {
  const AttentionSizes sizes{.B = 2, .Sq = 200, .Sk = 200, .Hq = 2, .Hkv = 2, .D = 64, .is_causal = true, .scale = 0.125};
  AttentionValues values = held_inputs(sizes, DType::bf16, 71);
  values.dlse = {};
  const AttentionOutputs truth = exact_attention(sizes, values);
  for (DType dtype : tested_dtypes()) check_all(sizes, values, dtype, truth);
}

TEST_F(CudaAttention, NoKeysGiveZerosAndNoQueriesGiveZeroGradients) {
  for (const auto& [Sq, Sk] : {std::pair{70, 0}, {0, 70}, {0, 0}})
    for (DType dtype : tested_dtypes()) {
      const AttentionSizes sizes{.B = 2, .Sq = Sq, .Sk = Sk, .Hq = 2, .Hkv = 1, .D = 64, .is_causal = true, .scale = 0.125};
      const AttentionTensors tensors(sizes, held_inputs(sizes, dtype, 5), dtype, kCuda);
      for (std::string_view variant : gpu_variants()) {
        const Forward f = tensors.forward(variant);
        if (!f.refusal.empty()) continue;
        EXPECT_EQ(f.out.part.to_doubles(), std::vector<double>(static_cast<std::size_t>(2 * Sq * 2 * 64), 0.0)) << variant;
        EXPECT_EQ(f.lse.part.to_doubles(), std::vector<double>(static_cast<std::size_t>(2 * 2 * Sq), -kInfinity)) << variant;
        const Backward b = tensors.backward(variant, f);
        if (!b.refusal.empty()) continue;
        EXPECT_EQ(b.dq.part.to_doubles(), std::vector<double>(static_cast<std::size_t>(2 * Sq * 2 * 64), 0.0)) << variant;
        EXPECT_EQ(b.dk.part.to_doubles(), std::vector<double>(static_cast<std::size_t>(2 * Sk * 64), 0.0)) << variant;
        EXPECT_EQ(b.dv.part.to_doubles(), std::vector<double>(static_cast<std::size_t>(2 * Sk * 64), 0.0)) << variant;
      }
    }
}

}  // namespace
}  // namespace heddle::test
