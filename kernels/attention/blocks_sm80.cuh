#pragma once

#include <limits>

#include "kernels/attention/params_sm80.h"
#include "kernels/attention/shared_tile_sm80.cuh"
#include "kernels/runtime/check.h"

// Which part of a problem a block works on.

namespace heddle::cuda::sm80 {

// Note: Block order
// Blocks start in the order of their numbers. Heads are walked in sections whose keys and values (for the backward: queries,
// gradients and sums) fit the L2 cache; within a section every head's first tile comes before any head's second.
struct BlockIndex {
  int tile, head, sequence;
};
__device__ __forceinline__ BlockIndex block_index(int tiles, int heads, int sequences, int section_heads) {
  const int section_tiles = section_heads * tiles;
  const int section = static_cast<int>(blockIdx.x) / section_tiles, within = static_cast<int>(blockIdx.x) % section_tiles;
  const int heads_here = min(section_heads, heads * sequences - section * section_heads);
  const int pair = section * section_heads + within % heads_here;
  return {within / heads_here, pair % heads, pair / heads};
}

// How many blocks that is.
inline unsigned block_count(int tiles, int heads, const Sequences& sequences) {
  const std::int64_t blocks = std::int64_t{1} * tiles * heads * sequences.count;
  HEDDLE_CHECK(blocks <= std::numeric_limits<int>::max(), "attention: ", sequences.count, " sequences of ", heads, " heads and ", tiles,
               " tiles are more than one launch takes; split the batch");
  return static_cast<unsigned>(blocks);
}

// One sequence: its batch entry, its first rows there and its lengths.
struct Sequence {
  int batch, Sq, Sk;
  std::int64_t q_row, k_row;

  __device__ __forceinline__ Sequence(const Sequences& all, int index) : batch(index), Sq(all.longest_q), Sk(all.longest_k), q_row(0), k_row(0) {
    if (all.cu_seqlens_q == nullptr) return;
    batch = 0;
    q_row = all.cu_seqlens_q[index];
    k_row = all.cu_seqlens_k[index];
    Sq = all.cu_seqlens_q[index + 1] - static_cast<int>(q_row);
    Sk = all.cu_seqlens_k[index + 1] - static_cast<int>(k_row);
  }
};

template <typename T>
__device__ __forceinline__ GlobalRows<T> rows_of(const Operand& x, int batch, std::int64_t row, int head) {
  return {static_cast<T*>(x.data) + batch * x.batch + row * x.row + head * x.head, x.row};
}

}  // namespace heddle::cuda::sm80
