#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/barrier_sm90.cuh"
#include "kernels/attention/pack.cuh"
#include "kernels/attention/tma_sm90.cuh"
#include "kernels/attention/wgmma_sm90.cuh"

// FlashAttention forward on sm_90: one producer warp copies tiles with TMA, warpgroups of consumers multiply with wgmma.
// Shah et al. 2024, "FlashAttention-3", algorithm 1 and section 3.2 (the second product of one key tile runs under the
// softmax of the next).

namespace heddle::cuda::sm90 {

struct ForwardParams {
  CUtensorMap q, k, v, out;  // [B, S, H, D] as (D, S, H, B)
  void* out_data;
  std::int64_t out_batch, out_row, out_head;  // strides in elements
  float* lse;
  std::int64_t lse_batch, lse_head, lse_row;
  int Sq, Sk;                 // without cu_seqlens
  int D;                      // a multiple of 8; TMA fills the tile's other columns with zeros
  int batches, heads, group;  // query heads; query heads per key head
  int row_tiles;              // tiles of query rows a head
  unsigned tiles;             // of all
  int section_heads;          // (batch, head) pairs whose tiles are handed out together; see Note: Tile order
  float scale;
  float scale_log2;  // scale * log2(e)
  bool takes_early;    // see Note: Tile order
  unsigned* schedule;  // two counters, zero between launches: tiles handed out after the first round, and blocks done
  const std::int32_t* cu_seqlens_q;  // null if all sequences have one length
  const std::int32_t* cu_seqlens_k;
  int sequences;  // with cu_seqlens
};

// kConsumers warpgroups own 64 query rows each; keys come kColumns at a time, two tiles in flight.
template <int kHeadSize_, int kConsumers_, int kColumns_>
struct ForwardTile {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 2;       // of keys and values
  static constexpr int kQueryStages = 2;  // the next tile's queries arrive under the current one
  static constexpr int kTileStages = 4;   // tiles decided on ahead
  static constexpr int kPanels = kHeadSize / kPanelColumns;
  // Registers a thread after setmaxnreg; launch gives 65536 / kThreads rounded down to 8.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kQueryBytes = kRows * kHeadSize * 2;
  static constexpr int kKeyBytes = kColumns * kHeadSize * 2;
};

// The output leaves through shared memory, a warp's 16 rows in panels of 64 columns; rows of a box in p.out.
inline constexpr int kOutRows = 16;
inline constexpr int kOutPanelBytes = kOutRows * kPanelColumns * 2;

// What a block does with one tile: the attention of its rows to the keys of their sequence.
struct ForwardWork {
  int head, batch;
  int row;        // the first one, in q
  int rows;       // of the sequence from there on: the tile's, or more, or fewer
  int key;        // the sequence's first one, in k
  int keys;       // of the sequence
  int diagonal;   // causal: keys that the first row sees; every row sees one more than the row before
  int key_tiles;  // that a row of the tile sees; -1: there is no more work
  int unmasked;   // key tiles that every row sees whole
};

template <typename Tile>
struct ForwardMemory {
  alignas(1024) std::uint8_t query[Tile::kQueryStages][Tile::kQueryBytes];
  alignas(1024) std::uint8_t key[Tile::kStages][Tile::kKeyBytes];
  alignas(1024) std::uint8_t value[Tile::kStages][Tile::kKeyBytes];
  alignas(1024) std::uint8_t out[Tile::kQueryBytes];
  ForwardWork work[Tile::kTileStages];
  Barrier work_full[Tile::kTileStages], work_empty[Tile::kTileStages];
  Barrier query_full[Tile::kQueryStages], query_empty[Tile::kQueryStages];
  Barrier key_full[Tile::kStages], key_empty[Tile::kStages];
  Barrier value_full[Tile::kStages], value_empty[Tile::kStages];
  Barrier value_landed[Tile::kStages];  // in place of value_full where the guards look first; see Note: Hidden values
  bool has_not_finite[Tile::kStages];   // what they found
};

// Named barriers; those with a warpgroup's number added come one a consumer.
constexpr int kTurn = 1, kConsumersMeet = 4, kGuardsMeet = 5;

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
// of the card idle. Tiles of one head follow each other, so that its keys and values are read from memory once and then from
// the L2 cache; with causal masks, where the longest tiles have to go first, those of a section of heads.
// A block that takes its next tile early, at the start of the current one, never waits for the number or the queries, but the
// tile may be one that another block is free for sooner. Late pays where a block has few tiles, or long ones.
template <bool kCausal>
__device__ __forceinline__ TileIndex tile_at(const ForwardParams& p, int index) {
  const int section_tiles = p.section_heads * p.row_tiles;
  const int section = index / section_tiles, within = index % section_tiles;
  const int heads_here = min(p.section_heads, p.heads * p.batches - section * p.section_heads);
  const int level = within / heads_here;
  const int pair = section * p.section_heads + within % heads_here;
  return {kCausal ? p.row_tiles - 1 - level : level, pair % p.heads, pair / p.heads};
}

// Note: Tiles of sequences of different lengths
// Sequence i may use the row tiles from cu_seqlens[i] / kRows + i up to where the next one's start: never too few, at most
// one too many, and no table is needed.
template <int kRows>
__device__ __forceinline__ int first_row_tile(const ForwardParams& p, int sequence) {
  return __ldg(p.cu_seqlens_q + sequence) / kRows + sequence;
}

template <int kRows>
__device__ __forceinline__ int sequence_of(const ForwardParams& p, int row_tile) {
  int low = 0, high = p.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_row_tile<kRows>(p, middle) <= row_tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

template <typename Tile, bool kCausal>
__device__ __forceinline__ ForwardWork forward_work(const ForwardParams& p, int index) {
  const TileIndex tile = tile_at<kCausal>(p, index);
  int row = tile.row_tile * Tile::kRows, first_row = 0, Sq = p.Sq, first_key = 0, Sk = p.Sk;  // row: in the sequence
  if (p.cu_seqlens_q != nullptr) {
    const int i = sequence_of<Tile::kRows>(p, tile.row_tile);
    row = (tile.row_tile - first_row_tile<Tile::kRows>(p, i)) * Tile::kRows;
    first_row = __ldg(p.cu_seqlens_q + i);
    Sq = __ldg(p.cu_seqlens_q + i + 1) - first_row;
    first_key = __ldg(p.cu_seqlens_k + i);
    Sk = __ldg(p.cu_seqlens_k + i + 1) - first_key;
  }
  const int diagonal = row + Sk - Sq + 1;
  const int seen = kCausal ? max(0, min(Sk, diagonal + min(Tile::kRows, Sq - row) - 1)) : Sk;  // by the last row
  const int seen_by_all = kCausal ? max(0, min(Sk, diagonal)) : Sk;
  return {.head = tile.head, .batch = tile.batch, .row = first_row + row, .rows = Sq - row, .key = first_key, .keys = Sk,
          .diagonal = diagonal, .key_tiles = (seen + Tile::kColumns - 1) / Tile::kColumns, .unmasked = seen_by_all / Tile::kColumns};
}

template <typename Tile>
__device__ __forceinline__ void load_tile(std::uint8_t* to, const CUtensorMap* map, Barrier* full, int rows, int row, int head,
                                          int batch) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    tma_load(to + panel * rows * 128, map, full, panel * kPanelColumns, row, head, batch);
}

// Note: Hidden values
// Where a value is not finite, its product with a probability of zero is NaN: a value that a row does not see would reach
// it. TMA puts zeros past the end of k, but in a batch of sequences it brings the next one's rows; and after the diagonal
// lie values that other rows of the tile see. So three warps look at the tiles that have such values before the consumers
// do: they clear the rows past the end of the sequence, and tell if one before it is not finite. Then the consumers add those
// to the rows that see them and clear them.
template <bool kCausal>
__device__ __forceinline__ bool needs_guards(const ForwardParams& p) {
  return kCausal || p.cu_seqlens_k != nullptr;
}
template <bool kCausal>
__device__ __forceinline__ int guarded_tiles(const ForwardParams& p, const ForwardWork& work) {
  return needs_guards<kCausal>(p) ? work.key_tiles - work.unmasked : 0;
}

__device__ __forceinline__ unsigned fetch_add(unsigned* counter) {
  unsigned before;
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Runs on one thread: hands tiles to the other warps and keeps the consumers' buffers full.
template <typename Tile, bool kCausal>
struct Producer {
  const ForwardParams& p;
  ForwardMemory<Tile>& memory;
  RingPosition<Tile::kTileStages> work_ring = {};
  RingPosition<Tile::kQueryStages> query_ring = {};
  RingPosition<Tile::kStages> ring = {};
  unsigned taken = blockIdx.x - gridDim.x;  // the counter's last answer

  // Takes the number of a tile; the answer is most of a microsecond away. See Note: Tile order.
  __device__ __forceinline__ void ask() { taken = p.tiles > gridDim.x ? fetch_add(&p.schedule[0]) : p.tiles; }

  // Decides on the next tile, tells the other warps, and loads its queries.
  __device__ __forceinline__ const ForwardWork& announce() {
    ForwardWork next;
    do {
      const unsigned index = gridDim.x + taken;
      if (index < p.tiles) next = forward_work<Tile, kCausal>(p, static_cast<int>(index));
      else next = {.rows = 1, .key_tiles = -1};
      if (index < p.tiles && (p.takes_early || next.rows <= 0)) ask();
    } while (next.rows <= 0);
    ForwardWork& work = memory.work[work_ring.stage];
    memory.work_empty[work_ring.stage].wait(work_ring.phase ^ 1);
    work = next;
    memory.work_full[work_ring.stage].arrive();
    work_ring.advance();
    if (next.key_tiles <= 0) return work;
    Barrier& full = memory.query_full[query_ring.stage];
    memory.query_empty[query_ring.stage].wait(query_ring.phase ^ 1);
    full.arrive_expect(Tile::kQueryBytes);
    load_tile<Tile>(memory.query[query_ring.stage], &p.q, &full, Tile::kRows, next.row, next.head, next.batch);
    query_ring.advance();
    return work;
  }

  __device__ __forceinline__ void load_key_tile(const ForwardWork& work, int j, bool is_guarded) {
    const int stage = ring.stage, row = work.key + j * Tile::kColumns, head = work.head / p.group, batch = work.batch;
    memory.key_empty[stage].wait(ring.phase ^ 1);
    memory.key_full[stage].arrive_expect(Tile::kKeyBytes);
    load_tile<Tile>(memory.key[stage], &p.k, &memory.key_full[stage], Tile::kColumns, row, head, batch);
    memory.value_empty[stage].wait(ring.phase ^ 1);
    Barrier& full = is_guarded ? memory.value_landed[stage] : memory.value_full[stage];
    full.arrive_expect(Tile::kKeyBytes);
    load_tile<Tile>(memory.value[stage], &p.v, &full, Tile::kColumns, row, head, batch);
    ring.advance();
  }

  // Keys and values of the tiles from `first` down to `last`.
  __device__ __forceinline__ void load_key_tiles(const ForwardWork& work, int first, int last) {
    const int guarded = work.key_tiles - guarded_tiles<kCausal>(p, work);
#pragma unroll 1
    for (int j = first; j >= last; --j) load_key_tile(work, j, j >= guarded);
  }

  // The masked tiles, which are the last ones, come first. The next tile is announced after two, or before the last one: always
  // before its queries are needed, and when the buffer for them is free or soon will be.
  __device__ __forceinline__ void produce() {
    const ForwardWork* work = &announce();
    while (work->key_tiles >= 0) {
      const int late_rest = work->key_tiles > 2 ? 1 : 0, rest = p.takes_early ? max(work->key_tiles - 2, 0) : late_rest;
      load_key_tiles(*work, work->key_tiles - 1, rest);
      if (!p.takes_early) ask();
      const ForwardWork* next = &announce();
      load_key_tiles(*work, rest - 1, 0);
      work = next;
    }
    if (p.tiles > gridDim.x && fetch_add(&p.schedule[1]) == gridDim.x - 1) p.schedule[0] = p.schedule[1] = 0;
  }
};

// Not 0 if one of two elements is infinite or NaN: all bits of its exponent are ones.
__device__ __forceinline__ std::uint32_t not_finite(std::uint32_t pair, __nv_bfloat16) {
  return ((pair & 0x7F807F80u) + 0x00800080u) & 0x80008000u;
}
__device__ __forceinline__ std::uint32_t not_finite(std::uint32_t pair, __half) {
  return ((pair & 0x7C007C00u) + 0x04000400u) & 0x80008000u;
}
__device__ __forceinline__ std::uint32_t not_finite(const uint4& x, auto type) {
  return not_finite(x.x, type) | not_finite(x.y, type) | not_finite(x.z, type) | not_finite(x.w, type);
}

__device__ __forceinline__ float2 unpack(std::uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}
__device__ __forceinline__ float2 unpack(std::uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Runs on the three warps beside the producer's; see Note: Hidden values.
template <typename T, typename Tile, bool kCausal>
__device__ __forceinline__ void guard_values(const ForwardParams& p, ForwardMemory<Tile>& memory) {
  constexpr int kGuards = 96, kRowChunks = 8;  // a row of a panel is 8 chunks of 16 bytes
  const int thread = static_cast<int>(threadIdx.x) - 32;
  RingPosition<Tile::kTileStages> work_ring;
  RingPosition<Tile::kStages> ring;
  std::uint32_t landed_phases = 0;  // a bit a stage
  while (true) {
    memory.work_full[work_ring.stage].wait(work_ring.phase);
    const ForwardWork& work = memory.work[work_ring.stage];
    const int key_tiles = work.key_tiles, keys = work.keys, guarded = guarded_tiles<kCausal>(p, work);
    named_sync(kGuardsMeet, kGuards);  // all have read it
    if (thread == 0) memory.work_empty[work_ring.stage].arrive();
    work_ring.advance();
    if (key_tiles < 0) return;
    for (int j = key_tiles - 1; j >= 0; --j, ring.advance()) {
      if (key_tiles - 1 - j >= guarded) continue;
      memory.value_landed[ring.stage].wait(landed_phases >> ring.stage & 1);
      landed_phases ^= 1u << ring.stage;
      const int end = min(keys - j * Tile::kColumns, Tile::kColumns) * kRowChunks;
      std::uint32_t found = 0;
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        uint4* chunks = reinterpret_cast<uint4*>(memory.value[ring.stage]) + panel * Tile::kColumns * kRowChunks;
        if (kCausal)
#pragma unroll 2
          for (int i = thread; i < end; i += kGuards) found |= not_finite(chunks[i], T());
        for (int i = end + thread; i < Tile::kColumns * kRowChunks; i += kGuards) chunks[i] = uint4{0, 0, 0, 0};
      }
      fence_async_proxy();
      const bool has_not_finite = named_any(kGuardsMeet, kGuards, found != 0);
      if (thread != 0) continue;
      memory.has_not_finite[ring.stage] = has_not_finite;
      memory.value_full[ring.stage].arrive();
    }
  }
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
  RingPosition<Tile::kQueryStages> query_ring;
  RingPosition<Tile::kTileStages> work_ring;

  __device__ __forceinline__ int row_in_tile(int half) const {
    return group * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
  }

  // scores = q k^T for the next key tile, which has arrived; issued, not waited for.
  __device__ __forceinline__ void issue_scores() {
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

  // The first key of a tile that row_in_tile(half) does not see, counted from the tile's first.
  __device__ __forceinline__ int key_limit(const ForwardWork& work, int key_tile, int half) const {
    const int keys = kCausal ? min(work.keys, work.diagonal + row_in_tile(half)) : work.keys;
    return keys - key_tile * Tile::kColumns;
  }

  // Sets scores of keys past the end, or after the diagonal, to -inf.
  template <int kCount = kScores>
  __device__ __forceinline__ void mask_scores(const ForwardWork& work, int key_tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit = key_limit(work, key_tile, half) - 2 * (thread % 4);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& score = scores[i / 2 * 4 + half * 2 + i % 2];
        if (column >= limit) score = -INFINITY;
      }
    }
  }

  // Turns scores into probabilities relative to the running maximum; factor[half] rescales what came before. Maxima and sums
  // run in several chains: a warp is alone with its softmax, and one chain would wait for itself.
  template <bool kFirst, int kCount = kScores>
  __device__ __forceinline__ void softmax(float (&factor)[2]) {
    constexpr int kChains = 4;
    float largest[2][kChains], sum[2][kChains], safe[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& chain = largest[i / 2 % 2][i % 2 + i / 4 % (kChains / 2) * 2];
      chain = i / 4 < kChains / 2 ? scores[i] : fmaxf(chain, scores[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half][0];
#pragma unroll
      for (int i = 1; i < kChains; ++i) most = fmaxf(most, largest[half][i]);
      most = quad_max(most);
      if (!kFirst) most = fmaxf(most, row_max[half]);
      // A row that has seen no key yet keeps -inf; 0 in its place keeps the exponents from becoming NaN.
      safe[half] = most == -INFINITY ? 0.0f : most * p.scale_log2;
      factor[half] = kFirst ? 1.0f : exp2_approx(row_max[half] * p.scale_log2 - safe[half]);
      row_max[half] = most;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int half = i / 2 % 2;
      float& chain = sum[half][i % 2 + i / 4 % (kChains / 2) * 2];
      scores[i] = exp2_approx(scores[i] * p.scale_log2 - safe[half]);
      chain = i / 4 < kChains / 2 ? scores[i] : chain + scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half][0];
#pragma unroll
      for (int i = 1; i < kChains; ++i) total += sum[half][i];
      row_sum[half] = kFirst ? total : row_sum[half] * factor[half] + total;
    }
  }

  // Two neighbouring groups of 8 columns are the register operand of one 16-deep product.
  template <int kCount = kScores>
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      probabilities[i] = i < kCount / 2 ? pack(scores[2 * i], scores[2 * i + 1], T()) : 0;
  }

