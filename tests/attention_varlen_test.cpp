// Sequences that lie end to end (cu_seqlens), on the CPU: the reference for the other variants.
#include <gtest/gtest.h>

#include <limits>

#include "kernels/runtime/parallel.h"
#include "tests/support/attention_run.h"
#include "tests/support/threads_guard.h"

namespace heddle::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Ends = std::vector<std::int32_t>;
using Values = std::vector<double>;

// The rows [begin, end) of a [1, S, H, D] tensor.
Values rows_of(const Values& values, std::int64_t width, std::int64_t begin, std::int64_t end) {
  return Values(values.begin() + begin * width, values.begin() + end * width);
}
// The columns [begin, end) of a [1, H, S] tensor.
Values columns_of(const Values& values, std::int64_t S, std::int64_t begin, std::int64_t end) {
  Values part;
  for (std::size_t row = 0; row < values.size(); row += S) part.insert(part.end(), values.begin() + row + begin, values.begin() + row + end);
  return part;
}

// Where the two values differ as bits, or are NaN; -1 if nowhere.
std::int64_t first_difference(const Values& a, const Values& b) {
  if (a.size() != b.size()) return 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::bit_cast<std::uint64_t>(a[i]) != std::bit_cast<std::uint64_t>(b[i]) || std::isnan(a[i])) return static_cast<std::int64_t>(i);
  return -1;
}

// A batch of sequences and what it gave.
struct Batch {
  AttentionSizes sizes;  // of all rows
  Ends ends_q, ends_k;
  AttentionInputs inputs;

  std::int64_t q_width() const { return sizes.Hq * sizes.D; }
  std::int64_t k_width() const { return sizes.Hkv * sizes.D; }
  std::size_t count() const { return ends_q.size() - 1; }

  template <typename E>
  AttentionResults run(const AttentionRun& how = {}) const {
    return run_attention<E>(sizes, inputs, {how.tile, how.layouts, ends_q, ends_k});
  }
  // The results that belong to sequence i.
  AttentionResults part(const AttentionResults& all, std::size_t i) const {
    const auto [q0, q1, k0, k1] = std::array{ends_q[i], ends_q[i + 1], ends_k[i], ends_k[i + 1]};
    return {rows_of(all.out, q_width(), q0, q1), columns_of(all.lse, sizes.Sq, q0, q1), rows_of(all.dq, q_width(), q0, q1),
            rows_of(all.dk, k_width(), k0, k1), rows_of(all.dv, k_width(), k0, k1)};
  }
  // A call with sequence i alone. One without queries is not asked for gradients: there they are 0.
  template <typename E>
  AttentionResults alone(std::size_t i, std::optional<AttentionTile> tile) const {
    const auto [q0, q1, k0, k1] = std::array{ends_q[i], ends_q[i + 1], ends_k[i], ends_k[i + 1]};
    AttentionSizes one = sizes;
    one.Sq = q1 - q0, one.Sk = k1 - k0;
    const AttentionInputs part{rows_of(inputs.q, q_width(), q0, q1), rows_of(inputs.k, k_width(), k0, k1),
                               rows_of(inputs.v, k_width(), k0, k1), rows_of(inputs.dout, q_width(), q0, q1),
                               columns_of(inputs.dlse, sizes.Sq, q0, q1)};
    AttentionResults results = run_attention<E>(one, part, {.tile = tile});
    if (part.dout.empty()) results.dk = results.dv = Values(part.k.size(), 0.0);
    return results;
  }
};

// Ends q and k with rows of nobody after them.
template <typename E>
Batch batch_of(AttentionSizes sizes, Ends ends_q, Ends ends_k, std::int64_t spare_q = 0, std::int64_t spare_k = 0) {
  sizes.Sq = ends_q.back() + spare_q, sizes.Sk = ends_k.back() + spare_k;
  return {sizes, std::move(ends_q), std::move(ends_k), random_inputs<E>(sizes, 61)};
}

