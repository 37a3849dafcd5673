#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/barrier_sm90.cuh"
#include "kernels/attention/tma_sm90.cuh"
#include "kernels/attention/wgmma_sm90.cuh"

// FlashAttention forward on sm_90: one producer warp copies tiles with TMA, warpgroups of consumers multiply with wgmma.
// Shah et al. 2024, "FlashAttention-3", algorithm 1 and section 3.2 (the second product of one key tile runs under the
// softmax of the next).

namespace heddle::cuda::sm90 {

struct ForwardParams {
  CUtensorMap q, k, v;  // [B, S, H, D] as (D, S, H, B)
  void* out;
  std::int64_t out_batch, out_row, out_head;  // strides in elements
  float* lse;
  std::int64_t lse_batch, lse_head, lse_row;
  int Sq, Sk;
  int batches, heads, group;  // query heads; query heads per key head
  int row_tiles;              // tiles of query rows a head
  int section_heads;          // (batch, head) pairs whose keys and values share the L2 cache; see next_tile
  float scale;
  float scale_log2;  // scale * log2(e)
  unsigned* schedule;  // two counters, zero between launches: tiles handed out after the first round, and blocks done
};

// kConsumers warpgroups own 64 query rows each; keys come kColumns at a time, two tiles in flight.
template <int kHeadSize_, int kConsumers_, int kColumns_>
struct ForwardTile {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 2;  // of keys and values
  // The next tile's queries arrive under the current one: +8 % on causal masks, whose tiles are short, -1 % on full ones.
  static constexpr int kQueryStages = 2;
  static constexpr int kPanels = kHeadSize / kPanelColumns;
  // Registers a thread after setmaxnreg; launch gives 65536 / kThreads rounded down to 8.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kQueryBytes = kRows * kHeadSize * 2;
  static constexpr int kKeyBytes = kColumns * kHeadSize * 2;
};

template <typename Tile>
struct ForwardMemory {
  alignas(1024) std::uint8_t query[Tile::kQueryStages][Tile::kQueryBytes];
  alignas(1024) std::uint8_t key[Tile::kStages][Tile::kKeyBytes];
  alignas(1024) std::uint8_t value[Tile::kStages][Tile::kKeyBytes];
  alignas(1024) std::uint8_t out[Tile::kQueryBytes];
  int tile[Tile::kQueryStages];  // index of the tile to work on; -1 ends the block
  Barrier tile_full[Tile::kQueryStages], tile_empty[Tile::kQueryStages];
  Barrier query_full[Tile::kQueryStages], query_empty[Tile::kQueryStages];
  Barrier key_full[Tile::kStages], key_empty[Tile::kStages];
  Barrier value_full[Tile::kStages], value_empty[Tile::kStages];
};

// A ring of kStages buffers: which one is next, and the parity of its current phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  std::uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct TileIndex {
  int row_tile, head, batch;
};

// Note: Tile order
// A persistent block starts with the tile of its own number and then takes the next one that is free, from a counter in
// global memory: with causal masks tiles differ in length by the number of key tiles, and a fixed assignment left a fifth
// of the card idle. Causal tiles go longest first. Heads are walked in sections whose keys and values fit the L2 cache.
template <bool kCausal>
__device__ __forceinline__ TileIndex tile_at(const ForwardParams& p, int index) {
  const int section_tiles = p.section_heads * p.row_tiles;
  const int section = index / section_tiles, within = index % section_tiles;
  const int heads_here = min(p.section_heads, p.heads * p.batches - section * p.section_heads);
  const int level = within / heads_here;
  const int pair = section * p.section_heads + within % heads_here;
  return {kCausal ? p.row_tiles - 1 - level : level, pair % p.heads, pair / p.heads};
}