  __device__ __forceinline__ void rescale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= factor[i / 2 % 2];
  }

  // Before the product with a tile of values that has some a row does not see: see Note: Hidden values. Returns whether the
  // product has something to add to.
  __device__ __forceinline__ bool admit_values(const ForwardWork& work, int key_tile, bool accumulate) {
    const int stage = value_ring.stage;
    memory.value_full[stage].wait(value_ring.phase);
    if (!memory.has_not_finite[stage]) return accumulate;
    if (!accumulate)
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    const int limits[2] = {key_limit(work, key_tile, 0), key_limit(work, key_tile, 1)};
    for (int key = 0; key < Tile::kColumns; ++key)
#pragma unroll
      for (int i = 0; i < kOutputs / 4; ++i) {
        const int at = (i / 8 * Tile::kColumns + key) * 128 + ((i % 8 ^ key % 8) * 16) + thread % 4 * 4;
        const float2 pair = unpack(*reinterpret_cast<const std::uint32_t*>(memory.value[stage] + at), T());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (key < limits[half] && !isfinite(pair.x)) out[i * 4 + half * 2] += pair.x;
          if (key < limits[half] && !isfinite(pair.y)) out[i * 4 + half * 2 + 1] += pair.y;
        }
      }
    named_sync(kConsumersMeet, Tile::kConsumers * 128);  // all have added theirs
    auto* elements = reinterpret_cast<std::uint16_t*>(memory.value[stage]);
    for (int i = group * 128 + thread; i < Tile::kKeyBytes / 2; i += Tile::kConsumers * 128)
      if (not_finite(elements[i], T())) elements[i] = 0;
    fence_async_proxy();
    named_sync(kConsumersMeet, Tile::kConsumers * 128);
    return true;
  }

  // One key tile: its scores are computed while the product of the tile before is still running.
  template <bool kMasked>
  __device__ __forceinline__ bool step(const ForwardWork& work, int key_tile, bool accumulate) {
    named_sync(kTurn + group, 256);  // this warpgroup's turn to issue: the others' softmax runs meanwhile
    memory.key_full[key_ring.stage].wait(key_ring.phase);
    issue_scores();
    issue_output(accumulate);
    named_arrive(kTurn + (group + 1) % Tile::kConsumers, 256);
    wgmma_wait<1>();
    release_key();
    if (kMasked) mask_scores(work, key_tile);
    float factor[2];
    softmax<false>(factor);
    wgmma_wait<0>();
    release_value();
    pack_probabilities();
    rescale_output(factor);
    return !kMasked || !kCausal || admit_values(work, key_tile, true);
  }

  // The work after this; tiles that see no key are written on the way. It stays valid until release_work().
  __device__ __forceinline__ const ForwardWork& take_work() {
    while (true) {
      memory.work_full[work_ring.stage].wait(work_ring.phase);
      const ForwardWork& work = memory.work[work_ring.stage];
      if (work.key_tiles != 0) return work;
      write_empty(work);
      release_work(work_ring.stage);
      work_ring.advance();
    }
  }
  // A warp has read all it needs of a tile's work.
  __device__ __forceinline__ void release_work(int stage) {
    __syncwarp();
    if (thread % 32 == 0) memory.work_empty[stage].arrive();
  }

  __device__ __forceinline__ void write_empty(const ForwardWork& work) {
    const int first = group * 64, rows = min(64, work.rows - first), chunks = p.D / 8;
    T* base = out_row(work, first);
#pragma unroll 1
    for (int i = thread; i < rows * chunks; i += 128)
      *reinterpret_cast<uint4*>(base + i / chunks * p.out_row + i % chunks * 8) = uint4{0, 0, 0, 0};
    if (thread < rows) *lse_row(work, first + thread) = -INFINITY;
  }

  // Masks, if the tile needs it, and turns the first scores of a tile into probabilities.
  template <int kCount = kScores>
  __device__ __forceinline__ void first_softmax(const ForwardWork& work, int key_tile) {
    if (key_tile >= work.unmasked) mask_scores<kCount>(work, key_tile);
    float factor[2];
    softmax<true, kCount>(factor);
    pack_probabilities<kCount>();
  }

  // Everything of a tile from its first scores on, but for the last product. Returns whether that has something to add to.
  __device__ __forceinline__ bool run_key_tiles(const ForwardWork& work) {
    int j = work.key_tiles - 1;
    const int unmasked = work.unmasked;
    release_key();
    // On the diagonal the first warpgroup's rows see nothing of the second half, whose scores need no softmax then.
    const bool sees_half = kCausal && work.diagonal + group * 64 + 63 <= j * Tile::kColumns + Tile::kColumns / 2;
    if (sees_half) first_softmax<kScores / 2>(work, j);
    else first_softmax(work, j);
    bool accumulate = kCausal && j >= unmasked && admit_values(work, j, false);
    for (--j; j >= unmasked; --j) accumulate = step<true>(work, j, accumulate);
    for (; j >= 0; --j) accumulate = step<false>(work, j, accumulate);
    if (thread == 0) memory.query_empty[query_ring.stage].arrive();
    query_ring.advance();
    return accumulate;
  }

  __device__ __forceinline__ T* out_row(const ForwardWork& work, int row) const {
    return static_cast<T*>(p.out_data) + work.batch * p.out_batch + work.head * p.out_head + (work.row + row) * p.out_row;
  }
  __device__ __forceinline__ float* lse_row(const ForwardWork& work, int row) const {
    return p.lse + work.batch * p.lse_batch + work.head * p.lse_head + (work.row + row) * p.lse_row;
  }

  __device__ __forceinline__ void write_lse(const ForwardWork& work) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_in_tile(half);
      if (thread % 4 != 0 || row >= work.rows) continue;
      *lse_row(work, row) = row_sum[half] == 0.0f ? -INFINITY : row_max[half] * p.scale + __logf(row_sum[half]);
    }
    __syncwarp();  // together again for what follows
  }

  // Each warp sends its own rows on: as a box, or, at the end of a sequence, in 16-byte pieces.
  __device__ __forceinline__ void write_output(const ForwardWork& work) {
    int lane = thread % 32;
    asm volatile("" : "+r"(lane));  // or the addresses are computed once, before all tiles, and kept where no register is free
    const int warp = __shfl_sync(0xFFFFFFFFu, thread / 32, 0), first = group * 64 + warp * kOutRows;
    std::uint8_t* staging = memory.out + (group * 4 + warp) * Tile::kPanels * kOutPanelBytes;
    if (elect_one()) bulk_wait_read();  // the tile before has left it
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOutputs; i += 8) {
      const int chunk = i / 4 + lane / 16;  // 8 columns
      store_matrices(staging + chunk / 8 * kOutPanelBytes + lane % 16 * 128 + ((chunk ^ lane) % 8) * 16,
                     pack(out[i], out[i + 1], T()), pack(out[i + 2], out[i + 3], T()), pack(out[i + 4], out[i + 5], T()),
                     pack(out[i + 6], out[i + 7], T()));
    }
    const int rows = work.rows - first;
    if (rows >= kOutRows) {
      fence_async_proxy();
      __syncwarp();
      if (!elect_one()) return;
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        tma_store(&p.out, staging + panel * kOutPanelBytes, panel * kPanelColumns, work.row + first, work.head, work.batch);
      bulk_commit();
    } else {
      __syncwarp();
      const int chunks = p.D / 8;
      T* to = out_row(work, first);
#pragma unroll 1
      for (int i = lane; i < rows * chunks; i += 32) {
        const int row = i / chunks, chunk = i % chunks;
        *reinterpret_cast<uint4*>(to + row * p.out_row + chunk * 8) = *reinterpret_cast<const uint4*>(
            staging + chunk / 8 * kOutPanelBytes + row * 128 + ((chunk ^ row) % 8) * 16);
      }
      __syncwarp();  // before the next tile overwrites what is read here
    }
  }

  __device__ __forceinline__ void sum_rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] = quad_sum(row_sum[half]);
  }

  __device__ __forceinline__ void normalise() {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) inverse[half] = row_sum[half] == 0.0f ? 0.0f : __fdividef(1.0f, row_sum[half]);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= inverse[i / 2 % 2];
  }

  // The first scores of a tile are computed under the output of the one before. After the last tile they are computed once
  // more, from what the memory holds, and dropped: a branch around the product would let ptxas serialise it.
  __device__ __forceinline__ void consume() {
    if (group == Tile::kConsumers - 1) named_arrive(kTurn, 256);
    const ForwardWork* work = &take_work();
    if (work->key_tiles < 0) return;
    await_first_keys();
    issue_scores();
    wgmma_wait<0>();
    while (true) {
      issue_output(run_key_tiles(*work));
      const int stage = work_ring.stage;
      work_ring.advance();
      const ForwardWork* next = &take_work();
      const bool is_last = next->key_tiles < 0;
      if (!is_last) await_first_keys();
      issue_scores();
      sum_rows();
      write_lse(*work);  // before the fence in write_output, which waits for stores
      wgmma_wait<1>();
      release_value();
      normalise();
      write_output(*work);
      release_work(stage);
      wgmma_wait<0>();
      if (is_last) break;
      work = next;
    }
    if (elect_one()) bulk_wait_read();  // shared memory is there no longer than the block
  }

  __device__ __forceinline__ void await_first_keys() {
    memory.query_full[query_ring.stage].wait(query_ring.phase);
    memory.key_full[key_ring.stage].wait(key_ring.phase);
  }
};

