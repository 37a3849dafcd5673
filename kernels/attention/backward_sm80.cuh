#pragma once

#include "kernels/attention/attention_sm80.h"
#include "kernels/attention/blocks_sm80.cuh"
#include "kernels/attention/tile_sm80.h"
#include "kernels/runtime/cuda_check.h"

// FlashAttention backward with mma.sync. Dao 2023, "FlashAttention-2", algorithm 2, a block for each tile of keys: with S = q k^T,
// P = exp(scale S - lse), dP = dout v^T and dS = P (dP - delta), it sums dv = P^T dout, dk = scale dS^T q and dq = scale dS k.

namespace heddle::cuda::sm80 {

// Adds four floats to global memory. The order in which blocks come is open.
__device__ __forceinline__ void add_global(float4* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
  float* const parts = reinterpret_cast<float*>(to);
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(parts + i, x[i]);
#endif
}

// Note: Turns
// Deterministic sums of dq: the key tiles add to a tile of rows in the order of their numbers, each after it has seen its own in
// the row tile's counter. A block waits only for blocks that were started before it.
__device__ __forceinline__ void await_turn(const unsigned* turn, unsigned tile) {
  if (threadIdx.x == 0) {
    unsigned now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != tile);
  }
  __syncthreads();
}
__device__ __forceinline__ void pass_turn(unsigned* turn, unsigned tile) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(tile + 1) : "memory");
}

// Addresses of a block's tiles in shared memory.
template <typename Shape>
struct BackwardMemory {
  using KeyTile = SharedTile<Shape::kKeys, Shape::kHead>;
  using QueryTile = SharedTile<Shape::kRows, Shape::kHead>;
  using ScoreTile = SharedTile<Shape::kKeys, Shape::kRows>;  // transposed: a row for each key

  std::uint32_t keys, values, probabilities, gradients;  // gradients: of the scores
  std::uint32_t queries, douts, lse, delta;               // kStages each
  std::uint32_t flags;                                    // of the keys

  __device__ __forceinline__ explicit BackwardMemory(const void* memory) {
    keys = static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
    values = keys + KeyTile::kBytes;
    probabilities = values + KeyTile::kBytes;
    gradients = probabilities + ScoreTile::kBytes;
    queries = gradients + ScoreTile::kBytes;
    douts = queries + Shape::kStages * QueryTile::kBytes;
    lse = douts + Shape::kStages * QueryTile::kBytes;
    delta = lse + Shape::kStages * Shape::kRowBytes;
    flags = delta + Shape::kStages * Shape::kRowBytes;
  }
};

// Adds a warp's part of dq; its first element is that of padded row `row` and column `column`.
template <int kM, int kN>
__device__ __forceinline__ void add_rows(const BackwardParams& p, std::int64_t row, int column, const float (&dq)[kM][kN][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    const std::int64_t at = row + 16 * i;
    float4* const block = reinterpret_cast<float4*>(p.dq_sum) + at / 64 * (p.columns / 64) * 1024 + at % 64 / 16 * kWarp + lane;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int dq_column = column + 8 * j;
      add_global(block + dq_column / 64 * 1024 + dq_column % 64 / 8 * 128, dq[i][j]);
    }
  }
}

// How a block's warps share its products: in a grid of kKeyWarps by kOtherWarps over the transposed scores (keys by rows) and over
// dk and dv (keys by columns of the head), of kRowWarps by the rest over dq.
template <typename Shape>
struct BackwardParts {
  static constexpr int kOtherWarps = Shape::kWarps / Shape::kKeyWarps;
  static constexpr int kKeys = Shape::kKeys / Shape::kKeyWarps, kRows = Shape::kRows / kOtherWarps, kColumns = Shape::kHead / kOtherWarps;
  static constexpr int kDqRows = Shape::kRows / Shape::kRowWarps, kDqColumns = Shape::kHead / (Shape::kWarps / Shape::kRowWarps);

  int key, row, column;     // where this warp's parts start
  int dq_row, dq_column;

  __device__ __forceinline__ BackwardParts() {
    const int warp = threadIdx.x / kWarp;
    key = warp % Shape::kKeyWarps * kKeys;
    row = warp / Shape::kKeyWarps * kRows;
    column = warp / Shape::kKeyWarps * kColumns;
    dq_row = warp % Shape::kRowWarps * kDqRows;
    dq_column = warp / Shape::kRowWarps * kDqColumns;
  }
};

