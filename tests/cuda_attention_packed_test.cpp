// Every attention kernel of the GPU on sequences of different lengths that lie end to end: each against the CPU variant in float64
// on that sequence alone.

#include <numeric>

#include "tests/support/attention_check.h"

namespace heddle::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct PackedCase {
  const char* name;
  std::vector<std::int32_t> q, k;  // lengths
  std::int64_t Hq, Hkv, D;
  std::int64_t rows_after = 0;     // that belong to no sequence
  std::int64_t longer = 0;         // by which max_seqlen exceeds the longest sequence

  Sequences sequences() const {
    const auto ends = [](const std::vector<std::int32_t>& lengths) {
      std::vector<std::int32_t> out{0};
      std::partial_sum(lengths.begin(), lengths.end(), std::back_inserter(out));
      return out;
    };
    return {ends(q), ends(k), std::ranges::max(q) + longer, std::ranges::max(k) + longer};
  }
  AttentionSizes packed(bool is_causal) const {
    const Sequences s = sequences();
    return {1, s.q.back() + rows_after, s.k.back() + rows_after, Hq, Hkv, D, is_causal, default_scale(D)};
  }
};

std::vector<PackedCase> packed_cases() {
  return {{"every fifth empty", {64, 1, 200, 129, 0, 113, 128, 65, 7, 0}, {64, 203, 128, 129, 0, 211, 1, 300, 7, 0}, 6, 2, 64},
          {"every fifth empty, wide", {64, 1, 200, 129, 0, 113, 128, 65, 7, 0}, {64, 203, 128, 129, 0, 211, 1, 300, 7, 0}, 6, 1, 128},
          {"more queries than keys", {76, 34, 146}, {1, 1, 1}, 1, 1, 32},
          {"no queries in some", {0, 1208, 840, 0}, {2538, 1742, 840, 3072}, 4, 1, 64},
          {"no queries in some, widest", {0, 308, 240, 0}, {538, 442, 240, 372}, 4, 1, 256},
          {"no keys in some", {70, 0, 130, 64}, {0, 65, 0, 100}, 4, 2, 128},
          {"rows after the last", {144, 288, 512}, {144, 288, 512}, 16, 16, 64, 2},
          {"rows after the last, short of the maximum", {40, 100}, {77, 100}, 2, 1, 128, 300, 150}};
}

class CudaAttentionPacked : public NeedsCuda<> {};

// Rows [first, last) of a packed tensor, or of lse with dim 2.
Guarded rows_of(const Guarded& x, std::int64_t first, std::int64_t last, int dim = 1) {
  return {x.whole, slice(x.part, dim, first, last)};
}

AttentionValues values_of(const AttentionValues& all, std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1) {
  return {slice(all.q, 1, q0, q1), slice(all.k, 1, k0, k1), slice(all.v, 1, k0, k1), slice(all.dout, 1, q0, q1), slice(all.dlse, 2, q0, q1)};
}

void expect_filled(const Guarded& x, double value, const std::string& who) {
  for (double got : x.part.to_doubles()) ASSERT_EQ(got, value) << who;
}

// What every variant made of one packed problem.
struct PackedResults {
  std::vector<std::pair<std::string, Forward>> forwards;
  std::vector<std::pair<std::string, Backward>> backwards;

  PackedResults(const AttentionTensors& tensors, Tally& tally) {
    for (std::string_view variant : gpu_variants()) {
      Forward f = tensors.forward(variant);
      if (tally.count(variant, "forward", tensors.dtype(), f.refusal)) forwards.emplace_back(concat_text(variant, " forward"), std::move(f));
    }
    for (std::string_view variant : gpu_variants())
      for (const auto& [forward, f] : forwards) {
        Backward b = tensors.backward(variant, f);
        if (tally.count(variant, "backward", tensors.dtype(), b.refusal))
          backwards.emplace_back(concat_text(variant, " backward after ", forward), std::move(b));
      }
  }

  // The results of query rows [q0, q1) and key rows [k0, k1).
  PackedResults part(std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1) const {
    PackedResults out;
    for (const auto& [who, f] : forwards) out.forwards.emplace_back(who, Forward{"", rows_of(f.out, q0, q1), rows_of(f.lse, q0, q1, 2)});
    for (const auto& [who, b] : backwards)
      out.backwards.emplace_back(who, Backward{"", rows_of(b.dq, q0, q1), rows_of(b.dk, k0, k1), rows_of(b.dv, k0, k1)});
    return out;
  }

  void expect_nothing(const std::string& where) const {
    for (const auto& [who, f] : forwards) expect_filled(f.out, 0, who + where), expect_filled(f.lse, -kInfinity, who + where);
    for (const auto& [who, b] : backwards)
      for (const Guarded& x : {b.dq, b.dk, b.dv}) expect_filled(x, 0, who + where);
  }
  void expect_within(const Bounds& bounds, const std::string& where) const {
    for (const auto& [who, f] : forwards) bounds.check_values(f, who + where);
    for (const auto& [who, b] : backwards) bounds.check_values(b, who + where);
  }
  void expect_intact(const std::string& where) const {
    for (const auto& [who, f] : forwards) EXPECT_TRUE(f.out.is_intact() && f.lse.is_intact()) << who << where;
    for (const auto& [who, b] : backwards) EXPECT_TRUE(b.dq.is_intact() && b.dk.is_intact() && b.dv.is_intact()) << who << where;
  }