// Tiles of keys that the rows of a tile see.
template <typename Tile, bool kCausal>
__device__ __forceinline__ int key_tiles(const ForwardParams& p, int row_tile) {
  int keys = p.Sk;
  if (kCausal) keys = min(keys, min((row_tile + 1) * Tile::kRows, p.Sq) + p.Sk - p.Sq);
  return keys <= 0 ? 0 : (keys + Tile::kColumns - 1) / Tile::kColumns;
}

template <typename Tile>
__device__ __forceinline__ void load_tile(std::uint8_t* to, const CUtensorMap* map, Barrier* full, int rows, int row, int head,
                                          int batch) {
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    tma_load(to + panel * rows * 128, map, full, panel * kPanelColumns, row, head, batch);
}

// Loads one tile's queries, and its keys and values from the last tile to the first: the masked ones come first.
template <typename Tile>
__device__ __forceinline__ void load_inputs(const ForwardParams& p, ForwardMemory<Tile>& memory, const TileIndex& tile, int count,
                                            RingPosition<Tile::kStages>& ring, RingPosition<Tile::kQueryStages>& query_ring) {
  const int kv_head = tile.head / p.group;
  for (int j = count - 1; j >= 0; --j) {
    const int stage = ring.stage, row = j * Tile::kColumns;
    memory.key_empty[stage].wait(ring.phase ^ 1);
    memory.key_full[stage].arrive_expect(Tile::kKeyBytes);
    load_tile<Tile>(memory.key[stage], &p.k, &memory.key_full[stage], Tile::kColumns, row, kv_head, tile.batch);
    if (j == count - 1) {
      Barrier& full = memory.query_full[query_ring.stage];
      memory.query_empty[query_ring.stage].wait(query_ring.phase ^ 1);
      full.arrive_expect(Tile::kQueryBytes);
      load_tile<Tile>(memory.query[query_ring.stage], &p.q, &full, Tile::kRows, tile.row_tile * Tile::kRows, tile.head, tile.batch);
      query_ring.advance();
    }
    memory.value_empty[stage].wait(ring.phase ^ 1);
    memory.value_full[stage].arrive_expect(Tile::kKeyBytes);
    load_tile<Tile>(memory.value[stage], &p.v, &memory.value_full[stage], Tile::kColumns, row, kv_head, tile.batch);
    ring.advance();
  }
}

