#pragma once

#include "kernels/attention/attention_sm80.h"
#include "kernels/attention/blocks_sm80.cuh"
#include "kernels/attention/tile_sm80.h"
#include "kernels/runtime/cuda_check.h"

// FlashAttention forward with mma.sync. Dao 2023, "FlashAttention-2", algorithm 1.

namespace heddle::cuda::sm80 {

// One warp's rows of a block: kM times 16.
template <typename T, typename Shape>
struct ForwardWarp {
  static constexpr int kM = Shape::kRows / Shape::kWarps / kBlockRows;
  static constexpr int kKeyBlocks = Shape::kKeys / kBlockColumns;
  static constexpr int kHeadBlocks = Shape::kHead / kBlockColumns;
  static_assert(kM * Shape::kWarps * kBlockRows == Shape::kRows);

  float scores[kM][kKeyBlocks][4];
  float out[kM][kHeadBlocks][4];
  float row_max[kM][2], row_sum[kM][2];  // of the rows l / 4 and l / 4 + 8 of a block; sums are the lane's own part

  __device__ __forceinline__ void reset() {
    clear(out);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[i][half] = -INFINITY;
        row_sum[i][half] = 0.0f;
      }
  }

  // Scores of keys that a row does not see become -inf. `limit`: how many of this tile's keys the warp's first row sees.
  // kStep: how many more each row sees than the one before.
  __device__ __forceinline__ void mask(int limit, int step, int keys) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int visible = min(keys, limit + step * (16 * i + 8 * half + lane / 4)) - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e >= visible) scores[i][j][2 * half + e] = -INFINITY;
      }
  }

  // Turns scores into probabilities relative to the running maximum, and rescales what was summed before.
  __device__ __forceinline__ void softmax(float scale_log2) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = scores[i][0][2 * half];
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) largest = fmaxf(largest, scores[i][j][2 * half + e]);
        largest = fmaxf(row_max[i][half], quad_max(largest));
        // A row that has seen no key yet keeps -inf; 0 in its place keeps the exponents from becoming NaN.
        const float safe = largest == -INFINITY ? 0.0f : largest;
        // From the difference: the maximum times the scale is not the product rounded, and a factor that is not quite 1 in every
        // tile adds up.
        const float factor = exp2_approx((row_max[i][half] - safe) * scale_log2), shift = safe * scale_log2;
        row_max[i][half] = largest;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[i][j][2 * half + e];
            score = exp2_approx(score * scale_log2 - shift);
            sum += score;
          }
        row_sum[i][half] = row_sum[i][half] * factor + sum;
#pragma unroll
        for (int j = 0; j < kHeadBlocks; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) out[i][j][2 * half + e] *= factor;
      }
  }

  // Adds the values that are not finite to the rows that see them (Note: Elements that are not finite); `limit` and `step` as for mask().
  template <typename Tile>
  __device__ __forceinline__ void add_not_finite(std::uint32_t values, int limit, int step, int keys) {
    const int lane = threadIdx.x % kWarp;
    for (int key = 0; key < min(keys, Shape::kKeys); ++key)
#pragma unroll
      for (int j = 0; j < kHeadBlocks; ++j) {
        const std::uint32_t pair = load_shared(values + Tile::offset(key, 8 * j + lane % 4 * 2));
        if (not_finite<T>(pair) == 0) continue;
        const float2 value = unpack(pair, T());
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (key >= limit + step * (16 * i + 8 * half + lane / 4)) continue;
            if (!isfinite(value.x)) out[i][j][2 * half] += value.x;
            if (!isfinite(value.y)) out[i][j][2 * half + 1] += value.y;
          }
      }
  }

  // Divides by the sums and writes the log-sum-exp of rows below `rows`; `lse` is that of the warp's first row.
  __device__ __forceinline__ void finish(float scale, float* lse, std::int64_t lse_row, int rows) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(row_sum[i][half]);
        const bool is_empty = sum == 0.0f;
        const float inverse = is_empty ? 0.0f : 1.0f / sum;
#pragma unroll
        for (int j = 0; j < kHeadBlocks; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) out[i][j][2 * half + e] *= inverse;
        const int row = 16 * i + 8 * half + lane / 4;
        if (lane % 4 == 0 && row < rows) lse[row * lse_row] = is_empty ? -INFINITY : row_max[i][half] * scale + __logf(sum);
      }
  }
};

