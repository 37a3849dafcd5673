#pragma once

#include <climits>

#include "kernels/attention/backward_prepare.h"
#include "kernels/attention/forward_sm90.cuh"
#include "kernels/runtime/launch.cuh"

// FlashAttention backward on sm_90. A block owns a tile of keys and loops over the query tiles that see it, for every query
// head of the group: two threads copy tiles with TMA, two warpgroups own 64 keys each and keep dk and dv in registers, and two
// warps add dq to global memory.
// Shah et al. 2024, "FlashAttention-3", algorithm 3.

namespace heddle::cuda::sm90 {

struct BackwardParams {
  CUtensorMap q, k, v, dout;  // [B, S, H, D] as (D, S, H, B)
  PaddedRows rows;            // of queries
  std::int64_t sequence_rows;  // of one sequence in the padded buffers, if all are equally long
  const float* lse_log2;      // [Hq, rows.total_rows]
  const float* delta;         // [Hq, rows.total_rows]
  float* dq_sum;              // [Hq, rows.total_rows, kHeadSize], DqOrder::warpgroup_blocks
  void* dk;
  void* dv;
  std::int64_t dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head;  // strides in elements
  const std::int32_t* cu_seqlens_k;  // null: all sequences have Sq queries and Sk keys, and one batch entry each
  int D;
  int Sq, Sk;                        // lengths, or bounds of them
  int sequences, key_heads, group;   // query heads per key head
  int key_tiles;                     // tiles of keys a head
  int section_heads;  // (sequence, key head) pairs whose queries share the L2 cache
  float scale;
  float scale_log2;  // scale * log2(e)
  unsigned tiles;      // in all
  // Two counters, zero between launches: tiles handed out after the first round, and blocks done. Null if there is one round.
  unsigned* schedule;
  int row_tiles;    // of a head in the padded buffers
  bool alternates;  // see Note: Order of query tiles
  unsigned* turns;  // [Hq, rows.total_rows / kRows, kConsumers], zeros; if sums of dq are deterministic: see Note: Turns of key tiles
};

template <int kHeadSize_, int kRows_>
struct BackwardTile {
  static constexpr int kHeadSize = kHeadSize_;  // columns of a head; TMA fills those past D with zeros
  static constexpr int kRows = kRows_;     // queries
  static constexpr int kConsumers = 2;     // warpgroups of 64 keys
  static constexpr int kColumns = 128;     // keys
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kKeyStages = 2;  // of keys: the next tile's arrive under this one
  static constexpr int kQueryStages = kHeadSize == 64 ? 3 : 2;  // what memory has room for
  static constexpr int kGradStages = 2;  // of dout
  static constexpr int kScoreStages = 2;  // of ds: a warpgroup may be one query tile ahead of the other
  static constexpr int kTileStages = 2;
  static constexpr int kPolynomials = 4;  // of 16 exponentials, see exp2_polynomial
  static constexpr bool kHoldsKeys = kHeadSize == 64;  // keys are register operands of the scores; larger heads have no registers left
  static constexpr int kPanels = kHeadSize / kPanelColumns;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kQueryBytes = kRows * kHeadSize * 2;
  static constexpr int kKeyBytes = kColumns * kHeadSize * 2;
  static constexpr int kScoreBytes = kRows * kColumns * 2;
  static constexpr int kRowBytes = kRows * 4;
  // dq of a tile as blocks of 64 rows by 64 columns, one a warpgroup.
  static constexpr int kBlockBytes = 64 * 64 * 4;
  static_assert(kRows / 64 * kPanels == kConsumers);
};

// One tile of keys.
struct BackwardWork {
  int key_head;  // -1: there is no more work
  int batch, query_row, key_row;  // of the tensors: the sequence's first query, the tile's first key
  int keys;                       // of the tile; not above 0 past the end
  int level;                      // how many tiles of the sequence's keys are before this one
  int diagonal;    // with a causal mask, the first query that sees the tile's first key; each further key hides one more
  int query_tiles;  // that see a key of it
  int begin, step;  // the first of them, and from one to the next, 1 or -1; see Note: Order of query tiles
  int begin_row, end_row;  // rows of queries outside are none of the sequence's, or see no key; none if TMA clears them
  std::int64_t padded;  // the sequence's first query in the padded buffers
};

template <typename Tile>
struct BackwardMemory {
  alignas(1024) std::uint8_t key[Tile::kKeyStages][Tile::kKeyBytes];
  alignas(1024) std::uint8_t value[Tile::kKeyBytes];
  alignas(1024) std::uint8_t query[Tile::kQueryStages][Tile::kQueryBytes];
  alignas(1024) std::uint8_t grad[Tile::kGradStages][Tile::kQueryBytes];  // dout
  alignas(1024) std::uint8_t dscores[Tile::kScoreStages][Tile::kScoreBytes];  // ds^T, panels of [kColumns, 64 queries]
  alignas(1024) std::uint8_t dq[Tile::kConsumers][Tile::kBlockBytes];
  alignas(16) float lse[Tile::kQueryStages][Tile::kRows];
  alignas(16) float delta[Tile::kGradStages][Tile::kRows];
  BackwardWork work[Tile::kTileStages];
  Barrier tile_full[Tile::kTileStages], tile_empty[Tile::kTileStages];
  Barrier query_full[Tile::kQueryStages], query_empty[Tile::kQueryStages];
  Barrier grad_full[Tile::kGradStages], grad_empty[Tile::kGradStages];
  Barrier key_full[Tile::kKeyStages], key_empty[Tile::kKeyStages];
  Barrier value_full, value_empty;
  Barrier dq_empty[Tile::kConsumers];
  // See Note: Keys that are not finite.
  Barrier inspected;
  bool has_not_finite[Tile::kConsumers];  // what each writer found
  std::uint32_t key_flags[Tile::kColumns / 32];  // a bit a key
};

// Named barriers; those with a warpgroup's number added come in pairs.
constexpr int kDscoresStored = 1, kDqFull = 2, kStaging = 4;

// Writes what a block does with the tile of keys `index`. Causal tiles go longest first: the first keys are seen by most
// queries. See Note: Tile order.
template <typename Tile, bool kCausal, bool kDeterministic>
__device__ __forceinline__ void describe_work(const BackwardParams& p, unsigned index, BackwardWork& work) {
  const unsigned section_tiles = p.section_heads * p.key_tiles, section = index / section_tiles, within = index % section_tiles;
  const unsigned first_pair = section * p.section_heads, heads_here = min(p.section_heads, p.key_heads * p.sequences - first_pair);
  const unsigned pair = first_pair + within % heads_here, number = pair / p.key_heads;
  const int level = within / heads_here, first_key = level * Tile::kColumns;
  work.key_head = pair % p.key_heads;
  work.level = level;
  int Sq = p.Sq, Sk = p.Sk;
  if (p.cu_seqlens_k == nullptr) {
    work.batch = number;
    work.query_row = 0;
    work.key_row = first_key;
    work.padded = number * p.sequence_rows;
  } else {
    const int query_row = p.rows.cu_seqlens[number], key_row = p.cu_seqlens_k[number];
    Sq = p.rows.cu_seqlens[number + 1] - query_row;
    Sk = p.cu_seqlens_k[number + 1] - key_row;
    work.batch = 0;
    work.query_row = query_row;
    work.key_row = key_row + first_key;
    work.padded = std::int64_t{query_row / Tile::kRows + static_cast<int>(number)} * Tile::kRows;  // Note: Padded rows
  }
  work.keys = min(Tile::kColumns, Sk - first_key);
  work.diagonal = first_key + Sq - Sk;
  work.begin_row = kCausal ? Sq - Sk : 0;
  work.end_row = p.cu_seqlens_k != nullptr ? Sq : INT_MAX;
  const int end = work.keys > 0 ? (Sq + Tile::kRows - 1) / Tile::kRows : 0;
  const int first = kCausal ? min(end, max(0, work.diagonal) / Tile::kRows) : 0;
  work.query_tiles = end - first;
  const bool goes_down = kCausal && (kDeterministic || (p.alternates && within / gridDim.x % 2 == 0));
  work.step = goes_down ? -1 : 1;
  work.begin = goes_down ? end - 1 : first;
}

// The first row of a query tile in the padded buffers.
template <typename Tile>
__device__ __forceinline__ std::int64_t padded_row(const BackwardParams& p, const BackwardWork& work, int head, int row_tile) {
  return head * p.rows.total_rows + work.padded + row_tile * Tile::kRows;
}

// Note: Order of query tiles
// The heads of a group take turns at each query tile, so that blocks with other keys are at most a few tiles apart in all of them and
// find queries and dq in the L2 cache. With one head after the other, causal blocks, which differ in length, drift apart.
// So a block's first causal tile goes from the last queries, which see all keys, down to its diagonal; its second from there up; and so
// on. Tiles are handed out longest first, and the block that ends first, with tile n1, gets the longest one left, n2. Their sum is the
// same for all blocks, and then all of them are at the same queries again. Not without groups, where the queries of a section of
// heads fit in the cache. If dq is summed in turns all go down: see Note: Turns of key tiles.

// Calls visit(m, head) for each query tile and head, in the order in which all warps handle them.
template <bool kCausal, typename Visit>
__device__ __forceinline__ void for_each_query_tile(const BackwardParams& p, const BackwardWork& work, const Visit& visit) {
#pragma unroll 1  // unrolled, the loaders spill
  for (int i = 0; i < work.query_tiles; ++i)
#pragma unroll 1
    for (int head = 0; head < p.group; ++head) visit(kCausal ? work.begin + i * work.step : i, work.key_head * p.group + head);
}

// Calls visit(work) for each tile of keys that this block gets.
template <typename Tile, typename Visit>
__device__ __forceinline__ void for_each_work(BackwardMemory<Tile>& memory, bool is_leader, const Visit& visit) {
  RingPosition<Tile::kTileStages> ring;
  while (true) {
    memory.tile_full[ring.stage].wait(ring.phase);
    const BackwardWork& work = memory.work[ring.stage];
    if (work.key_head < 0) return;
    visit(work);
    if (is_leader) memory.tile_empty[ring.stage].arrive();
    ring.advance();
  }
}

// Runs on one thread: hands tiles of keys to the other warps, and loads keys and queries.
template <typename Tile, bool kCausal, bool kDeterministic>
__device__ __forceinline__ void produce_queries(const BackwardParams& p, BackwardMemory<Tile>& memory) {
  RingPosition<Tile::kKeyStages> key_ring;
  RingPosition<Tile::kQueryStages> ring;
  unsigned index = blockIdx.x;
  for (unsigned turn = 0;; ++turn) {
    const unsigned stage = turn % Tile::kTileStages;
    memory.tile_empty[stage].wait(turn / Tile::kTileStages % 2 ^ 1);
    BackwardWork& work = memory.work[stage];
    if (index < p.tiles) describe_work<Tile, kCausal, kDeterministic>(p, index, work);
    else work.key_head = -1;
    memory.tile_full[stage].arrive();
    if (index >= p.tiles) break;
    if (work.query_tiles > 0) {
      Barrier* full = &memory.key_full[key_ring.stage];
      memory.key_empty[key_ring.stage].wait(key_ring.phase ^ 1);
      full->arrive_expect(Tile::kKeyBytes);
      load_tile<Tile>(memory.key[key_ring.stage], &p.k, full, Tile::kColumns, work.key_row, work.key_head, work.batch);
      key_ring.advance();
    }
    for_each_query_tile<kCausal>(p, work, [&](int m, int head) {
      Barrier* full = &memory.query_full[ring.stage];
      memory.query_empty[ring.stage].wait(ring.phase ^ 1);
      full->arrive_expect(Tile::kQueryBytes + Tile::kRowBytes);
      load_tile<Tile>(memory.query[ring.stage], &p.q, full, Tile::kRows, work.query_row + m * Tile::kRows, head, work.batch);
      bulk_load(memory.lse[ring.stage], p.lse_log2 + padded_row<Tile>(p, work, head, m), Tile::kRowBytes, full);
      ring.advance();
    });
    index = p.schedule != nullptr ? gridDim.x + fetch_add(&p.schedule[0]) : p.tiles;
  }
  if (p.schedule != nullptr && fetch_add(&p.schedule[1]) == gridDim.x - 1) p.schedule[0] = p.schedule[1] = 0;
}

// Runs on one thread: loads values and dout. A thread of its own because one has too few registers for all four tensors.
template <typename Tile, bool kCausal>
__device__ __forceinline__ void produce_gradients(const BackwardParams& p, BackwardMemory<Tile>& memory) {
  RingPosition<Tile::kGradStages> ring;
  std::uint32_t value_phase = 1;
  for_each_work(memory, true, [&](const BackwardWork& work) {
    if (work.query_tiles == 0) return;
    memory.value_empty.wait(value_phase);
    value_phase ^= 1;
    memory.value_full.arrive_expect(Tile::kKeyBytes);
    load_tile<Tile>(memory.value, &p.v, &memory.value_full, Tile::kColumns, work.key_row, work.key_head, work.batch);
    for_each_query_tile<kCausal>(p, work, [&](int m, int head) {
      Barrier* full = &memory.grad_full[ring.stage];
      memory.grad_empty[ring.stage].wait(ring.phase ^ 1);
      full->arrive_expect(Tile::kQueryBytes + Tile::kRowBytes);
      load_tile<Tile>(memory.grad[ring.stage], &p.dout, full, Tile::kRows, work.query_row + m * Tile::kRows, head, work.batch);
      bulk_load(memory.delta[ring.stage], p.delta + padded_row<Tile>(p, work, head, m), Tile::kRowBytes, full);
      ring.advance();
    });
  });
}

// Note: Turns of key tiles
// Deterministic sums of dq: the key tiles that a query tile sees add to it from the first to the last, each when the query tile's
// counter says that it is its turn. Tiles are handed out in the same order, so a block waits only for tiles that were handed out
// before its own; with a causal mask the longest are first, and start at the last queries, which all of them see: each follows
// the one before at a distance of one query tile. There is a counter for each writer's blocks.
struct Turn {
  unsigned* counter;
  int number;