void expect_same(const AttentionResults& got, const AttentionResults& expected, const std::string& what) {
  const auto check = [&](const char* name, const auto& member) {
    EXPECT_EQ(first_difference(got.*member, expected.*member), -1) << name << what;
  };
  check("out", &AttentionResults::out);
  check("lse", &AttentionResults::lse);
  check("dq", &AttentionResults::dq);
  check("dk", &AttentionResults::dk);
  check("dv", &AttentionResults::dv);
}

template <typename E>
void expect_each_equals_its_own_call(const Batch& batch, const AttentionRun& how = {}) {
  const AttentionResults all = batch.run<E>(how);

  for (std::size_t i = 0; i < batch.count(); ++i)
    expect_same(batch.part(all, i), batch.alone<E>(i, how.tile), concat_text(" of sequence ", i, batch.sizes.is_causal ? " causal" : ""));
}

// Empty, long, without keys, without queries, causal with more queries than keys, one row.
const Ends kEndsQ{0, 0, 130, 135, 135, 150, 151}, kEndsK{0, 0, 97, 97, 100, 104, 201};

TEST(AttentionVarlen, EachSequenceEqualsACallOfItsOwn) {
  for (bool causal : {false, true}) {
    const AttentionSizes sizes{.Hq = 6, .Hkv = 2, .D = 20, .is_causal = causal, .scale = 0.3};
    expect_each_equals_its_own_call<float>(batch_of<float>(sizes, kEndsQ, kEndsK));
    expect_each_equals_its_own_call<bfloat16>(batch_of<bfloat16>(sizes, kEndsQ, kEndsK));
    expect_each_equals_its_own_call<double>(batch_of<double>(sizes, kEndsQ, kEndsK));
  }
}

TEST(AttentionVarlen, TilesAndLayoutsDoNotMixSequences) {
  const Batch batch = batch_of<float>({.Hq = 4, .Hkv = 2, .D = 8, .is_causal = true, .scale = 0.4}, kEndsQ, kEndsK, 3, 2);
  const Layouts layouts{.q = kHeads, .k = kSequenceFirst, .v = kHeads, .out = kColumns, .dout = kColumns,
                        .dq = kSequenceFirst, .dk = kColumns, .dv = kHeads};
  for (AttentionTile tile : {AttentionTile{1, 1}, {7, 16}, {16, 7}, {64, 64}})
    expect_each_equals_its_own_call<float>(batch, {.tile = tile, .layouts = layouts});
}

TEST(AttentionVarlen, OneSequenceEqualsADenseCall) {
  const Batch batch = batch_of<float>({.Hq = 4, .Hkv = 1, .D = 40, .is_causal = true, .scale = 0.2}, {0, 33}, {0, 65});

  const AttentionResults varlen = batch.run<float>(), dense = run_attention<float>(batch.sizes, batch.inputs);

  expect_same(varlen, dense, "");
}

TEST(AttentionVarlen, RowsPastTheLastSequenceAreZeroAndReachNothing) {
  Batch batch = batch_of<float>({.Hq = 4, .Hkv = 2, .D = 8, .is_causal = true, .scale = 0.4}, {0, 14, 43}, {0, 20, 43}, 2, 3);
  const Batch clean = batch;
  const auto poison = [](Values& values, std::int64_t width, std::int64_t from) {
    std::fill(values.begin() + from * width, values.end(), kNaN);
  };
  poison(batch.inputs.q, batch.q_width(), 43);
  poison(batch.inputs.dout, batch.q_width(), 43);
  poison(batch.inputs.k, batch.k_width(), 43);
  poison(batch.inputs.v, batch.k_width(), 43);

  const AttentionResults got = batch.run<float>();

  expect_same(got, clean.run<float>(), "");
  EXPECT_EQ(rows_of(got.out, batch.q_width(), 43, 45), Values(2 * batch.q_width(), 0.0));
  EXPECT_EQ(rows_of(got.dq, batch.q_width(), 43, 45), Values(2 * batch.q_width(), 0.0));
  EXPECT_EQ(rows_of(got.dk, batch.k_width(), 43, 46), Values(3 * batch.k_width(), 0.0));
  EXPECT_EQ(rows_of(got.dv, batch.k_width(), 43, 46), Values(3 * batch.k_width(), 0.0));
  EXPECT_EQ(columns_of(got.lse, 45, 43, 45), Values(2 * 4, -kInfinity));
}