// The rows of one block, and what they visit.
template <typename T, typename Shape>
struct ForwardBlock {
  using QueryTile = SharedTile<Shape::kRows, Shape::kHead>;
  using KeyTile = SharedTile<Shape::kKeys, Shape::kHead>;
  static constexpr int kThreads = Shape::kThreads;

  const ForwardParams& p;
  BlockIndex index;
  Sequence sequence;
  int first_row, rows;  // in the sequence; rows <= 0: there are none
  int visible;          // keys that the first row sees; with a causal mask each row sees one more
  int key_tiles, unmasked_tiles;
  int warp_row;
  GlobalRows<const T> k, v;
  std::uint32_t queries_at, keys_at, values_at;  // in shared memory
  int stage = 0;
  ForwardWarp<T, Shape> warp;

  __device__ __forceinline__ ForwardBlock(const ForwardParams& params, const BlockIndex& block, std::uint32_t memory)
      : p(params), index(block), sequence(p.sequences, block.sequence), first_row(block.tile * Shape::kRows),
        rows(min(Shape::kRows, sequence.Sq - first_row)), warp_row(threadIdx.x / kWarp * (Shape::kRows / Shape::kWarps)),
        k(rows_of<const T>(p.k, sequence.batch, sequence.k_row, block.head / p.group)),
        v(rows_of<const T>(p.v, sequence.batch, sequence.k_row, block.head / p.group)), queries_at(memory),
        keys_at(queries_at + QueryTile::kBytes), values_at(keys_at + Shape::kStages * KeyTile::kBytes) {
    visible = p.is_causal ? first_row + 1 + sequence.Sk - sequence.Sq : sequence.Sk;
    const int keys = p.is_causal ? min(sequence.Sk, visible + rows - 1) : sequence.Sk;
    key_tiles = keys <= 0 ? 0 : (keys + Shape::kKeys - 1) / Shape::kKeys;
    unmasked_tiles = max(0, min(visible, sequence.Sk)) / Shape::kKeys;
  }

  __device__ __forceinline__ void load_keys(const GlobalRows<const T>& from, std::uint32_t to, int tile) const {
    load_tile<KeyTile, kThreads>(to, GlobalRows<const T>{from.row(tile * Shape::kKeys), from.stride}, 0, sequence.Sk - tile * Shape::kKeys, p.D);
  }

  // Starts the copies of the first tiles.
  __device__ __forceinline__ void start() const {
    if (key_tiles == 0) return;
    load_tile<QueryTile, kThreads>(queries_at, rows_of<const T>(p.q, sequence.batch, sequence.q_row + first_row, index.head), 0, rows, p.D);
    load_keys(k, keys_at, key_tiles - 1);
    commit_copies();
    if (Shape::kStages == 2) load_keys(v, values_at, key_tiles - 1);
    commit_copies();
  }

  // One tile of keys. kMasked: some pairs may be hidden. Otherwise nothing is between the two products, so that the second begins
  // under the exponentials.
  template <bool kMasked>
  __device__ __forceinline__ void visit(int tile) {
    const std::uint32_t key_tile = keys_at + stage * KeyTile::kBytes, value_tile = values_at + stage * KeyTile::kBytes;
    const bool is_first = kMasked && tile == key_tiles - 1;
    if (is_first) wait_copies<1>();  // the values of the first tile may still be on their way
    else wait_copies<0>();
    __syncthreads();  // the tile is there for all, and all are done with the one before
    if constexpr (Shape::kStages == 2) {
      stage ^= 1;
      if (tile > 0) {
        load_keys(k, keys_at + stage * KeyTile::kBytes, tile - 1);
        load_keys(v, values_at + stage * KeyTile::kBytes, tile - 1);
      }
    } else {
      load_keys(v, value_tile, tile);
    }
    commit_copies();
    multiply_keys(key_tile);
    if constexpr (Shape::kStages == 1) {
      wait_copies<0>();
      __syncthreads();
      if (tile > 0) load_keys(k, key_tile, tile - 1);
      commit_copies();
    } else if (is_first) {
      wait_copies<1>();
      __syncthreads();
    }
    const int first_key = tile * Shape::kKeys, limit = (p.is_causal ? visible + warp_row : sequence.Sk) - first_key;
    if constexpr (kMasked) warp.mask(limit, p.is_causal, sequence.Sk - first_key);
    warp.softmax(p.scale_log2);
    if (kMasked && p.is_causal && has_not_finite<T, KeyTile, kThreads>(value_tile)) {
      warp.template add_not_finite<KeyTile>(value_tile, limit, p.is_causal, sequence.Sk - first_key);
      __syncthreads();
      clear_not_finite<T, KeyTile, kThreads>(value_tile);
      __syncthreads();
    }
    multiply_values(value_tile);
  }