 private:
  PackedResults() = default;
};

void check_packed(const PackedCase& packed, bool is_causal, DType dtype, Tally& tally) {
  const AttentionSizes sizes = packed.packed(is_causal);
  const Sequences sequences = packed.sequences();
  const std::int64_t q_end = sequences.q.back(), k_end = sequences.k.back();
  const AttentionValues values = held_inputs(sizes, dtype, 81);
  AttentionTensors tensors(sizes, values, dtype, kCuda);
  tensors.set_sequences(sequences);
  // What belongs to nobody must not matter.
  for (const Guarded* x : {&tensors.q, &tensors.dout}) slice(x->part, 1, q_end, sizes.Sq).fill_(kNaN);
  for (const Guarded* x : {&tensors.k, &tensors.v}) slice(x->part, 1, k_end, sizes.Sk).fill_(kNaN);

  const PackedResults results(tensors, tally);

  for (std::size_t i = 0; i < packed.q.size(); ++i) {
    const std::int64_t q0 = sequences.q[i], q1 = sequences.q[i + 1], k0 = sequences.k[i], k1 = sequences.k[i + 1];
    const AttentionSizes one{1, q1 - q0, k1 - k0, packed.Hq, packed.Hkv, packed.D, is_causal, sizes.scale};
    const std::string where = concat_text(", ", packed.name, ", sequence ", i);
    const PackedResults part = results.part(q0, q1, k0, k1);
    if (one.Sq == 0 || one.Sk == 0) {
      part.expect_nothing(where);
      continue;
    }
    const AttentionValues alone = values_of(values, q0, q1, k0, k1);
    const AttentionOutputs truth = exact_attention(one, alone);
    part.expect_within(Bounds(one, alone, dtype, truth), where);
  }
  results.part(q_end, sizes.Sq, k_end, sizes.Sk).expect_nothing(concat_text(", ", packed.name, ", after the last"));
  results.expect_intact(concat_text(", ", packed.name));
}

TEST_F(CudaAttentionPacked, EverySequenceMatchesFloat64) {
  Tally tally;
  for (const PackedCase& packed : packed_cases())
    for (bool is_causal : {false, true})
      for (DType dtype : tested_dtypes()) check_packed(packed, is_causal, dtype, tally);
  tally.print();
}

TEST_F(CudaAttentionPacked, ASequenceNeverSeesAnother) {
  const DeterministicGuard guard;
  for (DType dtype : tested_dtypes())
    for (bool is_causal : {false, true}) {
      const PackedCase packed{"", {70, 130, 90}, {90, 110, 150}, 4, 2, 64};
      const AttentionSizes sizes = packed.packed(is_causal);
      const AttentionValues values = held_inputs(sizes, dtype, 91);
      AttentionTensors clean(sizes, values, dtype, kCuda), dirty(sizes, values, dtype, kCuda);
      clean.set_sequences(packed.sequences()), dirty.set_sequences(packed.sequences());
      for (const Guarded* x : {&dirty.q, &dirty.dout}) slice(x->part, 1, 70, 200).fill_(kNaN);
      for (const Guarded* x : {&dirty.k, &dirty.v}) slice(x->part, 1, 90, 200).fill_(kNaN);
      for (std::string_view variant : gpu_variants()) {
        const Forward a = clean.forward(variant), b = dirty.forward(variant);
        if (!a.refusal.empty()) continue;
        const Backward c = clean.backward(variant, a), d = dirty.backward(variant, b);
        for (const auto& [q0, q1, k0, k1] : {std::tuple{0, 70, 0, 90}, {200, 290, 200, 350}}) {
          EXPECT_TRUE(has_same_bits(rows_of(a.out, q0, q1), rows_of(b.out, q0, q1))) << variant << ' ' << describe(sizes, dtype);
          EXPECT_TRUE(has_same_bits(rows_of(a.lse, q0, q1, 2), rows_of(b.lse, q0, q1, 2))) << variant << ' ' << describe(sizes, dtype);
          if (!c.refusal.empty()) continue;
          EXPECT_TRUE(has_same_bits(rows_of(c.dq, q0, q1), rows_of(d.dq, q0, q1))) << variant << ' ' << describe(sizes, dtype);
          EXPECT_TRUE(has_same_bits(rows_of(c.dk, k0, k1), rows_of(d.dk, k0, k1))) << variant << ' ' << describe(sizes, dtype);
          EXPECT_TRUE(has_same_bits(rows_of(c.dv, k0, k1), rows_of(d.dv, k0, k1))) << variant << ' ' << describe(sizes, dtype);
        }
      }
    }
}

}  // namespace
}  // namespace heddle::test
