#include "kernels/attention/attention_sm80_f32.h"
#include "kernels/attention/backward_prepare.h"
#include "kernels/attention/launch_sm80_f32.h"

// FlashAttention backward in float32. Dao 2023, "FlashAttention-2", algorithm 2, with two walks: one kernel keeps queries and
// makes dq, the other keeps keys and makes dk and dv. Seven products a pair of tiles instead of five, but no sum is shared between
// blocks: neither atomics nor turns, and the same bits in every run.

namespace heddle::cuda::sm80 {
namespace f32 {
namespace {

constexpr int kPaddedTile = 64;  // a multiple of every tile of rows below

struct BackwardParams {
  Operand<const float> q, k, v, dout;
  Operand<float> dq, dk, dv;
  const float* lse_log2;  // and delta: [Hq, padded.total_rows]
  const float* delta;
  PaddedRows padded;
  Batch all;
  std::int64_t tiles;  // of the longest sequence
};

// The warp's 16 rows of probabilities become gradients of scaled scores: ds = p (dp - delta), 0 where a pair is hidden.
// shift(e, j) and delta(e, j): of element e of block j.
template <int kBlocks, typename Visible, typename Shift, typename Delta>
__device__ __forceinline__ void softmax_backward(float (&p)[kBlocks][4], float (&dp)[kBlocks][4], float scale_log2, bool is_masked,
                                                 const Visible& is_visible, const Shift& shift, const Delta& delta) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      p[j][e] = exp2f(fmaf(p[j][e], scale_log2, -shift(j, e)));
      dp[j][e] = p[j][e] * (dp[j][e] - delta(j, e));
      if (is_masked && !is_visible(e / 2, 8 * j + 2 * t + e % 2)) p[j][e] = dp[j][e] = 0.0f;
    }
}

template <typename S>
__global__ void __launch_bounds__(S::kBackwardWarps * kWarp) query_gradient_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int kHead = S::kHead, kStream = S::kStream, kThreads = S::kBackwardWarps * kWarp, kRows = S::kBackwardWarps * kWarpRows;
  extern __shared__ __align__(16) float memory[];
  float* const queries = memory;
  float* const douts = queries + kRows * kPitch<kHead>;
  float* const keys = douts + kRows * kPitch<kHead>;
  float* const values = keys + kStream * kPitch<kHead>;

  const std::int64_t head = blockIdx.x / p.tiles % p.all.Hq, index = blockIdx.x / p.tiles / p.all.Hq;
  const Sequence sequence(p.all, index);
  const AttentionMask& mask = sequence.mask;
  const int first = static_cast<int>(p.tiles - 1 - blockIdx.x % p.tiles) * kRows;
  const int Sq = static_cast<int>(mask.Sq), Sk = static_cast<int>(mask.Sk), D = p.all.D;
  if (first >= Sq) return;
  const std::int64_t key_head = head / (p.all.Hq / p.all.Hkv);
  const auto k = p.k.rows(sequence.batch, key_head, sequence.key), v = p.v.rows(sequence.batch, key_head, sequence.key);

  const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4;
  const int row = first + warp * kWarpRows;
  const std::int64_t padded = head * p.padded.total_rows + PaddedSequence(p.padded, index).padded;
  int visible[2];
  float shift[2], delta[2];
  for (int half = 0; half < 2; ++half) {
    const int at = row + g + 8 * half;
    visible[half] = static_cast<int>(mask.visible_keys(min(at, Sq - 1)));
    shift[half] = p.lse_log2[padded + at];
    delta[half] = p.delta[padded + at];
  }
  const int end = static_cast<int>(mask.visible_keys(min(first + kRows, Sq) - 1)), all_see = static_cast<int>(mask.visible_keys(first));

