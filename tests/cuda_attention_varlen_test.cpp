// Sequences that lie end to end, on the GPU: each gets the bits of a call of its own.

#include <cstring>

#include "tests/support/attention_tensors.h"
#include "tests/support/error_of.h"

namespace heddle::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Ends = std::vector<std::int32_t>;

struct Batch {
  Ends q, k;
  std::int64_t Tq, Tk;  // at least the last ends
};

class CudaAttentionVarlen : public NeedsCuda<> {
 protected:
  void SetUp() override {
    NeedsCuda<>::SetUp();
    if (!IsSkipped()) device_context(kCuda).deterministic = true;
  }
  void TearDown() override {
    if (!IsSkipped()) device_context(kCuda).deterministic = false;
  }
};

bool has_same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous(a.to(kCpu)), y = contiguous(b.to(kCpu));
  return x.shape() == y.shape() && std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(x.nbytes())) == 0;
}

struct Gradients {
  Tensor dq, dk, dv;
};
struct Run {
  std::string refusal;
  Tensor out, lse;
  Gradients gradients;
};

// Forward and backward of q [1, Tq, Hq, D] and so on; outputs start as NaN. `extra` makes the lengths that are promised longer.
Run run(std::string_view variant, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout, bool is_causal, const Batch* batch, std::int64_t extra = 0) {
  const auto like = [](const Tensor& x) { return Tensor::full(x.shape(), kNaN, x.dtype(), kCuda); };
  Run r{"", like(q), Tensor::full({1, q.size(2), q.size(1)}, kNaN, DType::f32, kCuda), {like(q), like(k), like(v)}};
  const double scale = 0.11;
  Tensor ends_q, ends_k;
  AttentionForwardArgs forward{.q = q.view(), .k = k.view(), .v = v.view(), .out = r.out.mutable_view(), .lse = r.lse.mutable_view(),
                               .is_causal = is_causal, .scale = scale};
  AttentionBackwardArgs backward{.q = q.view(), .k = k.view(), .v = v.view(), .out = r.out.view(), .lse = r.lse.view(), .dout = dout.view(),
                                 .dq = r.gradients.dq.mutable_view(), .dk = r.gradients.dk.mutable_view(), .dv = r.gradients.dv.mutable_view(),
                                 .is_causal = is_causal, .scale = scale};
  if (batch != nullptr) {
    const auto count = static_cast<std::int64_t>(batch->q.size());
    ends_q = Tensor::from_vector<std::int32_t>(batch->q, {count}, kCuda), ends_k = Tensor::from_vector<std::int32_t>(batch->k, {count}, kCuda);
    forward.cu_seqlens_q = backward.cu_seqlens_q = ends_q.view(), forward.cu_seqlens_k = backward.cu_seqlens_k = ends_k.view();
    forward.max_seqlen_q = backward.max_seqlen_q = longest(batch->q) + extra, forward.max_seqlen_k = backward.max_seqlen_k = longest(batch->k) + extra;
  }
  r.refusal = refusal_of(variant, [&] {
    attention_forward(forward, variant, device_context(kCuda));
    attention_backward(backward, variant, device_context(kCuda));
  });
  return r;
}

void check_batch(const Batch& batch, std::int64_t D, DType dtype, bool is_causal, std::uint64_t seed) {
  const std::int64_t Hq = 4, Hkv = 2;
  const auto input = [&](std::int64_t rows, std::int64_t heads, std::uint64_t number, std::int32_t end) {
    const Tensor x = cast(held_values({1, rows, heads, D}, dtype, seed + number), dtype).to(kCuda);
    slice(x, 1, end, rows).fill_(kNaN);  // what is past the last sequence reaches nothing
    return x;
  };
  const Tensor q = input(batch.Tq, Hq, 0, batch.q.back()), dout = input(batch.Tq, Hq, 3, batch.q.back());
  const Tensor k = input(batch.Tk, Hkv, 1, batch.k.back()), v = input(batch.Tk, Hkv, 2, batch.k.back());
  for (const AttentionVariant& variant : attention_variants()) {
    if (variant.name == "cpu") continue;
    const std::string who = concat_text(variant.name, ' ', dtype, " D", D, is_causal ? " causal" : " full");
    const Run all = run(variant.name, q, k, v, dout, is_causal, &batch, /*extra=*/static_cast<std::int64_t>(seed % 3) * 100);
    if (!all.refusal.empty()) continue;
    for (std::size_t i = 0; i + 1 < batch.q.size(); ++i) {
      const auto queries = [&](const Tensor& x, int dim = 1) { return slice(x, dim, batch.q[i], batch.q[i + 1]); };
      const auto keys = [&](const Tensor& x) { return slice(x, 1, batch.k[i], batch.k[i + 1]); };
      const Run one = run(variant.name, queries(q), keys(k), keys(v), queries(dout), is_causal, nullptr);
      EXPECT_TRUE(has_same_bits(queries(all.out), one.out) && has_same_bits(queries(all.lse, 2), one.lse)) << who << " sequence " << i;
      EXPECT_TRUE(has_same_bits(queries(all.gradients.dq), one.gradients.dq)) << who << " sequence " << i;
      EXPECT_TRUE(has_same_bits(keys(all.gradients.dk), one.gradients.dk) && has_same_bits(keys(all.gradients.dv), one.gradients.dv)) << who << " sequence " << i;
    }
    const auto expect_tail = [&](const Tensor& x, int dim, std::int32_t end, double value) {
      for (double found : slice(x, dim, end, x.size(dim)).to_doubles()) ASSERT_EQ(found, value) << who;
    };
    expect_tail(all.out, 1, batch.q.back(), 0), expect_tail(all.lse, 2, batch.q.back(), -kInfinity), expect_tail(all.gradients.dq, 1, batch.q.back(), 0);
    expect_tail(all.gradients.dk, 1, batch.k.back(), 0), expect_tail(all.gradients.dv, 1, batch.k.back(), 0);
  }
}