__device__ __forceinline__ unsigned fetch_add(unsigned* counter) {
  unsigned before;
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Runs on one thread: hands tiles to the consumers and keeps their buffers full.
template <typename Tile, bool kCausal>
__device__ __forceinline__ void produce(const ForwardParams& p, ForwardMemory<Tile>& memory) {
  RingPosition<Tile::kStages> ring;
  RingPosition<Tile::kQueryStages> tile_ring, query_ring;
  const unsigned total = static_cast<unsigned>(p.row_tiles * p.heads * p.batches);
  const bool has_more_rounds = total > gridDim.x;
  unsigned index = blockIdx.x;
  while (true) {
    memory.tile_empty[tile_ring.stage].wait(tile_ring.phase ^ 1);
    memory.tile[tile_ring.stage] = index < total ? static_cast<int>(index) : -1;
    memory.tile_full[tile_ring.stage].arrive();
    tile_ring.advance();
    if (index >= total) break;
    // Asked for before the copies and read after them: the answer takes most of a microsecond.
    unsigned taken = 0;
    if (has_more_rounds) taken = fetch_add(&p.schedule[0]);
    const TileIndex tile = tile_at<kCausal>(p, static_cast<int>(index));
    load_inputs<Tile>(p, memory, tile, key_tiles<Tile, kCausal>(p, tile.row_tile), ring, query_ring);
    index = has_more_rounds ? gridDim.x + taken : total;
  }
  if (has_more_rounds && fetch_add(&p.schedule[1]) == gridDim.x - 1) p.schedule[0] = p.schedule[1] = 0;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ __forceinline__ std::uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// The value reduced over the four threads that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// One warpgroup's 64 rows. Thread layout of an accumulator: element i of a thread lies in column 8 (i / 4) + 2 (lane % 4) +
// i % 2, row 16 warp + lane / 4 + 8 (i / 2 % 2): a thread has two rows, and `half` below says which.
template <typename T, typename Tile, bool kCausal>
struct Consumer {
  static constexpr int kScores = Tile::kColumns / 2;  // accumulators a thread
  static constexpr int kOutputs = Tile::kHeadSize / 2;

  const ForwardParams& p;
  ForwardMemory<Tile>& memory;
  int group;   // this warpgroup among the consumers
  int thread;  // within the warpgroup

  float scores[kScores];
  float out[kOutputs];
  std::uint32_t probabilities[kScores / 2];
  float row_max[2], row_sum[2];
  RingPosition<Tile::kStages> key_ring, value_ring;
  RingPosition<Tile::kQueryStages> query_ring, tile_ring;

  __device__ __forceinline__ int row_in_tile(int half) const {
    return group * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
  }

  // scores = q k^T for the next key tile; issued, not waited for.
  __device__ __forceinline__ void issue_scores() {
    memory.key_full[key_ring.stage].wait(key_ring.phase);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kHeadSize / 16; ++step) {
      const int panel = step / 4, offset = step % 4 * 32;
      const auto q = matrix_descriptor(memory.query[query_ring.stage] + panel * Tile::kRows * 128 + group * 64 * 128 + offset, 16);
      const auto k = matrix_descriptor(memory.key[key_ring.stage] + panel * Tile::kColumns * 128 + offset, 16);
      Wgmma<T, Tile::kColumns>::shared(scores, q, k, step > 0);
    }
    wgmma_commit();
  }

  // out += probabilities v for the next value tile; issued, not waited for.
  __device__ __forceinline__ void issue_output(bool accumulate) {
    memory.value_full[value_ring.stage].wait(value_ring.phase);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kColumns / 16; ++step) {
      const auto v = matrix_descriptor(memory.value[value_ring.stage] + step * 2048, Tile::kColumns * 128);
      Wgmma<T, Tile::kHeadSize>::registers(out, probabilities + 4 * step, v, accumulate || step > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release_key() {
    if (thread == 0) memory.key_empty[key_ring.stage].arrive();
    key_ring.advance();
  }
  __device__ __forceinline__ void release_value() {
    if (thread == 0) memory.value_empty[value_ring.stage].arrive();
    value_ring.advance();
  }

  // Sets scores of keys past the end, or after the diagonal, to -inf.
  __device__ __forceinline__ void mask_scores(int row_tile, int key_tile) {
    const int first = key_tile * Tile::kColumns + 2 * (thread % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int limit = p.Sk;
      if (kCausal) limit = min(limit, row_tile * Tile::kRows + row_in_tile(half) + p.Sk - p.Sq + 1);
      limit -= first;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& score = scores[i / 2 * 4 + half * 2 + i % 2];
        if (column >= limit) score = -INFINITY;
      }
    }
  }

  // Turns scores into probabilities relative to the running maximum; factor[half] rescales what came before.
  template <bool kFirst>
  __device__ __forceinline__ void softmax(float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = scores[half * 2];
#pragma unroll
      for (int i = 1; i < kScores / 2; ++i) largest = fmaxf(largest, scores[i / 2 * 4 + half * 2 + i % 2]);
      largest = quad_max(largest);
      if (!kFirst) largest = fmaxf(largest, row_max[half]);
      // A row that has seen no key yet keeps -inf; 0 in its place keeps the exponents from becoming NaN.
      const float safe = largest == -INFINITY ? 0.0f : largest * p.scale_log2;
      factor[half] = kFirst ? 1.0f : exp2_approx(row_max[half] * p.scale_log2 - safe);
      row_max[half] = largest;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        float& score = scores[i / 2 * 4 + half * 2 + i % 2];
        score = exp2_approx(score * p.scale_log2 - safe);
        sum += score;
      }
      row_sum[half] = kFirst ? sum : row_sum[half] * factor[half] + sum;
    }
  }

  // Two neighbouring groups of 8 columns are the register operand of one 16-deep product.
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probabilities[i] = pack(scores[2 * i], scores[2 * i + 1], T());
  }

  __device__ __forceinline__ void rescale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= factor[i / 2 % 2];
  }

  // Key tiles with no masked element: those that end before the first row's last visible key.
  __device__ __forceinline__ int unmasked_tiles(int row_tile) const {
    int keys = p.Sk;
    if (kCausal) keys = min(keys, row_tile * Tile::kRows + p.Sk - p.Sq + 1);
    return max(keys, 0) / Tile::kColumns;
  }

  // One key tile: its scores are computed while the product of the tile before is still running.
  template <bool kMasked>
  __device__ __forceinline__ void step(int row_tile, int key_tile, bool accumulate) {
    named_sync(1 + group, 256);  // this warpgroup's turn to issue: the others' softmax runs meanwhile
    issue_scores();
    issue_output(accumulate);
    named_arrive(1 + (group + 1) % Tile::kConsumers, 256);
    wgmma_wait<1>();
    release_key();
    if (kMasked) mask_scores(row_tile, key_tile);
    float factor[2];
    softmax<false>(factor);
    wgmma_wait<0>();
    release_value();
    pack_probabilities();
    rescale_output(factor);
  }

  struct Work {
    TileIndex tile;
    int key_tiles;  // 0: there is no more work
  };

  // The next tile that sees a key; those that see none are written on the way.
  __device__ __forceinline__ Work take_tile() {
    while (true) {
      memory.tile_full[tile_ring.stage].wait(tile_ring.phase);
      const int index = memory.tile[tile_ring.stage];
      named_sync(8 + group, 128);  // all have read it, and the last output tile has left the staging memory
      if (thread == 0) memory.tile_empty[tile_ring.stage].arrive();
      tile_ring.advance();
      if (index < 0) return {{}, 0};
      const TileIndex tile = tile_at<kCausal>(p, index);
      const int count = key_tiles<Tile, kCausal>(p, tile.row_tile);
      if (count > 0) return {tile, count};
      write_empty(tile);
    }
  }

  __device__ __forceinline__ void write_empty(const TileIndex& tile) {
    const int first = tile.row_tile * Tile::kRows + group * 64;
    T* base = static_cast<T*>(p.out) + tile.batch * p.out_batch + tile.head * p.out_head;
    for (int i = thread; i < 64 * Tile::kHeadSize / 8; i += 128) {
      const int row = first + i / (Tile::kHeadSize / 8);
      if (row < p.Sq) *reinterpret_cast<uint4*>(base + row * p.out_row + i % (Tile::kHeadSize / 8) * 8) = uint4{0, 0, 0, 0};
    }
    if (thread < 64 && first + thread < p.Sq)
      p.lse[tile.batch * p.lse_batch + tile.head * p.lse_head + (first + thread) * p.lse_row] = -INFINITY;
  }

  __device__ __forceinline__ void run_tile(const Work& work) {
    memory.query_full[query_ring.stage].wait(query_ring.phase);
    issue_scores();
    const int row_tile = work.tile.row_tile;
    wgmma_wait<0>();
    release_key();
    mask_scores(row_tile, work.key_tiles - 1);
    float factor[2];
    softmax<true>(factor);
    pack_probabilities();
    const int unmasked = unmasked_tiles(row_tile);
    bool accumulate = false;
    int j = work.key_tiles - 2;
    for (; j >= unmasked; --j) {
      step<true>(row_tile, j, accumulate);
      accumulate = true;
    }
    for (; j >= 0; --j) {
      step<false>(row_tile, j, accumulate);
      accumulate = true;
    }
    if (thread == 0) memory.query_empty[query_ring.stage].arrive();
    query_ring.advance();
    issue_output(accumulate);
    wgmma_wait<0>();
    release_value();
  }

  __device__ __forceinline__ void write_lse(const TileIndex& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row_tile * Tile::kRows + row_in_tile(half);
      if (thread % 4 != 0 || row >= p.Sq) continue;
      const float lse = row_sum[half] > 0.0f ? row_max[half] * p.scale + __logf(row_sum[half]) : -INFINITY;
      p.lse[tile.batch * p.lse_batch + tile.head * p.lse_head + row * p.lse_row] = lse;
    }
  }

  // Through shared memory, so that each row leaves in 16-byte pieces.
  __device__ __forceinline__ void write_output(const TileIndex& tile) {
    std::uint8_t* staging = memory.out + group * 64 * Tile::kHeadSize * 2;
    constexpr int kRowBytes = Tile::kHeadSize * 2;
    const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kOutputs / 2; ++i) {
      const int half = i % 2, chunk = i / 2;  // 8 columns = one 16-byte chunk
      const int at = row + 8 * half;
      const std::uint32_t pair = pack(out[2 * i], out[2 * i + 1], T());
      *reinterpret_cast<std::uint32_t*>(staging + at * kRowBytes + ((chunk ^ (at & 7)) * 16) + thread % 4 * 4) = pair;
    }
    named_sync(8 + group, 128);
    constexpr int kChunks = kRowBytes / 16;
    T* base = static_cast<T*>(p.out) + tile.batch * p.out_batch + tile.head * p.out_head;