TEST(AttentionVarlen, NaNOfASequenceStaysInIt) {
  const Batch clean = batch_of<float>({.Hq = 2, .Hkv = 1, .D = 8, .scale = 0.4}, {0, 9, 20, 31}, {0, 12, 19, 40});
  Batch dirty = clean;
  for (Values* values : {&dirty.inputs.k, &dirty.inputs.v}) std::fill(values->begin() + 12 * 8, values->begin() + 19 * 8, kNaN);
  for (Values* values : {&dirty.inputs.q, &dirty.inputs.dout}) std::fill(values->begin() + 9 * 16, values->begin() + 20 * 16, kNaN);

  const AttentionResults a = clean.run<float>(), b = dirty.run<float>();

  for (std::size_t i : {0, 2}) expect_same(clean.part(b, i), clean.part(a, i), concat_text(" of sequence ", i));
  EXPECT_TRUE(std::isnan(b.out[9 * 16]));
}

TEST(AttentionVarlen, CausalWithMoreQueriesThanKeysIsFinite) {
  // A sequence of n queries and one key: only its last row sees the key, with weight 1, so dv is that row of dout.
  Batch batch = batch_of<float16>({.D = 32, .is_causal = true, .scale = 0.2}, {0, 76, 110, 256}, {0, 1, 2, 3});
  for (double& value : batch.inputs.dout) value = 1.0;
  batch.inputs.dlse.clear();

  const AttentionResults r = batch.run<float16>();

  EXPECT_EQ(r.dv, Values(3 * 32, 1.0));
  EXPECT_EQ(r.dk, Values(3 * 32, 0.0));
  EXPECT_EQ(r.dq, Values(256 * 32, 0.0));
  EXPECT_EQ(rows_of(r.out, 32, 0, 75), Values(75 * 32, 0.0));
  EXPECT_EQ(rows_of(r.out, 32, 75, 76), rows_of(batch.inputs.v, 32, 0, 1));
}

TEST(AttentionVarlen, KeysOfSequencesWithoutQueriesHaveZeroGradients) {
  const Batch batch = batch_of<float>({.Hq = 4, .Hkv = 1, .D = 16, .is_causal = true, .scale = 0.25}, {0, 0, 75, 128, 128},
                                      {0, 158, 267, 320, 512});

  const AttentionResults r = batch.run<float>();

  for (const Values* gradient : {&r.dk, &r.dv}) {
    EXPECT_EQ(rows_of(*gradient, 16, 0, 158), Values(158 * 16, 0.0));
    EXPECT_EQ(rows_of(*gradient, 16, 320, 512), Values(192 * 16, 0.0));
  }
}

TEST(AttentionVarlen, WithoutSequencesEveryRowIsZero) {
  const Batch batch = batch_of<float>({.Hq = 2, .Hkv = 2, .D = 4}, {0}, {0}, 3, 5);

  const AttentionResults r = batch.run<float>();

  EXPECT_EQ(r.out, Values(3 * 8, 0.0));
  EXPECT_EQ(r.lse, Values(2 * 3, -kInfinity));
  EXPECT_EQ(r.dq, Values(3 * 8, 0.0));
  EXPECT_EQ(r.dk, Values(5 * 8, 0.0));
  EXPECT_EQ(r.dv, Values(5 * 8, 0.0));
}

TEST(AttentionVarlen, BitsDoNotDependOnThreads) {
  const Batch batch = batch_of<float>({.Hq = 12, .Hkv = 6, .D = 24, .is_causal = true, .scale = 0.2}, kEndsQ, kEndsK, 1, 1);
  const ThreadsGuard guard;
  set_num_threads(1);
  const AttentionResults one = batch.run<float>();
  set_num_threads(4);
  const AttentionResults four = batch.run<float>();

  expect_same(four, one, "");
}

}  // namespace
}  // namespace heddle::test