  template <typename Tile>
  __device__ __forceinline__ static Turn of(const BackwardParams& p, const BackwardWork& work, int row_tile, int head, int group) {
    const unsigned tile = head * p.row_tiles + static_cast<unsigned>(work.padded / Tile::kRows) + row_tile;
    return {p.turns + std::size_t{tile} * Tile::kConsumers + group, work.level};
  }

  __device__ __forceinline__ void await() const {
    int now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    while (now != number);
    fence_async_proxy_global();
  }
  __device__ __forceinline__ void pass() const {
    fence_async_proxy_global();
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(number + 1) : "memory");
  }
};

// Sums 0 x: 0 as long as all are finite, then NaN.
__device__ __forceinline__ void add_zero_times(std::uint32_t& sums, std::uint32_t x, __nv_bfloat16) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(x), "r"(0));
}
__device__ __forceinline__ void add_zero_times(std::uint32_t& sums, std::uint32_t x, __half) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(x), "r"(0));
}

// Runs on a writer's warp: whether its half of a tile of keys or values is finite.
template <typename T, typename Tile>
__device__ __forceinline__ bool is_finite(const std::uint8_t* tile, int group) {
  const auto* chunks = reinterpret_cast<const uint4*>(tile) + group * 32 + threadIdx.x % 32;
  std::uint32_t even = 0, odd = 0;
#pragma unroll 2
  for (int i = 0; i < Tile::kKeyBytes / 16; i += 32 * Tile::kConsumers) {
    const uint4 chunk = chunks[i];
    add_zero_times(even, chunk.x, T());
    add_zero_times(odd, chunk.y, T());
    add_zero_times(even, chunk.z, T());
    add_zero_times(odd, chunk.w, T());
  }
  return __all_sync(0xFFFFFFFFu, ((even | odd) & 0x7FFF7FFFu) == 0);
}