constexpr std::int64_t kHeadSizes[] = {32, 64, 104, 128, 256};

TEST_F(CudaAttentionVarlen, EverySequenceGetsTheBitsOfACallOfItsOwn) {
  const Batch batches[] = {
      {{0, 0, 70, 200, 201, 329}, {0, 130, 130, 331, 340, 340}, 329, 340},   // without queries, without keys, and more of either
      {{0, 76, 110, 256}, {0, 1, 2, 3}, 260, 9},                             // hardly any keys; rows that belong to nobody
      {{0, 64, 192, 320}, {0, 128, 256, 300}, 1000, 301}};                   // whole tiles; many rows that belong to nobody
  std::uint64_t seed = 1;
  for (const Batch& batch : batches)
    for (std::int64_t D : kHeadSizes)
      for (bool is_causal : {false, true})
        for (DType dtype : {DType::bf16, DType::f16, DType::f32}) check_batch(batch, D, dtype, is_causal, seed += 5);
}

TEST_F(CudaAttentionVarlen, NaNOfASequenceStaysInIt) {
  const Batch batch{{0, 90, 160, 300}, {0, 100, 190, 290}, 300, 290};
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const AttentionVariant& variant : attention_variants()) {
      if (variant.name == "cpu") continue;
      const auto results = [&](bool is_dirty) {
        const auto input = [&](std::int64_t rows, std::int64_t heads, std::uint64_t seed, const Ends& ends) {
          const Tensor x = cast(held_values({1, rows, heads, 64}, dtype, seed), dtype).to(kCuda);
          if (is_dirty) slice(x, 1, ends[1], ends[2]).fill_(kNaN);
          return x;
        };
        return run(variant.name, input(300, 2, 1, batch.q), input(290, 1, 2, batch.k), input(290, 1, 3, batch.k), input(300, 2, 4, batch.q),
                   false, &batch);
      };
      const auto clean = results(false), dirty = results(true);
      if (!clean.refusal.empty()) continue;
      for (std::size_t i : {0, 2}) {
        const auto same = [&](const Tensor& a, const Tensor& b, const Ends& ends) {
          return has_same_bits(slice(a, 1, ends[i], ends[i + 1]), slice(b, 1, ends[i], ends[i + 1]));
        };
        EXPECT_TRUE(same(clean.out, dirty.out, batch.q) && same(clean.gradients.dq, dirty.gradients.dq, batch.q)) << variant.name << ' ' << dtype;
        EXPECT_TRUE(same(clean.gradients.dk, dirty.gradients.dk, batch.k) && same(clean.gradients.dv, dirty.gradients.dv, batch.k))
            << variant.name << ' ' << dtype;
      }
    }
}

TEST_F(CudaAttentionVarlen, EndsThatDecreaseAreReported) {
  const Tensor x = Tensor::zeros({1, 290, 1, 64}, DType::f32, kCuda);
  const Batch batch{{0, 90, 160, 290}, {0, 100, 90, 180}, 290, 290};

  const auto r = run("sm80", x, x, x, x, false, &batch);

  EXPECT_EQ(error_of([&] { r.out.to(kCpu); }),
            "attention: cu_seqlens_k gives sequence 1 the rows [100, 90) of k; the first must start at 0, none may be negative, longer "
            "than max_seqlen_k or past the last of 290 rows");
}

TEST_F(CudaAttentionVarlen, NoSequencesAtAllGiveZeros) {
  for (std::int64_t D : kHeadSizes) check_batch({{0}, {0}, 5, 7}, D, DType::bf16, true, 3);
  check_batch({{0, 0, 0}, {0, 0, 0}, 5, 7}, 64, DType::bf16, true, 4);
}

}  // namespace
}  // namespace heddle::test
