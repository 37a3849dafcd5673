// Every attention kernel of the GPU: layouts, memory that must not matter, long offsets, and repeats, bit by bit.

#include "tests/support/attention_check.h"

namespace heddle::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class CudaAttentionMemory : public NeedsCuda<> {};

// With one key: out = v and dv = dout, exactly; dq = dk = 0 but for the rounding of two sums of D products that are equal in exact
// arithmetic. The grid has more than 65535 heads in all.
TEST_F(CudaAttentionMemory, ManyShortSequencesAreExact) {
  for (const auto& [B, Hq, D] : {std::tuple{8300, 16, 128}, {70000, 1, 64}}) {
    const AttentionSizes sizes{.B = B, .Hq = Hq, .Hkv = Hq, .D = D, .scale = default_scale(D)};
    const Shape shape{B, 1, Hq, D};
    const Tensor x = held_values(shape, DType::bf16, 3), dout = held_values(shape, DType::bf16, 4);
    const AttentionTensors tensors(sizes, {x, x, x, dout, {}}, DType::bf16, kCuda, all_of({.gaps = Gaps::none}));
    const double sum = static_cast<double>(D) * largest(x) * largest(dout), rounding = 2 * static_cast<double>(D) * unit_roundoff(DType::f32) * sum;
    const double bound = sizes.scale * rounding * largest(x);
    for (std::string_view variant : gpu_variants()) {
      const Forward f = tensors.forward(variant);
      if (!f.refusal.empty()) continue;
      EXPECT_TRUE(has_same_bits(f.out, tensors.v)) << variant;
      const Backward b = tensors.backward(variant, f);
      if (!b.refusal.empty()) continue;
      EXPECT_TRUE(has_same_bits(b.dv, tensors.dout)) << variant;
      EXPECT_LE(largest(b.dq.part), bound) << variant;
      EXPECT_LE(largest(b.dk.part), bound) << variant;
    }
  }
}

TEST_F(CudaAttentionMemory, HiddenKeysAndValuesNeverLeak) {
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
            {
              const DeterministicGuard guard;
              const Backward c = clean.backward(variant, a), d = dirty.backward(variant, b);
              EXPECT_TRUE(!c.refusal.empty() || has_same_bits(head(c.dq, 1), head(d.dq, 1))) << who;
            }
            const Backward c = clean.backward(variant, a), d = dirty.backward(variant, b);
            if (!c.refusal.empty()) continue;
            const Tensor rows = head(c.dq, 1).part;
            const double other_order = 2 * unit_roundoff(dtype) * largest(rows);  // of a few sums: one number further at most
            EXPECT_LE(worst_difference(head(d.dq, 1).part.to_doubles(), rows.to_doubles()).value, other_order) << who;
          }
        }
    }
}

TEST_F(CudaAttentionMemory, WhatRowsWithoutKeysHoldNeverMatters) {
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
        EXPECT_TRUE(has_same_bits(a, b)) << variant << ' ' << describe(sizes, dtype);
        const Backward c = clean.backward(variant, a), d = dirty.backward(variant, b);
        if (!c.refusal.empty()) continue;
        EXPECT_TRUE(has_same_bits(c, d)) << variant << ' ' << describe(sizes, dtype);
      }
    }
}