// Runs on one warp for each consumer: adds the 64 x 64 blocks of dq that it leaves in shared memory. With a causal mask it looks
// through keys and values before.
template <typename T, typename Tile, bool kCausal, bool kDeterministic>
__device__ __forceinline__ void write_dq(const BackwardParams& p, BackwardMemory<Tile>& memory, int group) {
  const bool is_leader = threadIdx.x % 32 == 0;
  RingPosition<Tile::kKeyStages> key_ring;
  std::uint32_t value_phase = 0;
  for_each_work(memory, is_leader, [&](const BackwardWork& work) {
    if (kCausal && work.query_tiles > 0) {
      memory.key_full[key_ring.stage].wait(key_ring.phase);
      const bool has_finite_keys = is_finite<T, Tile>(memory.key[key_ring.stage], group);
      key_ring.advance();
      memory.value_full.wait(value_phase);
      value_phase ^= 1;
      memory.has_not_finite[group] = !is_finite<T, Tile>(memory.value, group) || !has_finite_keys;
      __syncwarp();
      if (is_leader) memory.inspected.arrive();
    }
    for_each_query_tile<kCausal>(p, work, [&](int m, int head) {
      named_sync(kDqFull + group, 160);
      if (is_leader) {
        if (kDeterministic) Turn::of<Tile>(p, work, m, head, group).await();
        bulk_add(p.dq_sum + padded_row<Tile>(p, work, head, m) * Tile::kHeadSize + group * 64 * 64, memory.dq[group], Tile::kBlockBytes);
        bulk_commit();
        bulk_wait_read();
        memory.dq_empty[group].arrive();
      }
      __syncwarp();
      if constexpr (kDeterministic) {
        if (is_leader) {
          bulk_wait();
          Turn::of<Tile>(p, work, m, head, group).pass();
        }
        __syncwarp();
      }
    });
    __syncwarp();  // all have read the work
  });
  if (is_leader) bulk_wait();
}