  Sums<kHead> sums;
  sums.clear();
  copy_tile<kHead, kRows, kThreads>(queries, p.q.rows(sequence.batch, head, sequence.query), first, Sq, D);
  copy_tile<kHead, kRows, kThreads>(douts, p.dout.rows(sequence.batch, head, sequence.query), first, Sq, D);
  for (int j = 0; j < end; j += kStream) {
    __syncthreads();  // whoever still reads the keys of the step before
    copy_tile<kHead, kStream, kThreads>(keys, k, j, Sk, D);
    copy_tile<kHead, kStream, kThreads>(values, v, j, Sk, D);
    wait_for_tiles();
    const bool is_masked = j + kStream > all_see;
    const auto is_visible = [&](int half, int key) { return j + key < visible[half]; };
    float scores[kStream / 8][4], ds[kStream / 8][4];
    multiply_scores<kHead, kStream>(scores, queries + warp * kWarpRows * kPitch<kHead>, keys);
    multiply_scores<kHead, kStream>(ds, douts + warp * kWarpRows * kPitch<kHead>, values);
    softmax_backward(scores, ds, p.all.scale_log2, is_masked, is_visible, [&](int, int e) { return shift[e / 2]; },
                     [&](int, int e) { return delta[e / 2]; });
    if (is_masked) take_not_finite<kHead, kStream, kThreads>(sums, keys, 0, is_visible);
    multiply_weights<kHead, kStream>(sums, {1.0f, 1.0f}, ds, keys, 0);
  }
  store_sums(sums, {p.all.scale, p.all.scale}, p.dq.rows(sequence.batch, head, sequence.query), row, Sq, 0, D);
}

// A block keeps 16 keys a warp and makes the columns of dk and dv from `column` on.
template <typename S>
__global__ void __launch_bounds__(S::kBackwardWarps * kWarp) key_gradients_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int kHead = S::kHead, kStream = S::kStream, kThreads = S::kBackwardWarps * kWarp, kRows = S::kBackwardWarps * kWarpRows;
  extern __shared__ __align__(16) float memory[];
  float* const keys = memory;
  float* const values = keys + kRows * kPitch<kHead>;
  float* const queries = values + kRows * kPitch<kHead>;
  float* const douts = queries + kStream * kPitch<kHead>;

  constexpr int kParts = kHead / S::kColumns;
  const int column = blockIdx.x % kParts * S::kColumns, first = static_cast<int>(blockIdx.x / kParts % p.tiles) * kRows;
  const std::int64_t key_head = blockIdx.x / kParts / p.tiles % p.all.Hkv, index = blockIdx.x / kParts / p.tiles / p.all.Hkv;
  const Sequence sequence(p.all, index);
  const AttentionMask& mask = sequence.mask;
  const int Sq = static_cast<int>(mask.Sq), Sk = static_cast<int>(mask.Sk), D = p.all.D, group = p.all.Hq / p.all.Hkv;
  if (first >= Sk || column >= D) return;

  const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  const int row = first + warp * kWarpRows;
  const std::int64_t padded = PaddedSequence(p.padded, index).padded;
  int seen_from[2];
  for (int half = 0; half < 2; ++half) seen_from[half] = static_cast<int>(mask.first_query(min(row + g + 8 * half, Sk - 1)));
  const int start = static_cast<int>(mask.first_query(first)) / kStream * kStream;
  const int all_see = static_cast<int>(mask.first_query(min(first + kRows, Sk) - 1));  // the first query that sees every key here

  Sums<S::kColumns> dk, dv;
  dk.clear(), dv.clear();
  copy_tile<kHead, kRows, kThreads>(keys, p.k.rows(sequence.batch, key_head, sequence.key), first, Sk, D);
  copy_tile<kHead, kRows, kThreads>(values, p.v.rows(sequence.batch, key_head, sequence.key), first, Sk, D);
  for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    const auto q = p.q.rows(sequence.batch, head, sequence.query), dout = p.dout.rows(sequence.batch, head, sequence.query);
    for (int i = start; i < Sq; i += kStream) {
      __syncthreads();  // whoever still reads the queries of the step before
      copy_tile<kHead, kStream, kThreads>(queries, q, i, Sq, D);
      copy_tile<kHead, kStream, kThreads>(douts, dout, i, Sq, D);
      wait_for_tiles();
      const bool is_masked = i < all_see;
      const auto is_visible = [&](int half, int query) { return i + query >= seen_from[half]; };
      const float *shift = p.lse_log2 + head * p.padded.total_rows + padded + i, *delta = p.delta + (shift - p.lse_log2);
      float weights[kStream / 8][4], ds[kStream / 8][4];
      multiply_scores<kHead, kStream>(weights, keys + warp * kWarpRows * kPitch<kHead>, queries);
      multiply_scores<kHead, kStream>(ds, values + warp * kWarpRows * kPitch<kHead>, douts);
      softmax_backward(weights, ds, p.all.scale_log2, is_masked, is_visible,
                       [&](int j, int e) { return shift[8 * j + 2 * t + e % 2]; }, [&](int j, int e) { return delta[8 * j + 2 * t + e % 2]; });
      if (is_masked) {
        take_not_finite<kHead, kStream, kThreads>(dv, douts, column, is_visible);
        take_not_finite<kHead, kStream, kThreads>(dk, queries, column, is_visible);
      }
      multiply_weights<kHead, kStream>(dv, {1.0f, 1.0f}, weights, douts, column);
      multiply_weights<kHead, kStream>(dk, {1.0f, 1.0f}, ds, queries, column);
    }
  }
  store_sums(dk, {p.all.scale, p.all.scale}, p.dk.rows(sequence.batch, key_head, sequence.key), row, Sk, column, D);
  store_sums(dv, {1.0f, 1.0f}, p.dv.rows(sequence.batch, key_head, sequence.key), row, Sk, column, D);
}

