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
  bool is_needed;  // some pairs may be hidden, or a key is flagged
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

// Turns transposed scores into probabilities. `lse` is the address of the value for the part's first row.
template <int kM, int kN>
__device__ __forceinline__ void probabilities(float (&scores)[kM][kN][4], std::uint32_t lse, float scale_log2) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float2 row_lse = load_shared_float2(lse + (8 * j + lane % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i][j][e] = exp2_approx(scores[i][j][e] * scale_log2 - (e % 2 == 0 ? row_lse.x : row_lse.y));
  }
}

// Turns the probabilities of kN blocks of rows, from block kFirst on, into gradients of scores, given those of probabilities.
// `delta` is the address of the value for the part's first row.
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

// Keys that are not finite (Note: Elements that are not finite): `flags` gets a NaN for each of them, 0 for the others, which is added to the
// key's scores or probabilities; the keys themselves become 0. Returns whether there are any.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ bool flag_keys(std::uint32_t keys, std::uint32_t flags, bool is_causal) {
  for (int key = threadIdx.x; key < Tile::kRows; key += kThreads) store_shared(flags + key * 4, 0.0f);
  if (!is_causal) return false;  // no row sees a part of a tile only: keys past the end are 0
  wait_copies<0>();
  __syncthreads();
  if (!has_not_finite<T, Tile, kThreads>(keys)) return false;
  for (int key = threadIdx.x; key < Tile::kRows; key += kThreads) {
    std::uint32_t found = 0;
    for (int column = 0; column < Tile::kColumns; column += 2) found |= not_finite<T>(load_shared(keys + Tile::offset(key, column)));
    if (found != 0) store_shared(flags + key * 4, NAN);
  }
  __syncthreads();
  clear_not_finite<T, Tile, kThreads>(keys);
  return true;
}
template <int kM, int kN>
__device__ __forceinline__ void add_flags(float (&p)[kM][kN][4], std::uint32_t flags) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float flag = __uint_as_float(load_shared(flags + (16 * i + 8 * half + threadIdx.x % kWarp / 4) * 4));
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) p[i][j][2 * half + e] += flag;
    }
}

// A tile of query rows of one head.
struct RowTile {
  int head, tile;
};

// The keys of one block, and the rows they visit: tiles of kRows for each query head of the group.
template <typename T, typename Shape>
struct BackwardBlock {
  using Parts = BackwardParts<Shape>;
  using KeyTile = typename BackwardMemory<Shape>::KeyTile;
  using QueryTile = typename BackwardMemory<Shape>::QueryTile;
  using ScoreTile = typename BackwardMemory<Shape>::ScoreTile;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kKeyBlocks = Parts::kKeys / kBlockRows, kRowBlocks = Parts::kRows / kBlockColumns;
  static constexpr int kColumnBlocks = Parts::kColumns / kBlockColumns;
  using Scores = float[kKeyBlocks][kRowBlocks][4];

  const BackwardParams& p;
  const BackwardMemory<Shape> memory;
  const Parts parts;
  BlockIndex index;
  Sequence sequence;
  int first_key, keys;  // keys: from the first on; <= 0: there are none
  int diagonal;         // key <= row + diagonal is visible, key counted from first_key
  int first_tile, tiles;
  std::int64_t padded_row;  // of the sequence's first row
  bool has_flags = false;
  int stage = 0;
  Turn turn{nullptr, 0};
  float dk[kKeyBlocks][kColumnBlocks][4], dv[kKeyBlocks][kColumnBlocks][4];

  __device__ __forceinline__ BackwardBlock(const BackwardParams& params, const BlockIndex& block, const void* shared)
      : p(params), memory(shared), index(block), sequence(p.sequences, block.sequence), first_key(block.tile * Shape::kKeys),
        keys(sequence.Sk - first_key), padded_row(PaddedSequence(p.rows, block.sequence).padded) {
    diagonal = p.is_causal ? sequence.Sk - sequence.Sq - first_key : sequence.Sk;
    first_tile = max(0, -diagonal) / Shape::kRows;
    tiles = (sequence.Sq + Shape::kRows - 1) / Shape::kRows;
  }

  template <typename E>
  __device__ __forceinline__ GlobalRows<E> key_rows(const Operand& x) const {
    return rows_of<E>(x, sequence.batch, sequence.k_row + first_key, index.head);
  }
  __device__ __forceinline__ std::int64_t padded(const RowTile& at) const {
    return at.head * p.rows.total_rows + padded_row + at.tile * Shape::kRows;
  }

