#include "kernels/attention/backward_sm80_f32.cuh"

// The walk that keeps keys.

namespace heddle::cuda::sm80::f32 {
namespace {

// A block keeps 16 keys a warp and makes the columns of dk and dv from `column` on.
template <typename S>
__global__ void __launch_bounds__(S::kThreads) key_gradients_kernel(const __grid_constant__ BackwardParams p, std::int64_t tiles) {
  constexpr int kHead = S::kHead, kM = S::kM, kStream = S::kStream, kThreads = S::kThreads, kRows = S::kRows;
  extern __shared__ __align__(16) float memory[];
  float* const keys = memory;
  float* const values = keys + kRows * kPitch<kHead>;
  float* const queries = values + kRows * kPitch<kHead>;
  float* const douts = queries + kStream * kPitch<kHead>;

  constexpr int kParts = kHead / S::kColumns;
  const int column = blockIdx.x % kParts * S::kColumns, first = static_cast<int>(blockIdx.x / kParts % tiles) * kRows;
  const std::int64_t key_head = blockIdx.x / kParts / tiles % p.all.Hkv, index = blockIdx.x / kParts / tiles / p.all.Hkv;
  const Sequence sequence(p.all, index);
  const AttentionMask& mask = sequence.mask;
  const int Sq = static_cast<int>(mask.Sq), Sk = static_cast<int>(mask.Sk), D = p.all.D, group = p.all.Hq / p.all.Hkv;
  if (first >= Sk || column >= D) return;

  const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4;
  const int row = first + warp * kM * kBlockRows;
  const std::int64_t padded = PaddedSequence(p.padded, index).padded;
  int seen_from[2 * kM];
#pragma unroll
  for (int h = 0; h < 2 * kM; ++h) seen_from[h] = static_cast<int>(mask.first_query(min(row + g + 8 * h, Sk - 1)));
  const int start = static_cast<int>(mask.first_query(first)) / kStream * kStream;
  const int all_see = static_cast<int>(mask.first_query(min(first + kRows, Sk) - 1));  // the first query that sees every key here

  Sums<kM, S::kColumns> dk, dv;
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
      const auto is_visible = [&](int h, int query) { return i + query >= seen_from[h]; };
      const float *shift = p.lse_log2 + head * p.padded.total_rows + padded + i, *delta = p.delta + (shift - p.lse_log2);
      Results<kM, kStream / 8> weights, ds;
      multiply_scores<kHead, kStream, kM>(weights, keys + warp * kM * kBlockRows * kPitch<kHead>, queries);
      multiply_scores<kHead, kStream, kM>(ds, values + warp * kM * kBlockRows * kPitch<kHead>, douts);
      softmax_backward<kM>(weights, ds, p.all.scale_log2, is_masked, is_visible, [&](int, int query) { return shift[query]; },
                           [&](int, int query) { return delta[query]; });
      if (is_masked) {
        take_not_finite<kHead, kStream, kThreads>(dv, douts, column, is_visible);
        take_not_finite<kHead, kStream, kThreads>(dk, queries, column, is_visible);
      }
      multiply_weights<kHead, kStream>(dv, Factors<kM>(1.0f).at, weights, douts, column);
      multiply_weights<kHead, kStream>(dk, Factors<kM>(1.0f).at, ds, queries, column);
    }
  }
  store_sums(dk, Factors<kM>(p.all.scale).at, p.dk.rows(sequence.batch, key_head, sequence.key), row, Sk, column, D);
  store_sums(dv, Factors<kM>(1.0f).at, p.dv.rows(sequence.batch, key_head, sequence.key), row, Sk, column, D);
}

}  // namespace

void key_gradients(const BackwardParams& p, const ExecContext& ctx) {
  with_shape(p.all.D, [&](auto shape) {
    using S = typename decltype(shape)::KeyGradients;
    const std::int64_t tiles = tile_count(p.all.longest_k, S::kRows);
    launch<S>(key_gradients_kernel<S>, tiles * p.all.Hkv * p.all.count * (S::kHead / S::kColumns), "attention backward: dk and dv", ctx, p, tiles);
  });
}

}  // namespace heddle::cuda::sm80::f32