  __device__ __forceinline__ void multiply_keys(std::uint32_t tile) {
    clear(warp.scores);
    const auto left = rows_first<QueryTile>(queries_at, warp_row, 0);
    const auto right = columns_first<KeyTile>(tile, 0, 0);
    multiply<T, Shape::kHead / kBlockDepth>(
        warp.scores, [&](auto& to, int i, int step) { load_matrices(to, left.at(16 * i, 16 * step)); },
        [&](auto& to, int j, int step) { load_matrices(to, right.at(8 * j, 16 * step)); });
  }
  __device__ __forceinline__ void multiply_values(std::uint32_t tile) {
    const auto right = rows_first<KeyTile>(tile, 0, 0);
    multiply<T, Shape::kKeys / kBlockDepth>(
        warp.out, [&](auto& to, int i, int step) { pack_left<T>(to, warp.scores[i][2 * step], warp.scores[i][2 * step + 1]); },
        [&](auto& to, int j, int step) { load_matrices_transposed(to, right.at(16 * step, 8 * j)); });
  }

  // A warp's output replaces its own queries and leaves in 16-byte pieces.
  __device__ __forceinline__ void write() {
    float* const lse = p.lse + sequence.batch * p.lse_batch + index.head * p.lse_head + (sequence.q_row + first_row + warp_row) * p.lse_row;
    warp.finish(p.scale, lse, p.lse_row, rows - warp_row);
    __syncwarp();
    put_result<T>(result<QueryTile>(queries_at, warp_row, 0), warp.out);
    __syncwarp();
    const auto out = rows_of<T>(p.out, sequence.batch, sequence.q_row + first_row, index.head);
    store_tile<QueryTile, Shape::kRows / Shape::kWarps, kWarp>(queries_at, warp_row, threadIdx.x % kWarp, out, rows, p.D);
  }
};

// Blocks of four warps come in pairs on a multiprocessor: one's softmax runs under the other's products.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kWarps == 4 ? 2 : 1) forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  const int tiles = (p.sequences.longest_q + Shape::kRows - 1) / Shape::kRows;
  BlockIndex index = block_index(tiles, p.heads, p.sequences.count, p.section_heads);
  if (p.is_causal) index.tile = tiles - 1 - index.tile;  // the longest first
  ForwardBlock<T, Shape> block(p, index, static_cast<std::uint32_t>(__cvta_generic_to_shared(memory)));
  if (block.rows <= 0) return;
  block.start();
  block.warp.reset();
  // From the last tile of keys to the first, so that those with hidden pairs come first.
  int tile = block.key_tiles - 1;
  for (const int masked = min(block.unmasked_tiles, tile); tile >= max(masked, 0); --tile) block.template visit<true>(tile);
  for (; tile >= 0; --tile) block.template visit<false>(tile);
  block.write();
}

template <typename T, typename Shape>
void launch_forward(const ForwardParams& p, cudaStream_t stream) {
  const auto kernel = forward_kernel<T, Shape>;
  static const cudaError_t opted_in = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  HEDDLE_CUDA_CHECK(opted_in);
  const int tiles = (p.sequences.longest_q + Shape::kRows - 1) / Shape::kRows;
  kernel<<<block_count(tiles, p.heads, p.sequences), Shape::kThreads, Shape::kSharedBytes, stream>>>(p);
  check_launch("attention");
}

template <typename Shape>
void forward_with(const ForwardParams& p, DType dtype, cudaStream_t stream) {
  dtype == DType::bf16 ? launch_forward<__nv_bfloat16, Shape>(p, stream) : launch_forward<__half, Shape>(p, stream);
}

}  // namespace heddle::cuda::sm80
