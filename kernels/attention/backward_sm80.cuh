#pragma once

#include <type_traits>

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
// Deterministic sums of dq: the key tiles that a tile of rows sees add to it from the last to the first, each when the row tile's
// counter says that it is its turn. Blocks start in the same order, so one waits only for blocks that started before it. With a
// causal mask this order needs no waiting: a block begins at its diagonal, where it is the first.
struct Turn {
  unsigned* counter;  // null: any order will do
  unsigned number;

  // Called by every thread of a warp.
  __device__ __forceinline__ void await() const {
    if (counter == nullptr) return;
    if (threadIdx.x % kWarp == 0) {
      unsigned now;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
      while (now != number);
    }
    __syncwarp();
  }
  // Called by every thread of the block, with a barrier between the two.
  __device__ __forceinline__ void finish() const {
    if (counter != nullptr) __threadfence();
  }
  __device__ __forceinline__ void pass() const {
    if (counter != nullptr && threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(number + 1) : "memory");
  }
};

// Addresses of a block's tiles in shared memory.
template <typename Shape>
struct BackwardMemory {
  using KeyTile = SharedTile<Shape::kKeys, Shape::kHead>;
  using QueryTile = SharedTile<Shape::kRows, Shape::kHead>;
  using ScoreTile = SharedTile<Shape::kKeys, Shape::kRows>;  // transposed: a row for each key

  std::uint32_t keys, values;
  std::uint32_t probabilities, gradients;    // gradients: of the scores; one place if probabilities stay in registers
  std::uint32_t queries, douts, lse, delta;  // kStages each
  std::uint32_t flags;                       // of the keys

  __device__ __forceinline__ explicit BackwardMemory(const void* memory) {
    keys = static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
    values = keys + KeyTile::kBytes;
    probabilities = values + KeyTile::kBytes;
    queries = probabilities + Shape::kScoreTiles * ScoreTile::kBytes;
    gradients = queries - ScoreTile::kBytes;
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

// Which pairs of a part are visible: key < keys and key <= row + diagonal, numbers from the start of the part.
struct PairMask {
  bool is_needed;
  int keys, diagonal;

  template <int kM, int kN>
  __device__ __forceinline__ void clear_hidden(float (&x)[kM][kN][4]) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = 16 * i + 8 * (e / 2) + lane / 4, row = 8 * j + lane % 4 * 2 + e % 2;
          if (key >= keys || key > row + diagonal) x[i][j][e] = 0.0f;
        }
  }
};

// Turns transposed scores into probabilities; those of hidden pairs are 0. `lse` is the address of the value for the part's first
// row.
template <int kM, int kN>
__device__ __forceinline__ void probabilities(float (&scores)[kM][kN][4], std::uint32_t lse, float scale_log2, const PairMask& mask) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float2 row_lse = load_shared_float2(lse + (8 * j + lane % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i][j][e] = exp2_approx(scores[i][j][e] * scale_log2 - (e % 2 == 0 ? row_lse.x : row_lse.y));
  }
  if (mask.is_needed) mask.clear_hidden(scores);
}