// A NaN that a row sees reaches that row, also past the tile on the diagonal.
TEST_F(CudaAttentionMemory, VisibleNaNIsNotHidden) {
  constexpr std::int64_t kS = 400, kD = 64, kKey = 70;
  const AttentionSizes sizes{.Sq = kS, .Sk = kS, .Hq = 1, .Hkv = 1, .D = kD, .is_causal = true, .scale = 0.125};
  const AttentionTensors tensors(sizes, held_inputs(sizes, DType::bf16, 37), DType::bf16, kCuda);
  slice(slice(tensors.k.part, 1, kKey, kKey + 1), 3, 0, 1).fill_(kNaN);
  const auto expect_in = [&](const Guarded& x, std::string_view what) {
    const std::vector<double> values = x.part.to_doubles();
    for (std::size_t i = 0; i < kS; ++i) ASSERT_EQ(std::isnan(values[i * kD]), i >= kKey) << what << " row " << i;
  };
  for (std::string_view variant : gpu_variants()) {
    const Forward f = tensors.forward(variant);
    if (!f.refusal.empty()) continue;
    expect_in(f.out, concat_text(variant, " out"));
    const Backward b = tensors.backward(variant, f);
    if (!b.refusal.empty()) continue;
    expect_in(b.dq, concat_text(variant, " dq"));
    const DeterministicGuard guard;
    expect_in(tensors.backward(variant, f).dq, concat_text(variant, " deterministic dq"));
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

TEST_F(CudaAttentionMemory, LayoutsDoNotChangeABit) {
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
            EXPECT_TRUE(has_same_bits(a, b)) << who;
            EXPECT_TRUE(b.out.is_intact() && b.lse.is_intact()) << who;
          }
          if (!c.refusal.empty()) continue;
          const Backward d = tensors.backward(variant, moved(a, kCuda, layout.at.out));
          EXPECT_TRUE(d.refusal.empty() || !layout.is_plain) << d.refusal;
          if (!d.refusal.empty()) continue;
          EXPECT_TRUE(has_same_bits(c, d)) << who;
          EXPECT_TRUE(d.dq.is_intact() && d.dk.is_intact() && d.dv.is_intact()) << who;
        }
      }
    }
}

// sum(out).backward() gives a dout whose strides are all 0; keys and values may be expanded over the batch.
TEST_F(CudaAttentionMemory, ExpandedTensorsEqualTheirCopies) {
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
      EXPECT_TRUE(!b.refusal.empty() || has_same_bits(a, b)) << variant << ' ' << dtype;
      const Backward c = copied.backward(variant, a), d = expanded.backward(variant, a);
      if (!c.refusal.empty()) continue;
      ASSERT_TRUE(d.refusal.empty()) << d.refusal;
      EXPECT_TRUE(has_same_bits(c, d)) << variant << ' ' << dtype;
    }
  }
}

TEST_F(CudaAttentionMemory, RepeatsGiveTheSameBits) {
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
        for (int i = 0; i < count; ++i) {
          const Forward again = tensors.forward(variant);
          const std::string who = concat_text(variant, ' ', describe(sizes, dtype), " repeat ", i);
          ASSERT_TRUE(has_same_bits(first, again)) << who;
          if (!gradient.refusal.empty()) continue;
          const Backward b = tensors.backward(variant, first);
          ASSERT_TRUE(has_same_bits(gradient, b)) << who;
        }
      }
    }
  }
}

// Two sequences 2^31 + 1024 elements apart, all tensors in one allocation; the same problem lies dense in another.
TEST_F(CudaAttentionMemory, OffsetsBeyondTwoToThe31Work) {
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
    EXPECT_TRUE(has_same_bits(a, f)) << variant;
    const Backward c = dense.backward(variant, a);
    if (!c.refusal.empty()) continue;
    const Backward d{"", {memory, apart(c.dq.part)}, {memory, apart(c.dk.part)}, {memory, apart(c.dv.part)}};
    attention_backward({.q = far.q.part.view(), .k = far.k.part.view(), .v = far.v.part.view(), .out = f.out.part.view(),
                        .lse = f.lse.part.view(), .dout = far.dout.part.view(), .dlse = far.dlse.part.view(),
                        .dq = d.dq.part.mutable_view(), .dk = d.dk.part.mutable_view(), .dv = d.dv.part.mutable_view(),
                        .is_causal = true, .scale = 0.125}, variant, device_context(kCuda));
    EXPECT_TRUE(has_same_bits(c, d)) << variant;
  }
}

}  // namespace
}  // namespace heddle::test
