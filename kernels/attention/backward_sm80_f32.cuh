#pragma once

#include "kernels/attention/backward_prepare.h"
#include "kernels/attention/launch_sm80_f32.h"

// FlashAttention backward in float32. Dao 2023, "FlashAttention-2", algorithm 2, with two walks: one kernel keeps queries and
// makes dq, the other keeps keys and makes dk and dv. Seven products a pair of tiles instead of five, but no sum is shared between
// blocks: neither atomics nor turns, and the same bits in every run.

namespace heddle::cuda::sm80::f32 {

struct BackwardParams {
  Operand<const float> q, k, v, dout;
  Operand<float> dq, dk, dv;
  const float* lse_log2;  // and delta: [Hq, padded.total_rows]
  const float* delta;
  PaddedRows padded;
  Batch all;
};

// The warp's rows of probabilities become gradients of scaled scores: ds = p (dp - delta), 0 where a pair is hidden.
// shift(h, column) and delta(h, column): of the pair of the lane's row g + 8 h and a row of the tile.
template <int kM, int kBlocks, typename Visible, typename Shift, typename Delta>
__device__ __forceinline__ void softmax_backward(Results<kM, kBlocks>& p, Results<kM, kBlocks>& dp, float scale_log2, bool is_masked,
                                                 const Visible& is_visible, const Shift& shift, const Delta& delta) {
#pragma unroll
  for (int h = 0; h < 2 * kM; ++h)
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * j + threadIdx.x % 4 * 2 + e;
        float &weight = p[h / 2][j][h % 2 * 2 + e], &gradient = dp[h / 2][j][h % 2 * 2 + e];
        weight = exp2f(fmaf(weight, scale_log2, -shift(h, column)));
        gradient = weight * (gradient - delta(h, column));
        if (is_masked && !is_visible(h, column)) weight = gradient = 0.0f;
      }
}

template <int kM>
struct Factors {
  float at[2 * kM];
  __device__ __forceinline__ explicit Factors(float value) {
    for (int h = 0; h < 2 * kM; ++h) at[h] = value;
  }
};

void query_gradient(const BackwardParams& p, const ExecContext& ctx);
void key_gradients(const BackwardParams& p, const ExecContext& ctx);

}  // namespace heddle::cuda::sm80::f32