// Volatile, so that the loads stay where they are used: all of them ahead of the loop take 32 registers.
__device__ __forceinline__ float2 load_pair(const float* from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(shared_address(from)));
  return pair;
}

// 2^x by additions and products: a cubic on [-1/2, 1/2] with a relative error of 1e-4, a fortieth of what rounding to bfloat16 does,
// and the exponent bits. `least` is -127, below which the result is 0; NaN stays NaN.
__device__ __forceinline__ float exp2_polynomial(float x, float least) {
  constexpr float kRound = 0x1.8p23f;  // leaves round(x) in the low bits of a sum
  float above;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(above) : "f"(x), "f"(least));
  const float shifted = above + kRound, r = above - (shifted - kRound);
  const float power = ((0.05500883f * r + 0.24221093f) * r + 0.69328293f) * r + 1.0f;
  return power * __int_as_float((__float_as_int(shifted) << 23) + 0x3F800000);
}

// Stores four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* to, const std::uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// The other way.
__device__ __forceinline__ void load_matrices(std::uint32_t* to, const void* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(from)));
}

// One warpgroup's 64 keys. Scores and their gradients are kept transposed, keys by queries, so that they are the register
// operands of dv and dk. Thread layout of an accumulator: see Consumer.
template <typename T, typename Tile, bool kCausal, bool kDeterministic>
struct BackwardConsumer {
  static constexpr int kScores = Tile::kRows / 2;  // accumulators a thread
  static constexpr int kGrads = Tile::kHeadSize / 2;
  static constexpr int kRowBytes = Tile::kHeadSize * 2;

  const BackwardParams& p;
  BackwardMemory<Tile>& memory;
  int group;   // this warpgroup among the consumers
  int thread;  // within the warpgroup

  float dk[kGrads], dv[kGrads];
  std::uint32_t dscores[kScores / 2];  // of the query tile before, packed
  int keys, diagonal, begin_row, end_row;  // of the tile of keys; see BackwardWork
  std::uint8_t* key_tile;
  std::uint32_t held_keys[Tile::kHoldsKeys ? kGrads / 2 : 1];  // operands of the scores' products
  bool has_flags;  // see Note: Keys that are not finite
  RingPosition<Tile::kQueryStages> query_ring;
  std::uint32_t rows_done = 0, tiles_done = 0;  // query tiles and key tiles of this block: they tell stages and phases

