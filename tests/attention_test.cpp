// The attention kernels against the quadratic reference in float64, on every kind of shape and layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/exp2.h"
#include "kernels/runtime/parallel.h"
#include "tests/support/attention_run.h"
#include "tests/support/threads_guard.h"

namespace heddle::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kLengths[] = {1, 7, 63, 64, 65, 127, 129};

double largest(const std::vector<double>& values) {
  double max = 0;
  for (double value : values)
    if (std::isfinite(value)) max = std::max(max, std::abs(value));
  return max;
}

// The worst difference; infinite where exactly one side is not finite or the infinities differ.
double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return kInfinity;
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double difference = std::abs(a[i] - b[i]);
    worst = std::max(worst, std::isnan(difference) ? kInfinity : difference);
  }
  return worst;
}

// One rounding step at 1, relative.
template <typename E>
constexpr double epsilon() {
  return std::is_same_v<E, bfloat16> ? 0x1p-8 : std::is_same_v<E, float16> ? 0x1p-11 : std::is_same_v<E, float> ? 0x1p-24 : 0x1p-53;
}

std::string describe(const AttentionSizes& s) {
  return concat_text(" B", s.B, " Sq", s.Sq, " Sk", s.Sk, " Hq", s.Hq, " Hkv", s.Hkv, " D", s.D, s.is_causal ? " causal" : "");
}

template <typename E>
void expect_matches_reference(const AttentionSizes& sizes, const AttentionInputs& inputs, const AttentionRun& run = {}) {
  const AttentionResults truth = reference_attention<double>(sizes, inputs), naive = reference_attention<E>(sizes, inputs);

  const AttentionResults got = run_attention<E>(sizes, inputs, run);

  // One rounding step of the stored result, and what three rounding steps of the largest score, a sum of D products, do: they
  // change every probability by that relative amount. Three: of the sum, its product with the scale, and lse.
  const double store = epsilon<E>(), root = std::sqrt(static_cast<double>(sizes.D));
  const double score = sizes.scale * root * largest(inputs.q) * largest(inputs.k);
  const double step = 3 * epsilon<accumulate_t<E>>() * (1 + score);
  const double dp = root * largest(inputs.v) * largest(inputs.dout);
  const auto check = [&](const char* name, const auto& member, double factor, double absolute) {
    const double bound = factor * worst_difference(naive.*member, truth.*member) + store * largest(truth.*member) + absolute;
    EXPECT_LE(worst_difference(got.*member, truth.*member), bound) << name << describe(sizes);
  };
  check("out", &AttentionResults::out, 2, step * largest(inputs.v));
  check("lse", &AttentionResults::lse, 2, step);
  check("dq", &AttentionResults::dq, 3, step * sizes.scale * dp * largest(inputs.k));
  check("dk", &AttentionResults::dk, 3, step * sizes.scale * dp * largest(inputs.q));
  check("dv", &AttentionResults::dv, 3, step * largest(inputs.dout));
}

template <typename E>
void expect_matches_reference(const AttentionSizes& sizes, const AttentionRun& run = {}) {
  expect_matches_reference<E>(sizes, random_inputs<E>(sizes, 17), run);
}

// Bit equality, NaN included.
void expect_same_bits(const std::vector<double>& a, const std::vector<double>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_EQ(std::bit_cast<std::uint64_t>(a[i]), std::bit_cast<std::uint64_t>(b[i])) << what << " index " << i;
}
void expect_same_bits(const AttentionResults& a, const AttentionResults& b) {
  expect_same_bits(a.out, b.out, "out");
  expect_same_bits(a.lse, b.lse, "lse");
  expect_same_bits(a.dq, b.dq, "dq");
  expect_same_bits(a.dk, b.dk, "dk");
  expect_same_bits(a.dv, b.dv, "dv");
}

double default_scale(std::int64_t D) { return 1.0 / std::sqrt(static_cast<double>(D)); }

