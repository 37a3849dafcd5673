#pragma once

#include <cuda.h>

#include "kernels/attention/attention.h"
#include "kernels/attention/backward_prepare.h"

// The Hopper variant: wgmma products fed by TMA. Head sizes that are multiples of 8 up to 128, bfloat16 and float16.

namespace heddle::cuda::sm90 {

AttentionSupport supports(const AttentionProblem& problem, AttentionPass pass);
std::int64_t workspace_bytes(const AttentionProblem& problem, AttentionPass pass);
void forward(const AttentionForwardArgs& args, void* workspace, const ExecContext& ctx);
void backward(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx);

// The backward kernel's tiles: columns that hold a head, and query rows at a time.
constexpr int backward_columns(std::int64_t D) { return D <= 64 ? 64 : 128; }
constexpr int backward_rows(std::int64_t D) { return D <= 64 ? 128 : 64; }
// Counters a tile of query rows and head, for deterministic sums of dq.
inline constexpr int kBackwardTurns = 2;

// What the main backward kernel reads and adds to beside its arguments; see backward_prepare.h.
struct BackwardPlan {
  PaddedRows rows;
  float* dq_sum;    // [Hq, total_rows, backward_columns(D)], DqOrder::warpgroup_blocks
  float* lse_log2;  // [Hq, total_rows]
  float* delta;     // [Hq, total_rows]
  unsigned* turns;  // [Hq, total_rows / backward_rows(D), kBackwardTurns], zeros; null: dq is summed in any order
  ConstView dout;   // as TMA can read it
  bool starts_early;  // launch.cuh, Note: Kernels that start early
};

// One per tile of columns, in a file each: they take most of the compile time.
void forward_d64(const AttentionForwardArgs& args, const ExecContext& ctx);
void forward_d128(const AttentionForwardArgs& args, const ExecContext& ctx);
void backward_d64(const AttentionBackwardArgs& args, const BackwardPlan& plan, const ExecContext& ctx);
void backward_d128(const AttentionBackwardArgs& args, const BackwardPlan& plan, const ExecContext& ctx);

// The TMA description of a [B, S, H, D] view for boxes of `rows` rows by 64 columns, 128-byte swizzled.
CUtensorMap tensor_map(const ConstView& view, int rows);

}  // namespace heddle::cuda::sm90