  __device__ __forceinline__ int row_in_group(int half) const { return thread / 32 * 16 + thread % 32 / 4 + 8 * half; }

  // Zeros in the rows of a tile outside [begin, end). What they hold has weight zero, but may be NaN: rows of another sequence,
  // or rows that see no key. Each warpgroup clears them for its own products.
  __device__ __forceinline__ void clear_rows(std::uint8_t* tile, int rows, int begin, int end) {
#pragma unroll 1
    for (int i = thread; i < rows * Tile::kHeadSize / 8; i += 128) {
      const int row = i / 8 % rows;
      if (row < begin || row >= end) reinterpret_cast<uint4*>(tile)[i] = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
    named_sync(kStaging + group, 128);
  }
  __device__ __forceinline__ void clear_queries(std::uint8_t* tile, int row_tile) {
    const int begin = begin_row - row_tile * Tile::kRows, end = end_row - row_tile * Tile::kRows;
    if (begin > 0 || end < Tile::kRows) clear_rows(tile, Tile::kRows, begin, end);
  }

  __device__ __forceinline__ void hold_keys() {
    const int lane = thread % 32, key = group * 64 + thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < Tile::kHeadSize / 16; ++step)  // 8 columns = one 16-byte chunk
      load_matrices(held_keys + 4 * step, key_tile + key * 128 + (((2 * step + lane / 16) ^ (key & 7)) * 16));
  }