template <typename T, typename Tile, bool kCausal>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_forward_kernel(const __grid_constant__ ForwardParams p) {
  // Aligned by declaration: an address rounded up by hand is no longer known to lie in shared memory, and every access to it
  // becomes a generic one.
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& memory = *reinterpret_cast<ForwardMemory<Tile>*>(raw);
  // Through a shuffle, so that the compiler knows it is the same in a whole warp.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 32)
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v, &p.out}) prefetch_map(map);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kQueryStages; ++stage) {
      memory.query_full[stage].init(1);
      memory.query_empty[stage].init(Tile::kConsumers);
    }
    for (int stage = 0; stage < Tile::kTileStages; ++stage) {
      memory.work_full[stage].init(1);
      memory.work_empty[stage].init(4 * Tile::kConsumers + (needs_guards<kCausal>(p) ? 1 : 0));
    }
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      memory.key_full[stage].init(1);
      memory.value_full[stage].init(1);
      memory.value_landed[stage].init(1);
      memory.key_empty[stage].init(Tile::kConsumers);
      memory.value_empty[stage].init(Tile::kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup == 0) {
    lower_registers<Tile::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<Tile, kCausal>{p, memory}.produce();
    } else if (threadIdx.x >= 32 && needs_guards<kCausal>(p)) {
      guard_values<T, Tile, kCausal>(p, memory);
    }
  } else {
    raise_registers<Tile::kConsumerRegisters>();
    Consumer<T, Tile, kCausal> consumer{p, memory, warpgroup - 1, static_cast<int>(threadIdx.x) % 128};
    consumer.consume();
  }
}

template <typename Tile>
constexpr int forward_memory_bytes() {
  return static_cast<int>(sizeof(ForwardMemory<Tile>));
}

}  // namespace heddle::cuda::sm90
