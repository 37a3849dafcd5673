#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// What the CUDA backward kernels do before and after their main loop, whatever instructions that loop uses.

namespace heddle::cuda {

// Note: Padded rows
// Per-row buffers of the backward pass (log-sum-exp, delta, sums of dq) give every sequence whole tiles of `tile` query rows,
// so that a tile never holds rows of two sequences and needs no bounds. All kernels of a pass share one PaddedRows. Dense
// sequence b starts at b * round_up(Sq, tile). With variable lengths sequence b starts at
// floor((cu_seqlens[b] + b * tile) / tile) * tile, which needs no sum over rounded lengths: adding `tile` once a sequence
// leaves room for its rounding, since floor(x + n + tile) >= floor(x) + round_up(n) in units of whole tiles.
struct PaddedRows {
  std::int64_t sequences = 0;
  std::int64_t longest = 0;  // rows of the longest sequence
  int tile = 0;              // a multiple of 16; of 64 with DqOrder::warpgroup_blocks
  const std::int32_t* cu_seqlens = nullptr;  // [sequences + 1] on the device; null: all are `longest` rows, one a batch entry
  std::int64_t total_rows = 0;  // in the padded buffers

  static PaddedRows dense(std::int64_t B, std::int64_t Sq, int tile) {
    return {B, Sq, tile, nullptr, B * ((Sq + tile - 1) / tile * tile)};
  }
  // `rows` in all, Tq of the contract in attention.h.
  static PaddedRows ragged(std::int64_t sequences, std::int64_t longest, std::int64_t rows, const std::int32_t* cu_seqlens, int tile) {
    return {sequences, longest, tile, cu_seqlens, (rows + sequences * tile) / tile * tile};
  }

  __host__ __device__ std::int64_t longest_padded() const { return (longest + tile - 1) / tile * tile; }
};

// One sequence of them.
struct PaddedSequence {
  std::int64_t batch;   // of the tensors
  std::int64_t row;     // its first row there
  std::int64_t length;
  std::int64_t padded;  // its first row in the padded buffers

  __device__ PaddedSequence(const PaddedRows& rows, std::int64_t index)
      : batch(index), row(0), length(rows.longest), padded(index * rows.longest_padded()) {
    if (rows.cu_seqlens == nullptr) return;
    batch = 0;
    row = rows.cu_seqlens[index];
    length = rows.cu_seqlens[index + 1] - row;
    padded = (row + index * rows.tile) / rows.tile * rows.tile;
  }
};

// Writes, for every padded row of every sequence and query head:
//   lse_log2  [Hq, total_rows]     lse * log2(e); +inf where lse is -inf and past the end of a sequence, so that
//                                  exp2(score - lse_log2) is 0 there
//   delta     [Hq, total_rows]     sum over D of dout * out, minus dlse if given, in float32; 0 where lse_log2 is +inf
//   dq_sum    [Hq, total_rows, columns]  0; not written if null
//   dout_copy [as dout]            dout, contiguous; not written if null
// out and dout are [B, Sq, Hq, D] float32, bfloat16 or float16 (or [1, Tq, Hq, D]) with any strides, lse and dlse [B, Hq, Sq].
// Dao 2023, "FlashAttention-2", algorithm 2, line 4.
struct BackwardPrepareArgs {
  ConstView out;
  ConstView dout;
  ConstView lse;
  ConstView dlse = {};
  PaddedRows rows;
  float* lse_log2 = nullptr;
  float* delta = nullptr;
  float* dq_sum = nullptr;
  int columns = 0;
  void* dout_copy = nullptr;
};
void backward_prepare(const BackwardPrepareArgs& args, const ExecContext& ctx);

// How dq_sum holds the [columns] values of its rows: row after row; or in blocks of 64 rows by 64 columns, a row of blocks after
// the other, each block in the order in which a warpgroup of sm_90 holds it: float4 number 128 j + t has the columns
// 8 j + 2 (t % 4) + {0, 1} of row 16 (t / 32) + t % 32 / 4, then the same of the row 8 below it.
enum class DqOrder { rows, warpgroup_blocks };

// dq = scale * dq_sum, [B, Sq, Hq, D] float32, bfloat16 or float16 with any strides.
struct BackwardFinishArgs {
  const float* dq_sum = nullptr;
  DqOrder order = DqOrder::rows;
  PaddedRows rows;
  int columns = 0;  // of a row of dq_sum, at least D
  double scale = 1.0;
  MutView dq;
  bool starts_early = false;  // launch.cuh, Note: Kernels that start early; the kernel after backward_prepare may, too
};
void backward_finish(const BackwardFinishArgs& args, const ExecContext& ctx);

}  // namespace heddle::cuda
