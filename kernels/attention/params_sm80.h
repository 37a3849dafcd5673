#pragma once

#include <cstdint>

#include "kernels/attention/backward_prepare.h"

// What the sm80 kernels receive. Lengths and offsets of one sequence fit 32 bits, addresses are formed in 64.

namespace heddle::cuda::sm80 {

// A [B, S, H, D] operand: strides in elements, D side by side, every row at a multiple of 16 bytes.
struct Operand {
  void* data = nullptr;
  std::int64_t batch = 0, row = 0, head = 0;
};

// The sequences of a batch: one a batch entry, all of one length, or cut out of one batch entry by cu_seqlens.
struct Sequences {
  const std::int32_t* cu_seqlens_q = nullptr;  // both null: all are as long as the longest
  const std::int32_t* cu_seqlens_k = nullptr;
  int count = 0;
  int longest_q = 0, longest_k = 0;
};

struct ForwardParams {
  Operand q, k, v, out;
  float* lse = nullptr;
  std::int64_t lse_batch = 0, lse_head = 0, lse_row = 0;
  Sequences sequences;
  int heads = 0;  // query heads
  int group = 0;  // query heads a key head
  int D = 0;
  int section_heads = 0;  // Note: Block order
  bool is_causal = false;
  float scale = 0, scale_log2 = 0;  // scale * log2(e)
};

struct BackwardParams {
  Operand q, k, v, dout, dk, dv;
  const float* lse_log2 = nullptr;  // and delta: [heads, rows.total_rows], as backward_prepare writes them
  const float* delta = nullptr;
  float* dq_sum = nullptr;  // [heads, rows.total_rows, columns] in DqOrder::warpgroup_blocks
  int columns = 0;
  PaddedRows rows;
  unsigned* turns = nullptr;  // deterministic: for every head and tile of padded rows, the key tile whose turn it is; or null
  Sequences sequences;
  int heads = 0, group = 0, D = 0;
  int section_heads = 0;
  bool is_causal = false;
  float scale = 0, scale_log2 = 0;
};

}  // namespace heddle::cuda::sm80
