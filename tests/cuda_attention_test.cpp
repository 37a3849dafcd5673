// Every attention kernel of the GPU, on every kind of shape and layout, against the CPU variant in float64.
//
// A variant is left out of a case only where its supports() refuses it; the tests of the grid fail if one never ran.

#include <cstring>
#include <iostream>
#include <map>

#include "tests/support/attention_tensors.h"

namespace heddle::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double default_scale(std::int64_t D) { return 1.0 / std::sqrt(static_cast<double>(D)); }

std::string describe(const AttentionSizes& s, DType dtype) {
  return concat_text(dtype, " B", s.B, " Sq", s.Sq, " Sk", s.Sk, " Hq", s.Hq, " Hkv", s.Hkv, " D", s.D, s.is_causal ? " causal" : " full");
}

double largest(const Tensor& x) {
  double most = 0;
  for (double value : x.to_doubles())
    if (std::isfinite(value)) most = std::max(most, std::abs(value));
  return most;
}

// The largest difference and where it is; infinite where exactly one side is not finite or the infinities differ.
struct Difference {
  double value = 0;
  std::size_t index = 0;
};
Difference worst_difference(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  Difference worst;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;
    const double difference = std::abs(x[i] - y[i]);
    if (!(difference <= worst.value)) worst = {std::isnan(difference) ? kInfinity : difference, i};
  }
  return worst;
}

bool has_same_bits(const Guarded& a, const Guarded& b) {
  const Tensor x = contiguous(a.part.to(kCpu)), y = contiguous(b.part.to(kCpu));
  return std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(x.nbytes())) == 0;
}

// The variants that run on the GPU, and how often each pass of each ran or was refused.
std::vector<std::string_view> gpu_variants() {
  std::vector<std::string_view> names;
  for (const AttentionVariant& variant : attention_variants())
    if (variant.name != "cpu") names.push_back(variant.name);
  return names;
}

bool can_run(std::string_view name, AttentionPass pass, DType dtype, bool deterministic = false) {
  const AttentionProblem problem{.B = 1, .Sq = 128, .Sk = 128, .Hq = 2, .Hkv = 2, .D = 64, .dtype = dtype, .deterministic = deterministic, .device = kCuda};
  return std::ranges::any_of(attention_variants(), [&](const AttentionVariant& variant) { return variant.name == name && variant.supports(problem, pass).ok; });
}

std::vector<DType> tested_dtypes() {
  std::vector<DType> out;
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    if (std::ranges::any_of(gpu_variants(), [&](std::string_view name) { return can_run(name, AttentionPass::forward, dtype); })) out.push_back(dtype);
  return out;
}

struct Tally {
  std::map<std::string, int> ran, refused;

  bool count(std::string_view variant, std::string_view pass, DType dtype, const std::string& refusal) {
    ++(refusal.empty() ? ran : refused)[concat_text(variant, ' ', pass, ' ', dtype)];
    return refusal.empty();
  }
  // Prints the counts. Fails for a pass that the device has but no case ran.
  void expect_all_ran() const {
    for (const auto& [name, count] : ran) std::cout << "  " << name << ": ran " << count << '\n';
    for (const auto& [name, count] : refused) std::cout << "  " << name << ": refused " << count << '\n';
    for (std::string_view name : gpu_variants())
      for (DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        EXPECT_TRUE(ran.contains(concat_text(name, " forward ", dtype)) || !can_run(name, AttentionPass::forward, dtype)) << name << ' ' << dtype;
        EXPECT_TRUE(ran.contains(concat_text(name, " backward ", dtype)) || !can_run(name, AttentionPass::backward, dtype)) << name << ' ' << dtype;
      }
  }
};