// Which pairs of a part count: key < keys and key <= row + diagonal, numbers from the start of the part.
struct PairMask {
  bool is_needed;
  int keys, diagonal;

  __device__ __forceinline__ bool hides(int key, int row) const { return key >= keys || key > row + diagonal; }
};

// Turns transposed scores into probabilities, and the gradients of probabilities into those of scores. `lse` and `delta` are the
// addresses of the values for the part's first row. Hidden pairs get 0 in both, whatever was there.
template <int kM, int kN>
__device__ __forceinline__ void score_gradients(float (&scores)[kM][kN][4], float (&gradients)[kM][kN][4], std::uint32_t lse, std::uint32_t delta,
                                                float scale_log2, const PairMask& mask) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int row = 8 * j + lane % 4 * 2;
    const float2 row_lse = load_shared_float2(lse + row * 4), row_delta = load_shared_float2(delta + row * 4);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = scores[i][j][e];
        score = exp2_approx(score * scale_log2 - (e % 2 == 0 ? row_lse.x : row_lse.y));
        gradients[i][j][e] = score * (gradients[i][j][e] - (e % 2 == 0 ? row_delta.x : row_delta.y));
      }
  }
  if (!mask.is_needed) return;
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (mask.hides(16 * i + 8 * (e / 2) + lane / 4, 8 * j + lane % 4 * 2 + e % 2)) scores[i][j][e] = gradients[i][j][e] = 0.0f;
}

// Keys that are not finite (Note: Hidden values): `flags` gets a NaN for each of them, 0 for the others, and the scores of such a
// key become NaN; the keys themselves become 0.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ void flag_keys(std::uint32_t keys, std::uint32_t flags) {
  for (int key = threadIdx.x; key < Tile::kRows; key += kThreads) {
    std::uint32_t found = 0;
    for (int column = 0; column < Tile::kColumns; column += 2) found |= not_finite<T>(load_shared(keys + Tile::offset(key, column)));
    store_shared(flags + key * 4, found == 0 ? 0.0f : NAN);
  }
  __syncthreads();
  clear_not_finite<T, Tile, kThreads>(keys);
  __syncthreads();
}
template <int kM, int kN>
__device__ __forceinline__ void add_flags(float (&scores)[kM][kN][4], std::uint32_t flags) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float flag = __uint_as_float(load_shared(flags + (16 * i + 8 * half + threadIdx.x % kWarp / 4) * 4));
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) scores[i][j][2 * half + e] += flag;
    }
}