  // The scores^T of the tile's keys and of queries, keys by queries; issued, not waited for.
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores], const std::uint8_t* queries) {
    if constexpr (Tile::kHoldsKeys) {
      static_assert(Tile::kPanels == 1);
      const auto b0 = matrix_descriptor(queries, 16);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < Tile::kHeadSize / 16; ++step)
        Wgmma<T, Tile::kRows>::template registers<Major::k>(scores, held_keys + 4 * step, advance(b0, step * 32), step > 0);
      wgmma_commit();
    } else {
      issue_transposed(scores, key_tile, queries);
    }
  }

  // product^T = keys rows^T over the head size: keys by queries; issued, not waited for.
  __device__ __forceinline__ void issue_transposed(float (&product)[kScores], const std::uint8_t* keys, const std::uint8_t* rows) {
    const auto a0 = matrix_descriptor(keys + group * 64 * 128, 16), b0 = matrix_descriptor(rows, 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kHeadSize / 16; ++step) {
      const int panel = step / 4, offset = step % 4 * 32;
      const auto a = advance(a0, panel * Tile::kColumns * 128 + offset);
      const auto b = advance(b0, panel * Tile::kRows * 128 + offset);
      Wgmma<T, Tile::kRows>::shared(product, a, b, step > 0);
    }
    wgmma_commit();
  }

  // grads += weights^T rows, summed over the queries; issued, not waited for.
  __device__ __forceinline__ void issue_gradient(float (&grads)[kGrads], const std::uint32_t (&weights)[kScores / 2],
                                                 const std::uint8_t* rows) {
    const auto b0 = matrix_descriptor(rows, Tile::kRows * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kRows / 16; ++step) {
      const auto b = advance(b0, step * 2048);
      Wgmma<T, Tile::kHeadSize>::registers(grads, weights + 4 * step, b, true);
    }
    wgmma_commit();
  }

  // This warpgroup's 64 x 64 block of dq = ds k, summed over the block's keys; issued, not waited for.
  __device__ __forceinline__ void issue_dq(float (&dq)[32]) {
    constexpr int kColumnBlocks = Tile::kPanels;
    const std::uint8_t* ds = memory.dscores[(rows_done + 1) % 2] + group / kColumnBlocks * Tile::kColumns * 128;
    const std::uint8_t* keys = key_tile + group % kColumnBlocks * Tile::kColumns * 128;
    const auto a0 = matrix_descriptor(ds, 16), b0 = matrix_descriptor(keys, 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kColumns / 16; ++step)
      Wgmma<T, 64>::template shared<Major::mn, Major::mn>(dq, advance(a0, step * 2048), advance(b0, step * 2048), step > 0);
    wgmma_commit();
  }

  // Note: Keys that are not finite
  // With a causal mask, the product of a zero and such a key or value would reach dq of rows that do not see it. The writers, idle
  // while the first query tile of a tile of keys is computed, look through both. If they find one, what is not finite becomes 0
  // before dq of that query tile. From then on NaN is added to such a key's scores; where registers hold the keys as they were it need
  // not be. Rows that see such a value have a delta that is not finite. dq of a row that gives an infinite key a probability of 0, where
  // the formula has 0 times infinity, may be finite.
  __device__ __forceinline__ void hide_not_finite() {
    named_sync(kDscoresStored, 256);  // both are past their products with the tiles as they were
    if (group == 0) {
      bool is_finite = true;
#pragma unroll 1
      for (int i = 0; i < Tile::kHeadSize / 2; ++i)
        is_finite = clear_not_finite(key_tile, (i / 32 * Tile::kColumns + thread) * 32 + i % 32) && is_finite;
      const std::uint32_t flags = __ballot_sync(0xFFFFFFFFu, !is_finite);
      if (thread % 32 == 0) memory.key_flags[thread / 32] = flags;
    } else {
#pragma unroll 1
      for (int i = thread; i < Tile::kKeyBytes / 4; i += 128) clear_not_finite(memory.value, i);
    }
    fence_async_proxy();
    named_sync(kDscoresStored, 256);
    has_flags = true;
  }
  // Returns whether both elements of the pair were finite.
  __device__ __forceinline__ static bool clear_not_finite(std::uint8_t* tile, int pair) {
    std::uint32_t& x = reinterpret_cast<std::uint32_t*>(tile)[pair];
    const std::uint32_t bad = not_finite(x, T()) >> 15;
    x &= ~(bad * 0xFFFFu);
    return bad == 0;
  }

  __device__ __forceinline__ void add_flags(float (&scores)[kScores]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = group * 64 + row_in_group(half);
      const float flag = (memory.key_flags[key / 32] >> key % 32 & 1) != 0 ? NAN : 0.0f;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) scores[i / 2 * 4 + half * 2 + i % 2] += flag;
    }
  }

  // Replaces what belongs to hidden pairs: keys past the end, and queries before the first that sees the key.
  __device__ __forceinline__ void mask(float (&x)[kScores], int row_tile, float hidden) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = group * 64 + row_in_group(half);
      const int first_query = key >= keys ? INT_MAX / 2 : kCausal ? key + diagonal : 0;
      const int first = first_query - row_tile * Tile::kRows - 2 * (thread % 4);
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i)
        if (i / 2 * 8 + i % 2 < first) x[i / 2 * 4 + half * 2 + i % 2] = hidden;
    }
  }

  __device__ __forceinline__ bool needs_mask(int row_tile) const {
    return keys < Tile::kColumns || (kCausal && row_tile * Tile::kRows < diagonal + Tile::kColumns - 1);
  }

  // Some are polynomials: while all are computed by the exponential unit, 1,024 of a step's 4,300 clocks at D64, nothing else is busy.
  __device__ __forceinline__ static float exp2_of(int i, float x, float least) {
    return i * Tile::kPolynomials % 16 < Tile::kPolynomials ? exp2_polynomial(x, least) : exp2_approx(x);
  }

  // Scores to probabilities, packed.
  __device__ __forceinline__ void exponentiate(const float (&scores)[kScores], const float* lse, std::uint32_t (&probabilities)[kScores / 2]) {
    float least = -127.0f;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 shift = load_pair(lse + 8 * j + 2 * (thread % 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * j + 2 * half;
        probabilities[i / 2] = pack(exp2_of(i, scores[i] * p.scale_log2 - shift.x, least),
                                    exp2_of(i + 1, scores[i + 1] * p.scale_log2 - shift.y, least), T());
      }
      // The same number by way of the signs of these probabilities: else ptxas puts all polynomials first, and the exponential unit waits.
      if (j % 2 == 1) {
        const std::uint32_t* last = probabilities + 2 * j - 2;
        least = __uint_as_float(0xC2FE0000u + ((last[0] | last[1] | last[2] | last[3]) >> 31));
      }
    }
  }

  // ds = probabilities * (dp - delta), packed.
  __device__ __forceinline__ void differentiate(const std::uint32_t (&probabilities)[kScores / 2], const float (&dprobabilities)[kScores],
                                                const float* delta) {
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 shift = load_pair(delta + 8 * j + 2 * (thread % 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 weight = unpack(probabilities[2 * j + half], T());
        const float* dp = dprobabilities + 4 * j + 2 * half;
        dscores[2 * j + half] = pack(weight.x * (dp[0] - shift.x), weight.y * (dp[1] - shift.y), T());
      }
    }
  }

  __device__ __forceinline__ void store_dscores() {
    const int lane = thread % 32, key = group * 64 + thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < Tile::kRows / 16; ++step) {
      const int panel = step / 4, chunk = step % 4 * 2 + lane / 16;  // 8 queries = one 16-byte chunk
      std::uint8_t* to = memory.dscores[rows_done % 2] + panel * Tile::kColumns * 128 + key * 128 + ((chunk ^ (key & 7)) * 16);
      store_matrices(to, {dscores[4 * step], dscores[4 * step + 1], dscores[4 * step + 2], dscores[4 * step + 3]});
    }
  }

  // Where the writer finds it, once it has taken the block before.
  __device__ __forceinline__ void store_dq(const float (&dq)[32]) {
    memory.dq_empty[group].wait(rows_done & 1);
    auto* to = reinterpret_cast<float4*>(memory.dq[group]);
#pragma unroll
    for (int j = 0; j < 8; ++j) to[128 * j + thread] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
  }
  // Apart from store_dq, so that the fence finds its stores done.
  __device__ __forceinline__ void hand_over_dq() {
    fence_async_proxy();
    named_arrive(kDqFull + group, 160);
  }

  // The stage of the query tile before the one that query_ring stands at.
  __device__ __forceinline__ int last_query_stage() const {
    return query_ring.stage == 0 ? Tile::kQueryStages - 1 : query_ring.stage - 1;
  }
  __device__ __forceinline__ void release_query() {
    if (thread == 0) memory.query_empty[last_query_stage()].arrive();
  }
  // Waits until both warpgroups are done with the query tile before: its ds is stored, and its dout and delta can go.
  __device__ __forceinline__ void meet() {
    fence_async_proxy();
    named_sync(kDscoresStored, 256);
    if (thread == 0) memory.grad_empty[(rows_done + 1) % 2].arrive();
  }

  // One query tile, and dq and dk of the tile before: they keep the tensor cores busy while dq is handed over. The exponentials
  // wait for all of it. Under the products they would need dq, ds and scores in registers at once; with one waiting for dq after
  // them, 4 16 4096 128 ran at 557 instead of 631 TFLOP/s.
  template <bool kFirst>
  __device__ __forceinline__ void step(int row_tile) {
    float scores[kScores], dprobabilities[kScores];
    std::uint32_t probabilities[kScores / 2];
    const int query_stage = query_ring.stage, grad_stage = rows_done % 2;
    memory.query_full[query_stage].wait(query_ring.phase);
    clear_queries(memory.query[query_stage], row_tile);
    issue_scores(scores, memory.query[query_stage]);
    if constexpr (!kFirst) {
      meet();
      float dq[32];
      issue_dq(dq);
      issue_gradient(dk, dscores, memory.query[last_query_stage()]);
      wgmma_wait<1>();
      store_dq(dq);
    } else {
      memory.value_full.wait(tiles_done % 2);
    }
    wgmma_wait<0>();
    if constexpr (!kFirst) release_query();
    if (kCausal && !Tile::kHoldsKeys && has_flags) add_flags(scores);
    if (needs_mask(row_tile)) mask(scores, row_tile, -INFINITY);
    exponentiate(scores, memory.lse[query_stage], probabilities);
    if constexpr (!kFirst) hand_over_dq();
    memory.grad_full[grad_stage].wait(rows_done / 2 % 2);
    clear_queries(memory.grad[grad_stage], row_tile);
    issue_transposed(dprobabilities, memory.value, memory.grad[grad_stage]);
    issue_gradient(dv, probabilities, memory.grad[grad_stage]);
    wgmma_wait<1>();
    // What a hidden value made of them may be NaN.
    if (kCausal && kFirst && needs_mask(row_tile) && !(isfinite(dprobabilities[0]) && isfinite(dprobabilities[2])))
      mask(dprobabilities, row_tile, 0.0f);
    differentiate(probabilities, dprobabilities, memory.delta[grad_stage]);
    store_dscores();
    wgmma_wait<0>();
    if constexpr (kCausal && kFirst) {
      memory.inspected.wait(tiles_done % 2);
      if (memory.has_not_finite[0] || memory.has_not_finite[1]) hide_not_finite();
    }
    ++rows_done;
    query_ring.advance();
  }

  // Through shared memory, so that each row leaves in 16-byte pieces.
  __device__ __forceinline__ void write_rows(const float (&grads)[kGrads], float factor, T* base, std::int64_t row_stride,
                                             const BackwardWork& work, std::uint8_t* staging) {
    constexpr int kChunks = kRowBytes / 16;
    int thread = this->thread;
    asm volatile("" : "+r"(thread));  // keeps these addresses out of the main loop's registers
    named_sync(kStaging + group, 128);  // the rows before have left it
#pragma unroll
    for (int i = 0; i < kGrads / 2; ++i) {
      const int at = row_in_group(i % 2), chunk = i / 2;  // 8 columns = one 16-byte chunk
      *reinterpret_cast<std::uint32_t*>(staging + at * kRowBytes + ((chunk ^ (at & 7)) * 16) + thread % 4 * 4) =
          pack(grads[2 * i] * factor, grads[2 * i + 1] * factor, T());
    }
    named_sync(kStaging + group, 128);
#pragma unroll 4
    for (int i = thread; i < 64 * kChunks; i += 128) {
      const int at = i / kChunks, chunk = i % kChunks;
      const uint4 value = *reinterpret_cast<const uint4*>(staging + at * kRowBytes + ((chunk ^ (at & 7)) * 16));
      const int key = group * 64 + at;
      if (key < work.keys && chunk * 8 < p.D) *reinterpret_cast<uint4*>(base + (work.key_row + key) * row_stride + chunk * 8) = value;
    }
  }

  __device__ __forceinline__ void write_dv(const BackwardWork& work, std::uint8_t* staging) {
    write_rows(dv, 1.0f, static_cast<T*>(p.dv) + work.batch * p.dv_batch + work.key_head * p.dv_head, p.dv_row,
               work, staging);
  }
  __device__ __forceinline__ void write_dk(const BackwardWork& work, std::uint8_t* staging) {
    write_rows(dk, p.scale, static_cast<T*>(p.dk) + work.batch * p.dk_batch + work.key_head * p.dk_head, p.dk_row,
               work, staging);
  }

  // dq and dk of the last query tile, and dv of the key tile.
  __device__ __forceinline__ void finish(const BackwardWork& work) {
    meet();
    float dq[32];
    issue_dq(dq);
    issue_gradient(dk, dscores, memory.query[last_query_stage()]);
    // Through the memory of the values: both warpgroups are past their last product with them.
    write_dv(work, memory.value + group * 64 * kRowBytes);
    fence_async_proxy();
    named_sync(kStaging + group, 128);
    if (thread == 0) memory.value_empty.arrive();
    wgmma_wait<1>();
    store_dq(dq);
    hand_over_dq();
    wgmma_wait<0>();
    release_query();
    if (thread == 0) memory.key_empty[tiles_done % Tile::kKeyStages].arrive();
  }

  __device__ __forceinline__ void run_tile(const BackwardWork& work) {
    const int count = work.query_tiles * p.group;
    int row_tile = work.begin, head = 0;
    keys = work.keys;
    diagonal = work.diagonal;
    begin_row = work.begin_row;
    end_row = work.end_row;
    key_tile = memory.key[tiles_done % Tile::kKeyStages];
    memory.key_full[tiles_done % Tile::kKeyStages].wait(tiles_done / Tile::kKeyStages % 2);
    if (p.cu_seqlens_k != nullptr && keys < Tile::kColumns) {
      clear_rows(key_tile, Tile::kColumns, 0, keys);
      memory.value_full.wait(tiles_done % 2);
      clear_rows(memory.value, Tile::kColumns, 0, keys);
    }
    has_flags = false;
    if constexpr (Tile::kHoldsKeys) hold_keys();
    step<true>(row_tile);
    for (int i = 1; i < count; ++i) {
      if (++head == p.group) {
        head = 0;
        row_tile += kCausal ? work.step : 1;
      }
      step<false>(row_tile);
    }
    finish(work);
    ++tiles_done;
    memory.dq_empty[group].wait(rows_done & 1 ^ 1);  // results leave through it
  }

  __device__ __forceinline__ void consume() {
    RingPosition<Tile::kTileStages> tile_ring;
    while (true) {
      memory.tile_full[tile_ring.stage].wait(tile_ring.phase);
      const BackwardWork& work = memory.work[tile_ring.stage];
      if (work.key_head < 0) return;
#pragma unroll
      for (int i = 0; i < kGrads; ++i) dk[i] = dv[i] = 0.0f;
      if (work.query_tiles > 0) run_tile(work);
      else write_dv(work, memory.dq[group]);
      write_dk(work, memory.dq[group]);
      named_sync(kStaging + group, 128);  // all have read the work
      if (thread == 0) memory.tile_empty[tile_ring.stage].arrive();
      tile_ring.advance();
    }
  }
};