TEST(Attention, Exp2ErrorIsBelowItsStatedBound) {
  double worst = 0;
  for (float x = -126.0f; x < 127.5f; x += 0x1.1p-11f)
    worst = std::max(worst, std::abs(cpu::exp2_of(x) / std::exp2(static_cast<double>(x)) - 1));
  EXPECT_LT(worst, 1.2e-7);
  EXPECT_EQ(cpu::exp2_of(0.0f), 1.0f);
  EXPECT_EQ(cpu::exp2_of(-HUGE_VALF), 0.0f);
  EXPECT_EQ(cpu::exp2_of(HUGE_VALF), HUGE_VALF);
  EXPECT_TRUE(std::isnan(cpu::exp2_of(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Attention, MatchesReferenceForAllLengths) {
  for (std::int64_t Sq : kLengths)
    for (std::int64_t Sk : kLengths)
      for (bool causal : {false, true})
        expect_matches_reference<float>(
            {.Sq = Sq, .Sk = Sk, .Hq = 2, .Hkv = 1, .D = 20, .is_causal = causal, .scale = default_scale(20)});
}

TEST(Attention, MatchesReferenceForAllHeadSizes) {
  for (std::int64_t D : {1, 3, 8, 40, 64, 80, 128, 256})
    for (bool causal : {false, true})
      expect_matches_reference<float>(
          {.B = 2, .Sq = 65, .Sk = 129, .Hq = 2, .Hkv = 1, .D = D, .is_causal = causal, .scale = default_scale(D)});
}

TEST(Attention, MatchesReferenceInFloat64) {
  for (std::int64_t Sq : {1, 7, 129})
    for (std::int64_t Sk : {7, 65, 127})
      for (bool causal : {false, true})
        expect_matches_reference<double>(
            {.B = 2, .Sq = Sq, .Sk = Sk, .Hq = 6, .Hkv = 2, .D = 40, .is_causal = causal, .scale = 0.3});
}

TEST(Attention, MatchesReferenceInHalfPrecision) {
  for (std::int64_t Sq : {1, 7, 129})
    for (std::int64_t Sk : {7, 65, 127})
      for (bool causal : {false, true}) {
        const AttentionSizes sizes{.B = 2, .Sq = Sq, .Sk = Sk, .Hq = 6, .Hkv = 2, .D = 40, .is_causal = causal, .scale = 0.2};
        expect_matches_reference<bfloat16>(sizes);
        expect_matches_reference<float16>(sizes);
      }
}

TEST(Attention, MatchesReferenceForAnyTileSize) {
  const AttentionSizes sizes{.B = 2, .Sq = 37, .Sk = 53, .Hq = 6, .Hkv = 2, .D = 24, .is_causal = true, .scale = 0.2};
  for (AttentionTile tile : {AttentionTile{1, 1}, {3, 5}, {5, 3}, {8, 16}, {16, 8}, {7, 64}, {64, 7}, {64, 64}})
    expect_matches_reference<float>(sizes, {.tile = tile});
}

TEST(Attention, DiagonalMayCrossSeveralKeyTiles) {
  // Sk - Sq is no multiple of a tile, so the diagonal passes through two key tiles of one query tile.
  for (std::int64_t offset = 0; offset < 130; offset += 7)
    expect_matches_reference<float>({.Sq = 70, .Sk = 70 + offset, .D = 16, .is_causal = true, .scale = 0.25});
  for (const auto& [Sq, Sk] : {std::pair{130, 200}, {3, 128}})
    expect_matches_reference<float>({.Sq = Sq, .Sk = Sk, .D = 64, .is_causal = true, .scale = 0.125});
}

TEST(Attention, LengthsAroundTilesWithConstantInputs) {
  for (std::int64_t N : {1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 512, 1025})
    for (std::int64_t extra : {0, 5})
      for (bool causal : {false, true}) {
        const AttentionSizes sizes{.Sq = N + extra, .Sk = N, .D = 8, .is_causal = causal, .scale = 0.5};
        const std::vector<double> q(sizes.Sq * 8, 1.0), k(N * 8, 1.0);
        expect_matches_reference<float>(sizes, {q, k, k, q, {}});
      }
}

TEST(Attention, ManyShortSequences) {
  // With one key: out = v, dv = dout, dq = dk = 0, all exactly.
  const AttentionSizes sizes{.B = 830, .Hq = 4, .Hkv = 4, .D = 128, .scale = default_scale(128)};
  AttentionInputs inputs = random_inputs<bfloat16>(sizes, 3);
  inputs.dlse.clear();

  const AttentionResults r = run_attention<bfloat16>(sizes, inputs);

  EXPECT_EQ(r.out, inputs.v);
  EXPECT_EQ(r.dv, inputs.dout);
  EXPECT_EQ(largest(r.dq), 0.0);
  EXPECT_EQ(largest(r.dk), 0.0);
}

TEST(Attention, LargeCommonOffsetOfScoresIsHarmless) {
  const AttentionSizes sizes{.Sq = 33, .Sk = 65, .D = 16, .is_causal = true, .scale = 1.0};
  AttentionInputs inputs = random_inputs<bfloat16>(sizes, 5);
  for (double& value : inputs.q) value += 8.0;
  for (double& value : inputs.k) value += 8.0;  // scores near 1000
  expect_matches_reference<float>(sizes, inputs);
}

TEST(Attention, RowWithoutVisibleKeyIsZero) {
  const AttentionSizes sizes{.B = 2, .Sq = 76, .Sk = 1, .Hq = 2, .Hkv = 2, .D = 32, .is_causal = true, .scale = 0.5};
  const AttentionResults r = run_attention<float>(sizes, random_inputs<float>(sizes, 9));
  const std::int64_t row = sizes.Hq * sizes.D;
  for (std::int64_t b = 0; b < 2; ++b) {
    const auto blind = [&](const std::vector<double>& values) {
      return largest({values.begin() + b * 76 * row, values.begin() + (b * 76 + 75) * row});
    };
    EXPECT_EQ(blind(r.out), 0.0);
    EXPECT_EQ(blind(r.dq), 0.0);
    EXPECT_EQ(r.lse[b * 2 * 76], -kInfinity);
  }
  for (const auto* values : {&r.out, &r.dq, &r.dk, &r.dv})
    for (double value : *values) ASSERT_TRUE(std::isfinite(value));
}

TEST(Attention, BlindRowsDoNotChangeTheOthers) {
  // 12 queries on 8 keys: the first 4 rows see nothing. The last 8 are those of a run without them.
  const AttentionSizes with{.Sq = 12, .Sk = 8, .D = 8, .is_causal = true}, without{.Sq = 8, .Sk = 8, .D = 8, .is_causal = true};
  AttentionInputs inputs = random_inputs<float>(with, 11);
  std::fill_n(inputs.dout.begin(), 4 * 8, kNaN);
  const auto tail = [](const std::vector<double>& v, std::int64_t from) { return std::vector<double>(v.begin() + from, v.end()); };
  const AttentionInputs rest{tail(inputs.q, 32), inputs.k, inputs.v, tail(inputs.dout, 32), tail(inputs.dlse, 4)};

  const AttentionResults all = run_attention<float>(with, inputs, {.tile = AttentionTile{4, 4}});
  const AttentionResults some = run_attention<float>(without, rest, {.tile = AttentionTile{4, 4}});

  expect_same_bits({tail(all.out, 32), tail(all.lse, 4), tail(all.dq, 32), all.dk, all.dv}, some);
}

TEST(Attention, NoKeysGiveZeros) {
  const AttentionSizes sizes{.B = 2, .Sq = 5, .Sk = 0, .Hq = 2, .Hkv = 1, .D = 8};

  const AttentionResults r = run_attention<float>(sizes, random_inputs<float>(sizes, 1));

  EXPECT_EQ(r.out, std::vector<double>(2 * 5 * 2 * 8, 0.0));
  EXPECT_EQ(r.dq, std::vector<double>(2 * 5 * 2 * 8, 0.0));
  EXPECT_EQ(r.lse, std::vector<double>(2 * 2 * 5, -kInfinity));
}

TEST(Attention, NoQueriesGiveZeroGradients) {
  const AttentionSizes sizes{.B = 2, .Sq = 0, .Sk = 5, .Hq = 2, .Hkv = 1, .D = 8};
  AttentionInputs inputs = random_inputs<float>(sizes, 1);
  inputs.dout = {0.0};  // never read: it asks for the backward

  const AttentionResults r = run_attention<float>(sizes, inputs);

  EXPECT_EQ(r.dk, std::vector<double>(2 * 5 * 8, 0.0));
  EXPECT_EQ(r.dv, std::vector<double>(2 * 5 * 8, 0.0));
}

TEST(Attention, HiddenKeysAndValuesNeverLeak) {
  // Row i of 9 sees keys 0..i+2 of 11; key 6 and later are hidden from rows 0..3.
  const AttentionSizes sizes{.Sq = 9, .Sk = 11, .Hq = 4, .Hkv = 2, .D = 8, .is_causal = true, .scale = 0.4};
  const AttentionInputs clean = random_inputs<float>(sizes, 23);
  for (AttentionTile tile : {AttentionTile{2, 3}, {4, 4}, {9, 11}, {64, 64}})
    for (double poison : {kNaN, kInfinity, -kInfinity})
      for (bool poison_keys : {false, true}) {
        AttentionInputs dirty = clean;
        std::vector<double>& target = poison_keys ? dirty.k : dirty.v;
        std::fill(target.begin() + 6 * 2 * 8, target.end(), poison);

        const AttentionResults a = run_attention<float>(sizes, clean, {.tile = tile});
        const AttentionResults b = run_attention<float>(sizes, dirty, {.tile = tile});

        const std::int64_t kept = 4 * 4 * 8;
        EXPECT_TRUE(std::equal(a.out.begin(), a.out.begin() + kept, b.out.begin()));
        EXPECT_TRUE(std::equal(a.dq.begin(), a.dq.begin() + kept, b.dq.begin()));
        for (std::int64_t h = 0; h < 4; ++h)
          EXPECT_TRUE(std::equal(a.lse.begin() + h * 9, a.lse.begin() + h * 9 + 4, b.lse.begin() + h * 9));
      }
}

TEST(Attention, MemoryAroundTheInputsIsNeverUsed) {
  const AttentionSizes sizes{.Sq = 4, .Sk = 6, .D = 5, .is_causal = true, .scale = 0.4};

  const AttentionResults r = run_attention<float>(sizes, random_inputs<float>(sizes, 29));  // NaN around every tensor

  for (const auto* values : {&r.out, &r.lse, &r.dq, &r.dk, &r.dv})
    for (double value : *values) EXPECT_TRUE(std::isfinite(value));
}

TEST(Attention, VisibleNaNReachesItsRowsOnly) {
  const AttentionSizes sizes{.Sq = 20, .Sk = 20, .D = 8, .is_causal = true};
  AttentionInputs inputs = random_inputs<float>(sizes, 31);
  inputs.k[7 * 8] = kNaN;
  inputs.dout.clear();
  const AttentionResults r = run_attention<float>(sizes, inputs);
  for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(std::isnan(r.out[i * 8]), i >= 7) << "row " << i;
}

TEST(Attention, LayoutsDoNotChangeABit) {
  const AttentionSizes sizes{.B = 2, .Sq = 13, .Sk = 37, .Hq = 6, .Hkv = 2, .D = 20, .is_causal = true, .scale = 0.2};
  const AttentionInputs inputs = random_inputs<float>(sizes, 37);
  const AttentionResults dense = run_attention<float>(sizes, inputs);
  const Layouts mixed{.q = kRows, .k = kHeads, .v = kSequenceFirst, .out = kHeads, .dout = kColumns,
                      .dq = kSequenceFirst, .dk = kColumns, .dv = kRows};
  const Layouts other{.q = kHeads, .k = kSequenceFirst, .v = kRows, .out = kColumns, .dout = kSequenceFirst,
                      .dq = kColumns, .dk = kHeads, .dv = kHeads};

  expect_same_bits(dense, run_attention<float>(sizes, inputs, {.layouts = mixed}));
  expect_same_bits(dense, run_attention<float>(sizes, inputs, {.layouts = other}));
}

TEST(Attention, ExpandedGradientEqualsItsCopy) {
  // sum(out).backward() gives a dout whose strides are all 0; keys and values may be expanded over the batch.
  const Shape like_q{2, 32, 4, 128}, like_k{2, 32, 1, 128}, like_lse{2, 4, 32};
  const AttentionSizes sizes{.B = 2, .Sq = 32, .Sk = 32, .Hq = 4, .Hkv = 1, .D = 128, .is_causal = true, .scale = 0.1};
  AttentionInputs inputs = random_inputs<float16>(sizes, 41);
  std::fill(inputs.dout.begin(), inputs.dout.end(), 1.0);
  for (auto* values : {&inputs.k, &inputs.v}) std::copy_n(values->begin(), 32 * 128, values->begin() + 32 * 128);
  inputs.dlse.clear();
  const AttentionResults copied = run_attention<float16>(sizes, inputs);
  TestTensor<float16> q(like_q, inputs.q), out(like_q), dq(like_q), dk(like_k), dv(like_k);
  std::vector<float16> k(inputs.k.size()), v(inputs.v.size());
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float16>(inputs.k[i]), v[i] = static_cast<float16>(inputs.v[i]);
  std::vector<float> lse(like_lse.numel());
  const float16 one(1.0f);
  const Shape expanded{0, 128, 128, 1};
  const ConstView k_view{k.data(), DType::f16, kCpu, like_k, expanded}, v_view{v.data(), DType::f16, kCpu, like_k, expanded};
  const MutView lse_view{lse.data(), DType::f32, kCpu, like_lse, contiguous_strides(like_lse)};

  attention_forward({q.view(), k_view, v_view, out.mut(), lse_view, true, 0.1}, "cpu", ExecContext{});
  attention_backward({q.view(), k_view, v_view, out.view(), lse_view, {&one, DType::f16, kCpu, like_q, Shape::filled(4, 0)}, {},
                      dq.mut(), dk.mut(), dv.mut(), true, 0.1}, "cpu", ExecContext{});

  expect_same_bits(copied, {out.values(), {lse.begin(), lse.end()}, dq.values(), dk.values(), dv.values()});
}

TEST(Attention, BitsDoNotDependOnThreadsOrRuns) {
  // 6 key heads: one thread walks whole heads, four split the backward into keys and queries.
  const AttentionSizes sizes{.B = 1, .Sq = 300, .Sk = 333, .Hq = 12, .Hkv = 6, .D = 24, .is_causal = true, .scale = 0.2};
  const AttentionInputs inputs = random_inputs<float>(sizes, 43);
  const ThreadsGuard guard;
  set_num_threads(1);
  const AttentionResults one = run_attention<float>(sizes, inputs);
  for (int threads : {1, 2, 3, 4, 5, 8}) {
    set_num_threads(threads);
    for (int repeat = 0; repeat < 3; ++repeat) expect_same_bits(one, run_attention<float>(sizes, inputs));
  }
}

TEST(Attention, MemoryGrowsWithLengthNotItsSquare) {
  constexpr std::int64_t N = 8192, D = 8;
  const AttentionSizes sizes{.Sq = N, .Sk = N, .D = D, .is_causal = true, .scale = 0.3};
  const AttentionInputs inputs = random_inputs<float>(sizes, 47);
  const std::int64_t before = memory_stats(kCpu).current_bytes;
  reset_peak_memory(kCpu);

  run_attention<float>(sizes, inputs);

  // One number a row, and for each thread less than twelve tiles of 256 x 256.
  const std::int64_t peak = memory_stats(kCpu).peak_bytes - before, float_size = sizeof(float);
  EXPECT_LE(peak, float_size * (N + num_threads() * 12 * 256 * 256));
  EXPECT_GT(peak, float_size * N);
}

}  // namespace
}  // namespace heddle::test