// The rows of queries that a block of keys visits: tiles of kRows, for each query head of the group.
struct RowTile {
  int head, tile;
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams p) {
  using Parts = BackwardParts<Shape>;
  using Memory = BackwardMemory<Shape>;
  using KeyTile = typename Memory::KeyTile;
  using QueryTile = typename Memory::QueryTile;
  using ScoreTile = typename Memory::ScoreTile;
  constexpr int kThreads = Shape::kThreads, kStages = Shape::kStages;
  constexpr int kHeadSteps = Shape::kHead / kBlockDepth, kRowSteps = Shape::kRows / kBlockDepth, kKeySteps = Shape::kKeys / kBlockDepth;
  extern __shared__ __align__(128) std::uint8_t raw[];
  const Memory memory(raw);
  const Parts parts;

  const BlockIndex block =
      block_index((p.sequences.longest_k + Shape::kKeys - 1) / Shape::kKeys, p.heads / p.group, p.sequences.count, p.section_heads);
  const Sequence sequence(p.sequences, block.sequence);
  const int first_key = block.tile * Shape::kKeys, keys = sequence.Sk - first_key;
  if (keys <= 0) return;
  const int diagonal = p.is_causal ? sequence.Sk - sequence.Sq - first_key : sequence.Sk;  // key <= row + diagonal is visible
  const int first_tile = max(0, -diagonal) / Shape::kRows;
  const int tiles = (sequence.Sq + Shape::kRows - 1) / Shape::kRows;
  const std::int64_t padded_row = PaddedSequence(p.rows, block.sequence).padded;

  const auto load_rows = [&](const RowTile& at, int stage) {
    const int first = at.tile * Shape::kRows, rows = sequence.Sq - first;
    const int unseeing = -diagonal - first;  // rows before this one see none of the keys: what they hold may not reach a gradient
    const auto q = rows_of<const T>(p.q, sequence.batch, sequence.q_row + first, at.head);
    const auto dout = rows_of<const T>(p.dout, sequence.batch, sequence.q_row + first, at.head);
    load_tile<QueryTile, kThreads>(memory.queries + stage * QueryTile::kBytes, q, unseeing, rows, p.D);
    load_tile<QueryTile, kThreads>(memory.douts + stage * QueryTile::kBytes, dout, unseeing, rows, p.D);
    const std::int64_t padded = at.head * p.rows.total_rows + padded_row + first;
    constexpr int kChunks = Shape::kRowBytes / 16;
    const int chunk = threadIdx.x % kChunks;
    if (threadIdx.x < kChunks) copy_16(memory.lse + stage * Shape::kRowBytes + chunk * 16, p.lse_log2 + padded + chunk * 4, true);
    else if (threadIdx.x < 2 * kChunks) copy_16(memory.delta + stage * Shape::kRowBytes + chunk * 16, p.delta + padded + chunk * 4, true);
  };

  float dk[Parts::kKeys / kBlockRows][Parts::kColumns / kBlockColumns][4], dv[Parts::kKeys / kBlockRows][Parts::kColumns / kBlockColumns][4];
  clear(dk);
  clear(dv);
  RowTile at{block.head * p.group, first_tile};
  const int last_head = at.head + p.group - 1;
  if (first_tile < tiles) {
    const auto k = rows_of<const T>(p.k, sequence.batch, sequence.k_row + first_key, block.head);
    const auto v = rows_of<const T>(p.v, sequence.batch, sequence.k_row + first_key, block.head);
    load_tile<KeyTile, kThreads>(memory.keys, k, 0, keys, p.D);
    load_tile<KeyTile, kThreads>(memory.values, v, 0, keys, p.D);
    load_rows(at, 0);
    commit_copies();
  }
  bool has_flags = false;
  if (p.is_causal) {
    wait_copies<0>();
    __syncthreads();
    has_flags = has_not_finite<T, KeyTile, kThreads>(memory.keys);
    if (has_flags) flag_keys<T, KeyTile, kThreads>(memory.keys, memory.flags);
  }
  int stage = 0;
  for (bool has_more = first_tile < tiles; has_more;) {
    RowTile next{at.head, at.tile + 1};
    if (next.tile == tiles) next = {at.head + 1, first_tile};
    has_more = next.head <= last_head;
    wait_copies<0>();
    __syncthreads();  // the rows are there for all, and all are done with those before
    const std::uint32_t queries = memory.queries + stage * QueryTile::kBytes, douts = memory.douts + stage * QueryTile::kBytes;
    const std::uint32_t lse = memory.lse + stage * Shape::kRowBytes, delta = memory.delta + stage * Shape::kRowBytes;
    if constexpr (kStages == 2) {
      stage ^= 1;
      if (has_more) load_rows(next, stage);
      commit_copies();
    }

    {
      float scores[Parts::kKeys / kBlockRows][Parts::kRows / kBlockColumns][4], gradients[Parts::kKeys / kBlockRows][Parts::kRows / kBlockColumns][4];
      clear(scores);
      clear(gradients);
      const auto key_cursor = rows_first<KeyTile>(memory.keys, parts.key, 0), value_cursor = rows_first<KeyTile>(memory.values, parts.key, 0);
      const auto query_cursor = columns_first<QueryTile>(queries, parts.row, 0), dout_cursor = columns_first<QueryTile>(douts, parts.row, 0);
      multiply<T, kHeadSteps>(
          scores, [&](auto& to, int i, int step) { load_matrices(to, key_cursor.at(16 * i, 16 * step)); },
          [&](auto& to, int j, int step) { load_matrices(to, query_cursor.at(8 * j, 16 * step)); });
      multiply<T, kHeadSteps>(
          gradients, [&](auto& to, int i, int step) { load_matrices(to, value_cursor.at(16 * i, 16 * step)); },
          [&](auto& to, int j, int step) { load_matrices(to, dout_cursor.at(8 * j, 16 * step)); });
      const int first_row = at.tile * Shape::kRows;
      const PairMask mask{keys < Shape::kKeys || first_row + diagonal < Shape::kKeys - 1, keys - parts.key,
                          first_row + parts.row + diagonal - parts.key};
      if (has_flags) add_flags(scores, memory.flags + parts.key * 4);
      score_gradients(scores, gradients, lse + parts.row * 4, delta + parts.row * 4, p.scale_log2, mask);
      put_result<T>(result<ScoreTile>(memory.probabilities, parts.key, parts.row), scores);
      put_result<T>(result<ScoreTile>(memory.gradients, parts.key, parts.row), gradients);
    }
    __syncthreads();  // probabilities and gradients are there for all

    {
      const auto left = rows_first<ScoreTile>(memory.probabilities, parts.key, 0);
      const auto right = rows_first<QueryTile>(douts, 0, parts.column);
      multiply<T, kRowSteps>(
          dv, [&](auto& to, int i, int step) { load_matrices(to, left.at(16 * i, 16 * step)); },
          [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
    }
    {
      const auto left = rows_first<ScoreTile>(memory.gradients, parts.key, 0);
      const auto right = rows_first<QueryTile>(queries, 0, parts.column);
      multiply<T, kRowSteps>(
          dk, [&](auto& to, int i, int step) { load_matrices(to, left.at(16 * i, 16 * step)); },
          [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
    }
    {
      float dq[Parts::kDqRows / kBlockRows][Parts::kDqColumns / kBlockColumns][4];
      clear(dq);
      const auto left = columns_first<ScoreTile>(memory.gradients, 0, parts.dq_row);
      const auto right = rows_first<KeyTile>(memory.keys, 0, parts.dq_column);
      multiply<T, kKeySteps>(
          dq, [&](auto& to, int i, int step) { load_matrices_transposed(to, left.at(16 * step, 16 * i)); },
          [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
      const std::int64_t padded = at.head * p.rows.total_rows + padded_row + at.tile * Shape::kRows;
      unsigned* const turn = p.turns == nullptr ? nullptr : p.turns + padded / Shape::kRows;
      if (turn != nullptr) await_turn(turn, block.tile);
      add_rows(p, padded + parts.dq_row, parts.dq_column, dq);
      if (turn != nullptr) pass_turn(turn, block.tile);
    }
    at = next;
    if constexpr (kStages == 1) {
      __syncthreads();
      if (has_more) load_rows(next, 0);
      commit_copies();
    }
  }

  __syncthreads();
  put_result<T>(result<KeyTile>(memory.keys, parts.key, parts.column), dk, p.scale);
  put_result<T>(result<KeyTile>(memory.values, parts.key, parts.column), dv);
  __syncthreads();
  store_tile<KeyTile, Shape::kKeys, kThreads>(memory.keys, 0, threadIdx.x, rows_of<T>(p.dk, sequence.batch, sequence.k_row + first_key, block.head),
                                              keys, p.D);
  store_tile<KeyTile, Shape::kKeys, kThreads>(memory.values, 0, threadIdx.x, rows_of<T>(p.dv, sequence.batch, sequence.k_row + first_key, block.head),
                                              keys, p.D);
}

template <typename T, typename Shape>
void launch_backward(const BackwardParams& p, cudaStream_t stream) {
  const auto kernel = backward_kernel<T, Shape>;
  static const cudaError_t opted_in = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  HEDDLE_CUDA_CHECK(opted_in);
  const int tiles = (p.sequences.longest_k + Shape::kKeys - 1) / Shape::kKeys;
  kernel<<<block_count(tiles, p.heads / p.group, p.sequences), Shape::kThreads, Shape::kSharedBytes, stream>>>(p);
  check_launch("attention backward");
}

template <int kHead>
void backward_of(const BackwardParams& p, DType dtype, cudaStream_t stream) {
  using Shape = typename Shapes<kHead>::Backward;
  dtype == DType::bf16 ? launch_backward<__nv_bfloat16, Shape>(p, stream) : launch_backward<__half, Shape>(p, stream);
}

}  // namespace heddle::cuda::sm80