template <typename T, typename Tile, bool kCausal, bool kDeterministic>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_backward_kernel(const __grid_constant__ BackwardParams p) {
  // Aligned by declaration: an address rounded up by hand is no longer known to lie in shared memory, and every access to it
  // becomes a generic one.
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& memory = *reinterpret_cast<BackwardMemory<Tile>*>(raw);
  // Through a shuffle, so that the compiler knows it is the same in a whole warp.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kTileStages; ++stage) {
      memory.tile_full[stage].init(1);
      memory.tile_empty[stage].init(2 * Tile::kConsumers + 1);  // consumers, their writers, and the loader of gradients
    }
    for (int stage = 0; stage < Tile::kQueryStages; ++stage) {
      memory.query_full[stage].init(1);
      memory.query_empty[stage].init(Tile::kConsumers);
    }
    for (int stage = 0; stage < Tile::kGradStages; ++stage) {
      memory.grad_full[stage].init(1);
      memory.grad_empty[stage].init(Tile::kConsumers);
    }
    for (int stage = 0; stage < Tile::kKeyStages; ++stage) {
      memory.key_full[stage].init(1);
      memory.key_empty[stage].init(Tile::kConsumers);
    }
    for (int i = 0; i < Tile::kConsumers; ++i) memory.dq_empty[i].init(1);
    memory.inspected.init(Tile::kConsumers);
    memory.value_full.init(1);
    memory.value_empty.init(Tile::kConsumers);
    fence_barrier_init();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
  }
  let_next_start();
  wait_for_previous();
  __syncthreads();
  if (warp < 4) {
    lower_registers<Tile::kProducerRegisters>();
    if (warp == 0 && threadIdx.x == 0) produce_queries<Tile, kCausal, kDeterministic>(p, memory);
    else if (warp == 3 && threadIdx.x == 96) produce_gradients<Tile, kCausal>(p, memory);
    else if (warp == 1) write_dq<T, Tile, kCausal, kDeterministic>(p, memory, 0);
    else if (warp == 2) write_dq<T, Tile, kCausal, kDeterministic>(p, memory, 1);
  } else {
    raise_registers<Tile::kConsumerRegisters>();
    BackwardConsumer<T, Tile, kCausal, kDeterministic> consumer{p, memory, warp / 4 - 1, static_cast<int>(threadIdx.x) % 128};
    consumer.consume();
  }
}

template <typename Tile>
constexpr int backward_memory_bytes() {
  return static_cast<int>(sizeof(BackwardMemory<Tile>));
}

}  // namespace heddle::cuda::sm90