  __device__ __forceinline__ void load_rows(const RowTile& at, int to) const {
    const int first = at.tile * Shape::kRows, count = sequence.Sq - first;
    const int unseeing = -diagonal - first;  // rows before this one see none of the keys: what they hold may not reach a gradient
    const auto q = rows_of<const T>(p.q, sequence.batch, sequence.q_row + first, at.head);
    const auto dout = rows_of<const T>(p.dout, sequence.batch, sequence.q_row + first, at.head);
    load_tile<QueryTile, kThreads>(memory.queries + to * QueryTile::kBytes, q, unseeing, count, p.D);
    load_tile<QueryTile, kThreads>(memory.douts + to * QueryTile::kBytes, dout, unseeing, count, p.D);
    constexpr int kChunks = Shape::kRowBytes / 16;
    static_assert(2 * kChunks <= kThreads);
    const int chunk = threadIdx.x % kChunks;
    if (threadIdx.x < kChunks) copy_16(memory.lse + to * Shape::kRowBytes + chunk * 16, p.lse_log2 + padded(at) + chunk * 4, true);
    else if (threadIdx.x < 2 * kChunks) copy_16(memory.delta + to * Shape::kRowBytes + chunk * 16, p.delta + padded(at) + chunk * 4, true);
  }

  // Starts the copies of the keys and the first rows.
  __device__ __forceinline__ void start(const RowTile& first) {
    load_tile<KeyTile, kThreads>(memory.keys, key_rows<const T>(p.k), 0, keys, p.D);
    load_tile<KeyTile, kThreads>(memory.values, key_rows<const T>(p.v), 0, keys, p.D);
    load_rows(first, 0);
    commit_copies();
    has_flags = flag_keys<T, KeyTile, kThreads>(memory.keys, memory.flags, p.is_causal);
  }