// Turns the probabilities of kN blocks of rows, from block kFirst on, into gradients of scores, given those of probabilities; 0 for
// hidden pairs. `delta` is the address of the value for the part's first row.
template <int kFirst, int kM, int kAll, int kN>
__device__ __forceinline__ void score_gradients(float (&p)[kM][kAll][4], const float (&dp)[kM][kN][4], std::uint32_t delta) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float2 row_delta = load_shared_float2(delta + (8 * (kFirst + j) + lane % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[i][kFirst + j][e] *= dp[i][j][e] - (e % 2 == 0 ? row_delta.x : row_delta.y);
  }
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
  constexpr int kRowBlocks = Parts::kRows / kBlockColumns;
  constexpr bool kHasWholeRows = Shape::kHasWholeRows;
  constexpr int kSplits = kRowBlocks >= 8 ? 2 : 1;  // parts in which gradients of probabilities are computed, for want of registers
  extern __shared__ __align__(128) std::uint8_t raw[];
  const Memory memory(raw);
  const Parts parts;

  const int key_tiles = (p.sequences.longest_k + Shape::kKeys - 1) / Shape::kKeys;
  BlockIndex block = block_index(key_tiles, p.heads / p.group, p.sequences.count, p.section_heads);
  if (p.turns != nullptr) block.tile = key_tiles - 1 - block.tile;
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
  Turn turn{nullptr, 0};
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

    float scores[Parts::kKeys / kBlockRows][kRowBlocks][4];
    clear(scores);
    const int first_row = at.tile * Shape::kRows;
    const PairMask mask{keys < Shape::kKeys || first_row + diagonal < Shape::kKeys - 1, keys - parts.key, first_row + parts.row + diagonal - parts.key};
    {
      const auto left = rows_first<KeyTile>(memory.keys, parts.key, 0);
      const auto right = columns_first<QueryTile>(queries, parts.row, 0);
      multiply<T, kHeadSteps>(
          scores, [&](auto& to, int i, int step) { load_matrices(to, left.at(16 * i, 16 * step)); },
          [&](auto& to, int j, int step) { load_matrices(to, right.at(8 * j, 16 * step)); });
    }
    if (has_flags) add_flags(scores, memory.flags + parts.key * 4);
    probabilities(scores, lse + parts.row * 4, p.scale_log2, mask);
    const auto from_scores = [&](auto& to, int i, int step) { pack_left<T>(to, scores[i][2 * step], scores[i][2 * step + 1]); };
    const auto add_product = [&](auto& sum, const auto& left, std::uint32_t tile) {
      const auto right = rows_first<QueryTile>(tile, 0, parts.column);
      multiply<T, kRowSteps>(sum, left, [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
    };
    if constexpr (kHasWholeRows) add_product(dv, from_scores, douts);
    else put_result<T>(result<ScoreTile>(memory.probabilities, parts.key, parts.row), scores);
    const auto left_values = rows_first<KeyTile>(memory.values, parts.key, 0);
    const auto right_douts = columns_first<QueryTile>(douts, parts.row, 0);
    const auto turn_into_gradients = [&]<int kFirst>(std::integral_constant<int, kFirst>) {
      float dp[Parts::kKeys / kBlockRows][kRowBlocks / kSplits][4];
      clear(dp);
      multiply<T, kHeadSteps>(
          dp, [&](auto& to, int i, int step) { load_matrices(to, left_values.at(16 * i, 16 * step)); },
          [&](auto& to, int j, int step) { load_matrices(to, right_douts.at(8 * (kFirst + j), 16 * step)); });
      score_gradients<kFirst>(scores, dp, delta + parts.row * 4);
    };
    turn_into_gradients(std::integral_constant<int, 0>());
    if constexpr (kSplits == 2) turn_into_gradients(std::integral_constant<int, kRowBlocks / 2>());
    if (mask.is_needed) mask.clear_hidden(scores);
    put_result<T>(result<ScoreTile>(memory.gradients, parts.key, parts.row), scores);
    if constexpr (kHasWholeRows) add_product(dk, from_scores, queries);
    turn.finish();    // here because the last sums take long to arrive
    __syncthreads();  // probabilities and gradients are there for all
    turn.pass();

    if constexpr (!kHasWholeRows) {
      const auto left_p = rows_first<ScoreTile>(memory.probabilities, parts.key, 0), left_ds = rows_first<ScoreTile>(memory.gradients, parts.key, 0);
      add_product(dv, [&](auto& to, int i, int step) { load_matrices(to, left_p.at(16 * i, 16 * step)); }, douts);
      add_product(dk, [&](auto& to, int i, int step) { load_matrices(to, left_ds.at(16 * i, 16 * step)); }, queries);
    }
    {
      float dq[Parts::kDqRows / kBlockRows][Parts::kDqColumns / kBlockColumns][4];
      clear(dq);
      const auto left = columns_first<ScoreTile>(memory.gradients, 0, parts.dq_row);
      const auto right = rows_first<KeyTile>(memory.keys, 0, parts.dq_column);
      multiply<T, kKeySteps>(
          dq, [&](auto& to, int i, int step) { load_matrices_transposed(to, left.at(16 * step, 16 * i)); },
          [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
      const std::int64_t padded = at.head * p.rows.total_rows + padded_row + first_row;
      if (p.turns != nullptr) {
        const int last_row = min(first_row + Shape::kRows, sequence.Sq) - 1;
        turn = {p.turns + padded / Shape::kRows, static_cast<unsigned>(min(keys - 1, last_row + diagonal) / Shape::kKeys)};
      }
      turn.await();
      add_rows(p, padded + parts.dq_row, parts.dq_column, dq);
    }
    at = next;
    if constexpr (kStages == 1) {
      __syncthreads();
      if (has_more) load_rows(next, 0);
      commit_copies();
    }
  }

  turn.finish();
  __syncthreads();
  turn.pass();
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

template <typename Shape>
void backward_with(const BackwardParams& p, DType dtype, cudaStream_t stream) {
  dtype == DType::bf16 ? launch_backward<__nv_bfloat16, Shape>(p, stream) : launch_backward<__half, Shape>(p, stream);
}

}  // namespace heddle::cuda::sm80