PaddedRows padded_rows(const Batch& all) {
  return all.cu_seqlens_q == nullptr ? PaddedRows::dense(all.count, all.longest_q, kPaddedTile)
                                     : PaddedRows::ragged(all.count, all.longest_q, all.Tq, all.cu_seqlens_q, kPaddedTile);
}

}  // namespace
}  // namespace f32

std::int64_t backward_workspace_bytes_f32(const AttentionProblem& problem) {
  const PaddedRows padded = problem.is_varlen ? PaddedRows::ragged(problem.B, problem.Sq, problem.Tq, nullptr, f32::kPaddedTile)
                                              : PaddedRows::dense(problem.B, problem.Sq, f32::kPaddedTile);
  return 2 * problem.Hq * padded.total_rows * static_cast<std::int64_t>(sizeof(float));
}

void backward_f32(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx) {
  using namespace f32;
  const Batch all = batch_of(args);
  const PaddedRows padded = padded_rows(all);
  float* const lse_log2 = static_cast<float*>(workspace);
  float* const delta = lse_log2 + all.Hq * padded.total_rows;
  backward_prepare({.out = args.out, .dout = args.dout, .lse = args.lse, .dlse = args.dlse, .rows = padded, .lse_log2 = lse_log2, .delta = delta}, ctx);
  with_shape(all.D, [&](auto shape) {
    using S = decltype(shape);
    constexpr int kRows = S::kBackwardWarps * kWarpRows, kThreads = S::kBackwardWarps * kWarp;
    BackwardParams p{Operand<const float>(args.q), Operand<const float>(args.k), Operand<const float>(args.v), Operand<const float>(args.dout),
                     Operand<float>(args.dq), Operand<float>(args.dk), Operand<float>(args.dv), lse_log2, delta, padded, all,
                     tile_count(all.longest_q, kRows)};
    launch(query_gradient_kernel<S>, p, p.tiles * all.Hq * all.count, kThreads, S::kBackwardBytes, "attention backward: dq", ctx);
    p.tiles = tile_count(all.longest_k, kRows);
    launch(key_gradients_kernel<S>, p, p.tiles * all.Hkv * all.count * (S::kHead / S::kColumns), kThreads, S::kBackwardBytes,
           "attention backward: dk and dv", ctx);
  });
}

}  // namespace heddle::cuda::sm80