  // sum += left * tile, for the warp's columns.
  template <typename Left>
  __device__ __forceinline__ void add_product(float (&sum)[kKeyBlocks][kColumnBlocks][4], const Left& left, std::uint32_t tile) const {
    const auto right = rows_first<QueryTile>(tile, 0, parts.column);
    multiply<T, Shape::kRows / kBlockDepth>(sum, left, [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
  }

  // out = left right^T for the warp's keys and its rows from block `first` on.
  template <int kN>
  __device__ __forceinline__ void multiply_rows(float (&out)[kKeyBlocks][kN][4], std::uint32_t key_tile, std::uint32_t row_tile, int first) const {
    const auto left = rows_first<KeyTile>(key_tile, parts.key, 0);
    const auto right = columns_first<QueryTile>(row_tile, parts.row, 0);
    clear(out);
    multiply<T, Shape::kHead / kBlockDepth>(
        out, [&](auto& to, int i, int step) { load_matrices(to, left.at(16 * i, 16 * step)); },
        [&](auto& to, int j, int step) { load_matrices(to, right.at(8 * (first + j), 16 * step)); });
  }

  // Note: Two ways of the scores
  // A warp that has all rows of its keys multiplies by probabilities and gradients from registers; only the gradients go through
  // memory, for dq. Otherwise both do, and after_exchange() multiplies.
  __device__ __forceinline__ void from_registers(Scores& scores, const PairMask& mask, std::uint32_t queries, std::uint32_t douts, std::uint32_t lse,
                                                 std::uint32_t delta) {
    const auto from_scores = [&](auto& to, int i, int step) { pack_left<T>(to, scores[i][2 * step], scores[i][2 * step + 1]); };
    // The branch keeps the exponentials behind the whole product: mixed with it 332 bytes spill instead of 236, and D64 loses 2 %.
    if (has_flags) add_flags(scores, memory.flags + parts.key * 4);
    probabilities(scores, lse, p.scale_log2);
    if (mask.is_needed) mask.clear_hidden(scores);
    add_product(dv, from_scores, douts);
    constexpr int kHalf = kRowBlocks / 2;
    const auto half_gradients = [&]<int kFirst>(std::integral_constant<int, kFirst>) {  // half at a time, for want of registers
      float dp[kKeyBlocks][kHalf][4];
      multiply_rows(dp, memory.values, douts, kFirst);
      score_gradients<kFirst>(scores, dp, delta);
    };
    half_gradients(std::integral_constant<int, 0>());
    half_gradients(std::integral_constant<int, kHalf>());
    if (mask.is_needed) mask.clear_hidden(scores);
    put_result<T>(result<ScoreTile>(memory.gradients, parts.key, parts.row), scores);
    add_product(dk, from_scores, queries);
  }
  __device__ __forceinline__ void before_exchange(Scores& scores, const PairMask& mask, std::uint32_t douts, std::uint32_t lse, std::uint32_t delta) {
    Scores dp;
    multiply_rows(dp, memory.values, douts, 0);
    probabilities(scores, lse, p.scale_log2);
    if (mask.is_needed) {
      add_flags(scores, memory.flags + parts.key * 4);
      mask.clear_hidden(scores);
    }
    put_result<T>(result<ScoreTile>(memory.probabilities, parts.key, parts.row), scores);
    score_gradients<0>(scores, dp, delta);
    if (mask.is_needed) mask.clear_hidden(scores);
    put_result<T>(result<ScoreTile>(memory.gradients, parts.key, parts.row), scores);
  }
  __device__ __forceinline__ void after_exchange(std::uint32_t queries, std::uint32_t douts) {
    const auto p_cursor = rows_first<ScoreTile>(memory.probabilities, parts.key, 0), ds_cursor = rows_first<ScoreTile>(memory.gradients, parts.key, 0);
    add_product(dv, [&](auto& to, int i, int step) { load_matrices(to, p_cursor.at(16 * i, 16 * step)); }, douts);
    add_product(dk, [&](auto& to, int i, int step) { load_matrices(to, ds_cursor.at(16 * i, 16 * step)); }, queries);
  }
  __device__ __forceinline__ void add_dq(const RowTile& at) {
    float dq[Parts::kDqRows / kBlockRows][Parts::kDqColumns / kBlockColumns][4];
    clear(dq);
    const auto left = columns_first<ScoreTile>(memory.gradients, 0, parts.dq_row);
    const auto right = rows_first<KeyTile>(memory.keys, 0, parts.dq_column);
    multiply<T, Shape::kKeys / kBlockDepth>(
        dq, [&](auto& to, int i, int step) { load_matrices_transposed(to, left.at(16 * step, 16 * i)); },
        [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
    if (p.turns != nullptr) {
      const int last_row = min((at.tile + 1) * Shape::kRows, sequence.Sq) - 1;
      turn = {p.turns + padded(at) / Shape::kRows, static_cast<unsigned>(min(keys - 1, last_row + diagonal) / Shape::kKeys)};
    }
    turn.await();
    add_rows(p, padded(at) + parts.dq_row, parts.dq_column, dq);
  }

  // One tile of rows; `next` is copied meanwhile.
  __device__ __forceinline__ void visit(const RowTile& at, const RowTile& next, bool has_next) {
    wait_copies<0>();
    __syncthreads();  // the rows are there for all, and all are done with those before
    const std::uint32_t queries = memory.queries + stage * QueryTile::kBytes, douts = memory.douts + stage * QueryTile::kBytes;
    const std::uint32_t lse = memory.lse + stage * Shape::kRowBytes + parts.row * 4, delta = memory.delta + stage * Shape::kRowBytes + parts.row * 4;
    if constexpr (Shape::kStages == 2) {
      stage ^= 1;
      if (has_next) load_rows(next, stage);
      commit_copies();
    }
    const int first_row = at.tile * Shape::kRows;
    const PairMask mask{has_flags || keys < Shape::kKeys || first_row + diagonal < Shape::kKeys - 1, keys - parts.key,
                        first_row + parts.row + diagonal - parts.key};
    Scores scores;
    multiply_rows(scores, memory.keys, queries, 0);
    if constexpr (Shape::kHasWholeRows) from_registers(scores, mask, queries, douts, lse, delta);
    else before_exchange(scores, mask, douts, lse, delta);
    turn.finish();  // not sooner: the last sums take long to arrive
    __syncthreads();  // what went through memory is there for all
    turn.pass();
    if constexpr (!Shape::kHasWholeRows) after_exchange(queries, douts);
    add_dq(at);
    if constexpr (Shape::kStages == 1) {
      __syncthreads();
      if (has_next) load_rows(next, 0);
      commit_copies();
    }
  }

  // dk and dv leave through the memory of the keys and values.
  __device__ __forceinline__ void write() {
    turn.finish();
    __syncthreads();
    turn.pass();
    put_result<T>(result<KeyTile>(memory.keys, parts.key, parts.column), dk, p.scale);
    put_result<T>(result<KeyTile>(memory.values, parts.key, parts.column), dv);
    __syncthreads();
    store_tile<KeyTile, Shape::kKeys, kThreads>(memory.keys, 0, threadIdx.x, key_rows<T>(p.dk), keys, p.D);
    store_tile<KeyTile, Shape::kKeys, kThreads>(memory.values, 0, threadIdx.x, key_rows<T>(p.dv), keys, p.D);
  }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  const int key_tiles = (p.sequences.longest_k + Shape::kKeys - 1) / Shape::kKeys;
  BlockIndex index = block_index(key_tiles, p.heads / p.group, p.sequences.count, p.section_heads);
  if (p.turns != nullptr) index.tile = key_tiles - 1 - index.tile;  // Note: Turns
  BackwardBlock<T, Shape> block(p, index, memory);
  if (block.keys <= 0) return;
  clear(block.dk);
  clear(block.dv);
  RowTile at{index.head * p.group, block.first_tile};
  const int last_head = at.head + p.group - 1;
  if (block.first_tile < block.tiles) {
    block.start(at);
    for (bool has_next = true; has_next;) {
      const RowTile next = at.tile + 1 < block.tiles ? RowTile{at.head, at.tile + 1} : RowTile{at.head + 1, block.first_tile};
      has_next = next.head <= last_head;
      block.visit(at, next, has_next);
      at = next;
    }
  }
  block.write();
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