// What the results of one problem are held against: at most `factor` times the naive code's error, one rounding of the stored
// result, and what three float32 roundings of the largest score do to every probability (of its sum, of the product with the
// scale, and of lse). A gradient of keys or values adds that up over the queries that see them.
class Bounds {
 public:
  Bounds(const AttentionSizes& sizes, const AttentionValues& values, DType dtype, const AttentionOutputs& truth)
      : label_(describe(sizes, dtype)), truth_(truth), naive_(naive_attention(sizes, values, dtype, kCuda)), store_(unit_roundoff(dtype)) {
    const double root = std::sqrt(static_cast<double>(sizes.D)), q = largest(values.q), k = largest(values.k);
    v_ = largest(values.v), dout_ = largest(values.dout);
    step_ = 3 * unit_roundoff(DType::f32) * (1 + std::max(sizes.scale * root * q * k, largest(truth.lse)));
    const double dp = root * v_ * dout_ + (values.dlse.defined() ? largest(values.dlse) : 0);
    dq_ = step_ * sizes.scale * dp * k, dk_ = step_ * sizes.scale * dp * q * naive_.most_seen, dv_ = step_ * dout_ * naive_.most_seen;
  }

  void check(const Forward& f, const std::string& who) const {
    check("out", f.out, &AttentionOutputs::out, 2, store_, step_ * v_, who);
    check("lse", f.lse, &AttentionOutputs::lse, 2, unit_roundoff(DType::f32), step_, who);
  }
  void check(const Backward& b, const std::string& who) const {
    check("dq", b.dq, &AttentionOutputs::dq, 3, store_, dq_, who);
    check("dk", b.dk, &AttentionOutputs::dk, 3, store_, dk_, who);
    check("dv", b.dv, &AttentionOutputs::dv, 3, store_, dv_, who);
  }

 private:
  void check(const char* name, const Guarded& got, Tensor AttentionOutputs::*member, double factor, double store, double absolute, const std::string& who) const {
    const double bound = factor * worst_difference(naive_.*member, truth_.*member).value + store * largest(truth_.*member) + absolute;
    const Difference worst = worst_difference(got.part, truth_.*member);
    EXPECT_LE(worst.value, bound) << name << " of " << who << ", " << label_ << ", flat index " << worst.index << " of " << got.part.shape();
    EXPECT_TRUE(got.is_intact()) << who << " wrote outside " << name << ", " << label_;
  }

  std::string label_;
  const AttentionOutputs& truth_;
  NaiveAttention naive_;
  double store_, step_, v_, dout_, dq_, dk_, dv_;
};

Forward moved(const Forward& f, Device device, const Layout& layout) {
  const auto to = [&](const Guarded& x) { return guarded(x.part.to(device), x.part.dtype(), device, layout); };
  return {"", to(f.out), to(f.lse)};
}

