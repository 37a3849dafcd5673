#include "kernels/attention/backward_sm80_f32.cuh"

// The walk that keeps queries.

namespace heddle::cuda::sm80::f32 {
namespace {

template <typename S>
__global__ void __launch_bounds__(S::kThreads) query_gradient_kernel(const __grid_constant__ BackwardParams p, std::int64_t tiles) {
  constexpr int kHead = S::kHead, kM = S::kM, kStream = S::kStream, kThreads = S::kThreads, kRows = S::kRows;
  extern __shared__ __align__(16) float memory[];
  float* const queries = memory;
  float* const douts = queries + kRows * kPitch<kHead>;
  float* const keys = douts + kRows * kPitch<kHead>;
  float* const values = keys + kStream * kPitch<kHead>;

  const std::int64_t head = blockIdx.x / tiles % p.all.Hq, index = blockIdx.x / tiles / p.all.Hq;
  const Sequence sequence(p.all, index);
  const AttentionMask& mask = sequence.mask;
  const int first = static_cast<int>(tiles - 1 - blockIdx.x % tiles) * kRows;
  const int Sq = static_cast<int>(mask.Sq), Sk = static_cast<int>(mask.Sk), D = p.all.D;
  if (first >= Sq) return;
  const std::int64_t key_head = head / (p.all.Hq / p.all.Hkv);
  const auto k = p.k.rows(sequence.batch, key_head, sequence.key), v = p.v.rows(sequence.batch, key_head, sequence.key);

  const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4;
  const int row = first + warp * kM * kBlockRows;
  const std::int64_t padded = head * p.padded.total_rows + PaddedSequence(p.padded, index).padded;
  int visible[2 * kM];
  float shift[2 * kM], delta[2 * kM];
#pragma unroll
  for (int h = 0; h < 2 * kM; ++h) {
    const int at = row + g + 8 * h;
    visible[h] = static_cast<int>(mask.visible_keys(min(at, Sq - 1)));
    shift[h] = p.lse_log2[padded + at];
    delta[h] = p.delta[padded + at];
  }
  const int end = static_cast<int>(mask.visible_keys(min(first + kRows, Sq) - 1)), all_see = static_cast<int>(mask.visible_keys(first));

  Sums<kM, kHead> sums;
  sums.clear();
  copy_tile<kHead, kRows, kThreads>(queries, p.q.rows(sequence.batch, head, sequence.query), first, Sq, D);
  copy_tile<kHead, kRows, kThreads>(douts, p.dout.rows(sequence.batch, head, sequence.query), first, Sq, D);
  for (int j = 0; j < end; j += kStream) {
    __syncthreads();  // whoever still reads the keys of the step before
    copy_tile<kHead, kStream, kThreads>(keys, k, j, Sk, D);
    copy_tile<kHead, kStream, kThreads>(values, v, j, Sk, D);
    wait_for_tiles();
    const bool is_masked = j + kStream > all_see;
    const auto is_visible = [&](int h, int key) { return j + key < visible[h]; };
    Results<kM, kStream / 8> scores, ds;
    multiply_scores<kHead, kStream, kM>(scores, queries + warp * kM * kBlockRows * kPitch<kHead>, keys);
    multiply_scores<kHead, kStream, kM>(ds, douts + warp * kM * kBlockRows * kPitch<kHead>, values);
    softmax_backward<kM>(scores, ds, p.all.scale_log2, is_masked, is_visible, [&](int h, int) { return shift[h]; },
                         [&](int h, int) { return delta[h]; });
    if (is_masked) take_not_finite<kHead, kStream, kThreads>(sums, keys, 0, is_visible);
    multiply_weights<kHead, kStream>(sums, Factors<kM>(1.0f).at, ds, keys, 0);
  }
  store_sums(sums, Factors<kM>(p.all.scale).at, p.dq.rows(sequence.batch, head, sequence.query), row, Sq, 0, D);
}

}  // namespace

void query_gradient(const BackwardParams& p, const ExecContext& ctx) {
  with_shape(p.all.D, [&](auto shape) {
    using S = typename decltype(shape)::QueryGradient;
    const std::int64_t tiles = tile_count(p.all.longest_q, S::kRows);
    launch<S>(query_gradient_kernel<S>, tiles * p.all.Hq * p.all.count, "attention backward: dq", ctx, p, tiles);
  });
}

}  // namespace heddle::cuda::sm80::f32