#pragma unroll
    for (int i = thread; i < 64 * kChunks; i += 128) {
      const int at = i / kChunks, chunk = i % kChunks;
      const int global_row = tile.row_tile * Tile::kRows + group * 64 + at;
      const uint4 value = *reinterpret_cast<const uint4*>(staging + at * kRowBytes + ((chunk ^ (at & 7)) * 16));
      if (global_row < p.Sq) *reinterpret_cast<uint4*>(base + global_row * p.out_row + chunk * 8) = value;
    }
  }

  __device__ __forceinline__ void normalise() {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] = quad_sum(row_sum[half]);
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) inverse[half] = row_sum[half] > 0.0f ? 1.0f / row_sum[half] : 0.0f;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= inverse[i / 2 % 2];
  }

  __device__ __forceinline__ void consume() {
    if (group == Tile::kConsumers - 1) named_arrive(1, 256);
    while (true) {
      const Work work = take_tile();
      if (work.key_tiles == 0) break;
      run_tile(work);
      normalise();
      write_lse(work.tile);
      write_output(work.tile);
    }
  }
};

template <typename T, typename Tile, bool kCausal>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ std::uint8_t raw[];
  auto& memory = *reinterpret_cast<ForwardMemory<Tile>*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) & ~std::uintptr_t{1023});
  // Through a shuffle, so that the compiler knows it is the same in a whole warp.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kQueryStages; ++stage) {
      memory.query_full[stage].init(1);
      memory.query_empty[stage].init(Tile::kConsumers);
      memory.tile_full[stage].init(1);
      memory.tile_empty[stage].init(Tile::kConsumers);
    }
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      memory.key_full[stage].init(1);
      memory.value_full[stage].init(1);
      memory.key_empty[stage].init(Tile::kConsumers);
      memory.value_empty[stage].init(Tile::kConsumers);
    }
    fence_barrier_init();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
  }
  __syncthreads();
  if (warpgroup == 0) {
    lower_registers<Tile::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Tile, kCausal>(p, memory);
  } else {
    raise_registers<Tile::kConsumerRegisters>();
    Consumer<T, Tile, kCausal> consumer{p, memory, warpgroup - 1, static_cast<int>(threadIdx.x) % 128};
    consumer.consume();
  }
}

template <typename Tile>
constexpr int forward_memory_bytes() {
  return static_cast<int>(sizeof(ForwardMemory<Tile>)) + 1024;  // room to align the start
}

}  // namespace heddle::cuda::sm90