class CudaAttention : public NeedsCuda<> {
 protected:
  // Runs every variant's forward, and every variant's backward on each of their results, and checks all of it. With `with_cpu`
  // the CPU variant takes part on both sides.
  void check_all(const AttentionSizes& sizes, const AttentionValues& values, DType dtype, const AttentionOutputs& truth, const AttentionLayouts& at = {},
                 bool with_cpu = false) {
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

  // The same for every dtype; the two of 16 bits share their inputs and the truth.
  void check_all_dtypes(const AttentionSizes& sizes, std::uint64_t seed, const AttentionLayouts& at = {}, bool with_cpu = false) {
    AttentionValues values;
    AttentionOutputs truth;
    DType made = DType::f64;
    for (DType dtype : tested_dtypes()) {
      const DType kind = dtype == DType::f32 ? DType::f32 : DType::bf16;
      if (kind != made) values = held_inputs(sizes, kind, seed), truth = exact_attention(sizes, values), made = kind;
      check_all(sizes, values, dtype, truth, at, with_cpu);
    }
  }

  Tally tally_;
};

// Asks for the same bits in every run while it lives.
class DeterministicGuard {
 public:
  DeterministicGuard() { device_context(kCuda).deterministic = true; }
  ~DeterministicGuard() { device_context(kCuda).deterministic = false; }
};

TEST_F(CudaAttention, OnlyAnotherGpuIsAReasonToRefuseAPlainProblem) {
  const AttentionProblem problem{.B = 1, .Sq = 128, .Sk = 128, .Hq = 2, .Hkv = 2, .D = 64, .dtype = DType::bf16, .is_causal = true, .device = kCuda};
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
          check_all_dtypes({.B = B, .Sq = Sq, .Sk = Sk, .Hq = 6, .Hkv = Hkv, .D = D, .is_causal = is_causal, .scale = default_scale(D)}, seed += 5, at);
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
  for (std::int64_t D : {8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 128, 136, 160, 192, 200, 256})
    for (const auto& [Sq, Sk] : {std::pair{113, 203}, {300, 65}, {129, 256}})
      for (std::int64_t Hkv : {4, 2})
        check_all_dtypes({.B = 2, .Sq = Sq, .Sk = Sk, .Hq = 4, .Hkv = Hkv, .D = D, .is_causal = Hkv == 2, .scale = default_scale(D)}, seed += 5);
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
      check_all_dtypes({.B = 2, .Sq = 150, .Sk = 131, .Hq = 4, .Hkv = 2, .D = D, .is_causal = is_causal, .scale = default_scale(D)}, 31, {}, /*with_cpu=*/true);
  tally_.expect_all_ran();
}

// Scores of one row that differ by thousands, and rows whose scores all lie near 1000.
TEST_F(CudaAttention, OutliersAndCommonOffsetsMatchFloat64) {
  for (std::int64_t D : {64, 128})
    for (bool is_causal : {false, true}) {
      const AttentionSizes sizes{.B = 2, .Sq = 256, .Sk = 384, .Hq = 4, .Hkv = 2, .D = D, .is_causal = is_causal, .scale = default_scale(D)};
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

// With one key: out = v, dv = dout, dq = dk = 0, all exactly. The grid has more than 65535 heads in all.
TEST_F(CudaAttention, ManyShortSequencesAreExact) {
  for (const auto& [B, Hq, D] : {std::tuple{8300, 16, 128}, {70000, 1, 64}}) {
    const AttentionSizes sizes{.B = B, .Hq = Hq, .Hkv = Hq, .D = D, .scale = default_scale(D)};
    AttentionValues values = held_inputs(sizes, DType::bf16, 3);
    values.dlse = {};
    const AttentionTensors tensors(sizes, values, DType::bf16, kCuda, all_of({.gaps = Gaps::none}));
    for (std::string_view variant : gpu_variants()) {
      const Forward f = tensors.forward(variant);
      if (!f.refusal.empty()) continue;
      EXPECT_TRUE(has_same_bits(f.out, tensors.v)) << variant;
      const Backward b = tensors.backward(variant, f);
      if (!b.refusal.empty()) continue;
      EXPECT_TRUE(has_same_bits(b.dv, tensors.dout)) << variant;
      EXPECT_EQ(largest(b.dq.part), 0) << variant;
      EXPECT_EQ(largest(b.dk.part), 0) << variant;
    }
  }
}

TEST_F(CudaAttention, HiddenKeysAndValuesNeverLeak) {
  const DeterministicGuard guard;
  constexpr std::int64_t kSq = 200, kSk = 210, kFirst = 150;  // keys from kFirst on are hidden from rows below kFirst - (Sk - Sq)
  constexpr std::int64_t kClean = kFirst - (kSk - kSq);
  for (DType dtype : tested_dtypes())
    for (std::int64_t D : {64, 128}) {
      const AttentionSizes sizes{.Sq = kSq, .Sk = kSk, .Hq = 4, .Hkv = 2, .D = D, .is_causal = true, .scale = default_scale(D)};
      const AttentionValues values = held_inputs(sizes, dtype, 23);
      const AttentionTensors clean(sizes, values, dtype, kCuda);
      const auto head = [](const Guarded& x, int dim) { return Guarded{x.whole, slice(x.part, dim, 0, kClean)}; };
      for (double poison : {kNaN, kInfinity, -kInfinity})
        for (bool is_key : {true, false}) {
          const AttentionTensors dirty(sizes, values, dtype, kCuda);
          slice(is_key ? dirty.k.part : dirty.v.part, 1, kFirst, kSk).fill_(poison);
          for (std::string_view variant : gpu_variants()) {
            const std::string who = concat_text(variant, ' ', describe(sizes, dtype), is_key ? " keys " : " values ", poison);
            const Forward a = clean.forward(variant), b = dirty.forward(variant);
            if (!a.refusal.empty()) continue;
            EXPECT_TRUE(has_same_bits(head(a.out, 1), head(b.out, 1))) << who;
            EXPECT_TRUE(has_same_bits(head(a.lse, 2), head(b.lse, 2))) << who;
            const Backward c = clean.backward(variant, a), d = dirty.backward(variant, b);
            EXPECT_TRUE(!c.refusal.empty() || has_same_bits(head(c.dq, 1), head(d.dq, 1))) << who;
          }
        }
    }
}

TEST_F(CudaAttention, WhatRowsWithoutKeysHoldNeverMatters) {
  const DeterministicGuard guard;
  for (DType dtype : tested_dtypes())
    for (std::int64_t D : {64, 128}) {
      const AttentionSizes sizes{.B = 2, .Sq = 250, .Sk = 100, .Hq = 4, .Hkv = 2, .D = D, .is_causal = true, .scale = default_scale(D)};
      const AttentionValues values = held_inputs(sizes, dtype, 29);
      const AttentionTensors clean(sizes, values, dtype, kCuda), dirty(sizes, values, dtype, kCuda);
      for (const Guarded& x : {dirty.q, dirty.dout}) slice(x.part, 1, 0, 150).fill_(kNaN);
      for (std::string_view variant : gpu_variants()) {
        const Forward a = clean.forward(variant), b = dirty.forward(variant);
        if (!a.refusal.empty()) continue;
        EXPECT_TRUE(has_same_bits(a.out, b.out) && has_same_bits(a.lse, b.lse)) << variant << ' ' << describe(sizes, dtype);
        const Backward c = clean.backward(variant, a), d = dirty.backward(variant, b);
        if (!c.refusal.empty()) continue;
        EXPECT_TRUE(has_same_bits(c.dq, d.dq) && has_same_bits(c.dk, d.dk) && has_same_bits(c.dv, d.dv)) << variant << ' ' << describe(sizes, dtype);
      }
    }
}

// A NaN that a row sees reaches that row.
TEST_F(CudaAttention, VisibleNaNIsNotHidden) {
  const AttentionSizes sizes{.Sq = 200, .Sk = 200, .Hq = 1, .Hkv = 1, .D = 64, .is_causal = true, .scale = 0.125};
  const AttentionTensors tensors(sizes, held_inputs(sizes, DType::bf16, 37), DType::bf16, kCuda);
  slice(slice(tensors.k.part, 1, 70, 71), 3, 0, 1).fill_(kNaN);
  for (std::string_view variant : gpu_variants()) {
    const Forward f = tensors.forward(variant);
    if (!f.refusal.empty()) continue;
    const std::vector<double> out = f.out.part.to_doubles();
    for (std::size_t i = 0; i < 200; ++i) ASSERT_EQ(std::isnan(out[i * 64]), i >= 70) << variant << " row " << i;
  }
}

struct LayoutCase {
  const char* name;
  AttentionLayouts at;
  bool is_plain;  // one that every variant has to take
};

std::vector<LayoutCase> layout_cases() {
  const Layout rows{kRows}, heads{kHeads}, sequence{kSequenceFirst}, columns{kColumns}, odd{kRows, Gaps::odd}, odd_heads{kHeads, Gaps::odd};
  return {{"heads outermost", all_of(heads), true},
          {"sequence outermost", all_of(sequence), true},
          {"mixed", {rows, heads, sequence, heads, sequence, heads, rows, sequence}, true},
          {"transposed dout", {rows, rows, rows, rows, columns, rows, rows, rows}, false},
          {"transposed gradients", {rows, rows, rows, rows, rows, columns, columns, columns}, false},
          {"transposed out", {rows, rows, rows, columns, rows, rows, rows, rows}, false},
          {"odd inputs", {odd, odd_heads, odd, rows, rows, rows, rows, rows}, false},
          {"all odd", all_of(odd), false}};
}

TEST_F(CudaAttention, LayoutsDoNotChangeABit) {
  const DeterministicGuard guard;
  for (DType dtype : tested_dtypes())
    for (std::int64_t D : {64, 80, 128}) {
      const AttentionSizes sizes{.B = 2, .Sq = 77, .Sk = 141, .Hq = 6, .Hkv = 2, .D = D, .is_causal = true, .scale = default_scale(D)};
      const AttentionValues values = held_inputs(sizes, dtype, 41);
      const AttentionTensors dense(sizes, values, dtype, kCuda, all_of({.gaps = Gaps::none}));
      for (std::string_view variant : gpu_variants()) {
        const Forward a = dense.forward(variant);
        if (!a.refusal.empty()) continue;
        const Backward c = dense.backward(variant, a);
        for (const LayoutCase& layout : layout_cases()) {
          const std::string who = concat_text(variant, ' ', describe(sizes, dtype), ' ', layout.name);
          const AttentionTensors tensors(sizes, values, dtype, kCuda, layout.at);
          const Forward b = tensors.forward(variant);
          EXPECT_TRUE(b.refusal.empty() || !layout.is_plain) << b.refusal;
          if (b.refusal.empty()) {
            EXPECT_TRUE(has_same_bits(a.out, b.out) && has_same_bits(a.lse, b.lse)) << who;
            EXPECT_TRUE(b.out.is_intact() && b.lse.is_intact()) << who;
          }
          if (!c.refusal.empty()) continue;
          const Backward d = tensors.backward(variant, moved(a, kCuda, layout.at.out));
          EXPECT_TRUE(d.refusal.empty() || !layout.is_plain) << d.refusal;
          if (!d.refusal.empty()) continue;
          EXPECT_TRUE(has_same_bits(c.dq, d.dq) && has_same_bits(c.dk, d.dk) && has_same_bits(c.dv, d.dv)) << who;
          EXPECT_TRUE(d.dq.is_intact() && d.dk.is_intact() && d.dv.is_intact()) << who;
        }
      }
    }
}

// sum(out).backward() gives a dout whose strides are all 0; keys and values may be expanded over the batch.
TEST_F(CudaAttention, ExpandedTensorsEqualTheirCopies) {
  const DeterministicGuard guard;
  for (DType dtype : tested_dtypes()) {
    const AttentionSizes sizes{.B = 2, .Sq = 96, .Sk = 130, .Hq = 4, .Hkv = 1, .D = 128, .is_causal = true, .scale = 0.1};
    AttentionValues values = held_inputs(sizes, dtype, 43);
    values.dout.fill_(1);
    for (const Tensor& x : {values.k, values.v}) slice(x, 0, 1, 2).copy_(slice(x, 0, 0, 1));
    const AttentionTensors copied(sizes, values, dtype, kCuda);
    AttentionTensors expanded = copied;
    const Tensor one = Tensor::full({1}, 1, dtype, kCuda);
    expanded.dout = {one, one.alias(copied.dout.part.shape(), Shape::filled(4, 0), 0)};
    for (Guarded* x : {&expanded.k, &expanded.v}) {
      Shape strides = x->part.strides();
      strides[0] = 0;
      x->part = x->part.alias(x->part.shape(), strides, x->part.storage_offset());
    }
    for (std::string_view variant : gpu_variants()) {
      const Forward a = copied.forward(variant), b = expanded.forward(variant);
      if (!a.refusal.empty()) continue;
      EXPECT_TRUE(!b.refusal.empty() || (has_same_bits(a.out, b.out) && has_same_bits(a.lse, b.lse))) << variant << ' ' << dtype;
      const Backward c = copied.backward(variant, a), d = expanded.backward(variant, a);
      if (!c.refusal.empty()) continue;
      ASSERT_TRUE(d.refusal.empty()) << d.refusal;
      EXPECT_TRUE(has_same_bits(c.dq, d.dq) && has_same_bits(c.dk, d.dk) && has_same_bits(c.dv, d.dv)) << variant << ' ' << dtype;
    }
  }
}

TEST_F(CudaAttention, RepeatsGiveTheSameBits) {
  const DeterministicGuard guard;
  struct Repeat {
    std::int64_t Sq, Sk, D;
    int count;
  };
  for (const auto& [Sq, Sk, D, count] : {Repeat{200, 330, 64, 1000}, {330, 200, 128, 1000}, {2000, 4000, 64, 20}, {4224, 4224, 128, 20}}) {
    const AttentionSizes sizes{.Sq = Sq, .Sk = Sk, .Hq = 4, .Hkv = 2, .D = D, .is_causal = true, .scale = default_scale(D)};
    for (DType dtype : {DType::bf16, DType::f32}) {
      const AttentionTensors tensors(sizes, held_inputs(sizes, dtype, 47), dtype, kCuda, all_of({.gaps = Gaps::none}));
      for (std::string_view variant : gpu_variants()) {
        const Forward first = tensors.forward(variant);
        if (!first.refusal.empty()) continue;
        const Backward gradient = tensors.backward(variant, first);
        for (int i = 0; i < (dtype == DType::f32 ? count / 10 : count); ++i) {
          const Forward again = tensors.forward(variant);
          ASSERT_TRUE(has_same_bits(first.out, again.out) && has_same_bits(first.lse, again.lse)) << variant << ' ' << describe(sizes, dtype) << " repeat " << i;
          if (!gradient.refusal.empty()) continue;
          const Backward b = tensors.backward(variant, first);
          ASSERT_TRUE(has_same_bits(gradient.dq, b.dq) && has_same_bits(gradient.dk, b.dk) && has_same_bits(gradient.dv, b.dv))
              << variant << ' ' << describe(sizes, dtype) << " repeat " << i;
        }
      }
    }
  }
}

// Two sequences 2^31 + 1024 elements apart, all tensors in one allocation; the same problem lies dense in another.
TEST_F(CudaAttention, OffsetsBeyondTwoToThe31Work) {
  const DeterministicGuard guard;
  const AttentionSizes sizes{.B = 2, .Sq = 130, .Sk = 140, .Hq = 4, .Hkv = 2, .D = 64, .is_causal = true, .scale = 0.125};
  const AttentionTensors dense(sizes, held_inputs(sizes, DType::bf16, 53), DType::bf16, kCuda, all_of({.gaps = Gaps::none}));
  constexpr std::int64_t kApart = (std::int64_t{1} << 31) + 1024, kRoom = 1 << 17;
  const Tensor memory = Tensor::empty({kApart + 16 * kRoom}, DType::bf16, kCuda);
  std::int64_t used = 0;
  const auto apart = [&](const Tensor& like) {
    Shape strides = contiguous_strides(like.shape());
    strides[0] = kApart;
    const Tensor part = memory.alias(like.shape(), strides, used);
    used += kRoom;
    return part;
  };
  const auto placed = [&](const Guarded& x) {
    const Tensor part = apart(x.part);
    part.copy_(x.part);
    return Guarded{memory, part};
  };
  AttentionTensors far = dense;
  for (Guarded* x : {&far.q, &far.k, &far.v, &far.dout}) *x = placed(*x);
  for (std::string_view variant : gpu_variants()) {
    const Forward a = dense.forward(variant);
    if (!a.refusal.empty()) continue;
    used = 4 * kRoom;
    const Forward f{"", {memory, apart(a.out.part)}, guarded(a.lse.part.shape(), DType::f32, kCuda)};
    attention_forward({.q = far.q.part.view(), .k = far.k.part.view(), .v = far.v.part.view(), .out = f.out.part.mutable_view(),
                       .lse = f.lse.part.mutable_view(), .is_causal = true, .scale = 0.125}, variant, device_context(kCuda));
    EXPECT_TRUE(has_same_bits(a.out, f.out) && has_same_bits(a.lse, f.lse)) << variant;
    const Backward c = dense.backward(variant, a);
    if (!c.refusal.empty()) continue;
    const Backward d{"", {memory, apart(c.dq.part)}, {memory, apart(c.dk.part)}, {memory, apart(c.dv.part)}};
    attention_backward({.q = far.q.part.view(), .k = far.k.part.view(), .v = far.v.part.view(), .out = f.out.part.view(), .lse = f.lse.part.view(),
                        .dout = far.dout.part.view(), .dlse = far.dlse.part.view(), .dq = d.dq.part.mutable_view(), .dk = d.dk.part.mutable_view(),
                        .dv = d.dv.part.mutable_view(), .is_causal = true, .scale = 0.125}, variant, device_context(kCuda));
    EXPECT_TRUE(has_same_bits(c.dq, d.dq) && has_same_bits(c.dk, d.dk) && has_same_bits(c.dv, d.dv)) << variant;
  }
}

}  // namespace
}  // namespace heddle::test
