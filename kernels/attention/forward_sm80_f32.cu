#include "kernels/attention/attention_sm80_f32.h"
#include "kernels/attention/launch_sm80_f32.h"

// FlashAttention forward in float32. Dao 2023, "FlashAttention-2", algorithm 1.

namespace heddle::cuda::sm80 {
namespace f32 {
namespace {

struct ForwardParams {
  Operand<const float> q, k, v;
  Operand<float> out;
  float* lse;
  std::int64_t lse_batch, lse_head, lse_row;
  Batch all;
};

// The running softmax of a lane's rows g + 8 h.
template <int kM>
struct RunningSoftmax {
  float max[2 * kM];
  float sum[2 * kM];  // the lane's own part

  __device__ __forceinline__ RunningSoftmax() {
    for (int h = 0; h < 2 * kM; ++h) max[h] = -INFINITY, sum[h] = 0.0f;
  }

  // Turns scores into probabilities relative to the new maximum. factor: what the earlier ones have to be multiplied by.
  template <int kBlocks>
  __device__ __forceinline__ void add(Results<kM, kBlocks>& scores, float scale_log2, float (&factor)[2 * kM]) {
#pragma unroll
    for (int h = 0; h < 2 * kM; ++h) {
      float largest = max[h];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
        largest = fmaxf(largest, fmaxf(scores[h / 2][j][h % 2 * 2], scores[h / 2][j][h % 2 * 2 + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
      // A row that has seen no key yet keeps -inf; 0 in its place keeps the exponents from becoming NaN.
      const float safe = largest == -INFINITY ? 0.0f : largest;
      // From the difference: the maximum times the scale is not the product rounded, and a factor that is not quite 1 in every
      // tile adds up.
      const float shift = safe * scale_log2;
      factor[h] = exp2f((max[h] - safe) * scale_log2);
      max[h] = largest;
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[h / 2][j][h % 2 * 2 + e];
          score = exp2f(fmaf(score, scale_log2, -shift));
          added += score;
        }
      sum[h] = sum[h] * factor[h] + added;
    }
  }
};

// Scores of keys from `first` on: those that a row does not see become -inf.
template <int kM, int kColumns>
__device__ __forceinline__ void hide_scores(Results<kM, kColumns>& scores, int first, const int (&visible)[2 * kM]) {
#pragma unroll
  for (int h = 0; h < 2 * kM; ++h)
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (first + 8 * n + 2 * static_cast<int>(threadIdx.x % 4) + e >= visible[h]) scores[h / 2][n][h % 2 * 2 + e] = -INFINITY;
}

// A block makes kRows rows of one head.
template <typename S>
__global__ void __launch_bounds__(S::kThreads) forward_kernel(const __grid_constant__ ForwardParams p, std::int64_t tiles) {
  constexpr int kHead = S::kHead, kM = S::kM, kStream = S::kStream, kThreads = S::kThreads, kRows = S::kRows;
  extern __shared__ __align__(16) float memory[];
  float* const queries = memory;
  float* const keys = queries + kRows * kPitch<kHead>;
  float* const values = keys + kStream * kPitch<kHead>;

  const std::int64_t head = blockIdx.x / tiles % p.all.Hq;
  const Sequence sequence(p.all, blockIdx.x / tiles / p.all.Hq);
  const AttentionMask& mask = sequence.mask;
  // The last tile of a causal head is the longest: it goes first.
  const int first = static_cast<int>(tiles - 1 - blockIdx.x % tiles) * kRows;
  const int Sq = static_cast<int>(mask.Sq), Sk = static_cast<int>(mask.Sk), D = p.all.D;
  if (first >= Sq) return;
  const std::int64_t key_head = head / (p.all.Hq / p.all.Hkv);
  const auto k = p.k.rows(sequence.batch, key_head, sequence.key), v = p.v.rows(sequence.batch, key_head, sequence.key);

  const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  const int row = first + warp * kM * kBlockRows;  // the warp's first
  int visible[2 * kM];
#pragma unroll
  for (int h = 0; h < 2 * kM; ++h) visible[h] = static_cast<int>(mask.visible_keys(min(row + g + 8 * h, Sq - 1)));
  const int end = static_cast<int>(mask.visible_keys(min(first + kRows, Sq) - 1)), all_see = static_cast<int>(mask.visible_keys(first));

  Sums<kM, kHead> sums;
  sums.clear();
  RunningSoftmax<kM> softmax;
  copy_tile<kHead, kRows, kThreads>(queries, p.q.rows(sequence.batch, head, sequence.query), first, Sq, D);
  if (end > 0) copy_tile<kHead, kStream, kThreads>(keys, k, 0, Sk, D);
  for (int j = 0; j < end; j += kStream) {
    wait_for_tiles();
    copy_tile<kHead, kStream, kThreads>(values, v, j, Sk, D);
    Results<kM, kStream / 8> scores;
    float factor[2 * kM];
    multiply_scores<kHead, kStream, kM>(scores, queries + warp * kM * kBlockRows * kPitch<kHead>, keys);
    if (j + kStream > all_see) hide_scores(scores, j, visible);
    softmax.add(scores, p.all.scale_log2, factor);
    wait_for_tiles();
    if (j + kStream < end) copy_tile<kHead, kStream, kThreads>(keys, k, j + kStream, Sk, D);
    if (j + kStream > all_see)
      take_not_finite<kHead, kStream, kThreads>(sums, values, 0, [&](int h, int key) { return j + key < visible[h]; });
    multiply_weights<kHead, kStream>(sums, factor, scores, values, 0);
  }

  float inverse[2 * kM];
#pragma unroll
  for (int h = 0; h < 2 * kM; ++h) {
    float sum = softmax.sum[h];
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    inverse[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int at = row + g + 8 * h;
    if (t == 0 && at < Sq)
      p.lse[sequence.batch * p.lse_batch + head * p.lse_head + (sequence.query + at) * p.lse_row] =
          sum == 0.0f ? -INFINITY : softmax.max[h] * p.all.scale + logf(sum);
  }
  store_sums(sums, inverse, p.out.rows(sequence.batch, head, sequence.query), row, Sq, 0, D);
}

}  // namespace
}  // namespace f32

void forward_f32(const AttentionForwardArgs& args, const ExecContext& ctx) {
  using namespace f32;
  with_shape(args.q.shape[3], [&](auto shape) {
    using S = typename decltype(shape)::Forward;
    const Batch all = batch_of(args);
    const std::int64_t tiles = tile_count(all.longest_q, S::kRows);
    const auto& lse = args.lse.strides;
    const ForwardParams p{Operand<const float>(args.q), Operand<const float>(args.k), Operand<const float>(args.v), Operand<float>(args.out),
                          args.lse.as<float>(), lse[0], lse[1], lse[2], all};
    launch<S>(forward_kernel<S>, tiles * all.Hq * all.count, "attention", ctx, p, tiles);
  });
}

}  // namespace heddle::cuda::sm80
