#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/exp2.h"
#include "kernels/attention/multiply.h"
#include "kernels/attention/sequences.h"
#include "kernels/attention/tile_memory.h"
#include "kernels/runtime/parallel.h"

namespace heddle::cpu {
namespace {

// What one thread keeps in the cache. Scores are held transposed, one row a key, so that vectors run along the queries:
// the row maximum and sum of the softmax become plain vector operations, and only the query tile needs transposing.
template <typename T>
struct ForwardTiles {
  std::int64_t queries;  // padded query columns
  std::int64_t width;    // padded D
  T* qt;                 // [D, queries]
  T* k;                  // [tile.key, width]
  T* v;                  // [tile.key, width]
  T* st;                 // [tile.key, queries] scores, then probabilities
  T* out;                // [tile.query, width] unnormalised
  T* max;                // [queries] running maximum of the unscaled scores
  T* sum;                // [queries] running sum of exp(scale * (score - max))
  T* rescale;            // [queries] exp(scale * (old max - new max))

  ForwardTiles(Arena<T>& arena, AttentionTile tile, std::int64_t D)
      : queries(padded_columns<T>(tile.query)), width(padded_columns<T>(D)) {
    qt = arena.take(D * queries);
    k = arena.take(tile.key * width);
    v = arena.take(tile.key * width);
    st = arena.take(tile.key * queries);
    out = arena.take(tile.query * width);
    max = arena.take(queries);
    sum = arena.take(queries);
    rescale = arena.take(queries);
  }
};

// One step of the online softmax over the keys of a tile. Only visible pairs are touched: row i of the scores belongs to
// key keys.begin + i, and its columns from first_query on see it.
template <typename T>
void online_softmax(const ForwardTiles<T>& tiles, const AttentionMask& mask, T scale, Span queries, Span keys) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const T factor = scale * std::numbers::log2e_v<T>;  // exp(scale * x) = 2^(factor * x)
  const std::int64_t rows = queries.size();
  const auto first_column = [&](std::int64_t key) { return local_queries(mask, key, queries).begin; };
  T* const max = tiles.max;
  T* const sum = tiles.sum;
  T* const rescale = tiles.rescale;
  std::copy(max, max + rows, rescale);
  for (std::int64_t key = keys.begin; key < keys.end; ++key) {
    const T* scores = tiles.st + (key - keys.begin) * tiles.queries;
    for (std::int64_t i = first_column(key); i < rows; ++i) max[i] = scores[i] > max[i] ? scores[i] : max[i];
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    // A maximum of -inf means no weight so far; subtracting it would give NaN.
    const T safe = max[i] == -kInfinity ? T{0} : max[i];
    rescale[i] = exp2_of((rescale[i] - safe) * factor);
    sum[i] *= rescale[i];
  }
  for (std::int64_t key = keys.begin; key < keys.end; ++key) {
    T* scores = tiles.st + (key - keys.begin) * tiles.queries;
    for (std::int64_t i = first_column(key); i < rows; ++i) {
      const T safe = max[i] == -kInfinity ? T{0} : max[i];
      scores[i] = exp2_of((scores[i] - safe) * factor);
      sum[i] += scores[i];
    }
  }
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t d = 0; d < tiles.width; ++d) tiles.out[i * tiles.width + d] *= rescale[i];
}

// Algorithm 1 of FlashAttention-2 for one tile of query rows of one head.
template <typename E>
void forward_tile(const AttentionForwardArgs& args, const AttentionMask& mask, AttentionTile tile, std::int64_t b,
                  std::int64_t h, Span queries, const ForwardTiles<accumulate_t<E>>& tiles) {
  using T = accumulate_t<E>;
  const std::int64_t D = args.q.shape[3], rows = queries.size();
  const std::int64_t hkv = h / (args.q.shape[2] / args.k.shape[2]);
  const auto k_rows = head_rows<E>(args.k, b, hkv), v_rows = head_rows<E>(args.v, b, hkv);
  load_transposed(head_rows<E>(args.q, b, h).at_row(queries.begin), rows, D, tiles.queries,
                  tiles.qt);
  std::fill(tiles.out, tiles.out + rows * tiles.width, T{0});
  std::fill(tiles.max, tiles.max + rows, -std::numeric_limits<T>::infinity());
  std::fill(tiles.sum, tiles.sum + rows, T{0});
  const Span visited = visited_key_tiles(mask, tile, queries);
  for (std::int64_t j = visited.begin; j < visited.end; ++j) {
    const Span keys = tile_span(j, tile.key, mask.Sk);
    load_tile(k_rows.at_row(keys.begin), keys.size(), D, tiles.width, tiles.k);
    load_tile(v_rows.at_row(keys.begin), keys.size(), D, tiles.width, tiles.v);
    const auto visible = [&](std::int64_t i) { return local_keys(mask, queries.begin + i, keys); };
    multiply_scores(tiles.st, tiles.queries, LeftOperand<T>{tiles.k, tiles.width, 1}, tiles.qt, tiles.queries,
                    padded_columns<T>(rows), D, [&](Span columns) { return visible(std::min(columns.end, rows) - 1); });
    online_softmax(tiles, mask, static_cast<T>(args.scale), queries, keys);
    multiply_visible(tiles.out, tiles.width, LeftOperand<T>{tiles.st, 1, tiles.queries}, tiles.v, tiles.width, rows,
                     tiles.width, visible);
  }
  T* lse = args.lse.as<T>() + b * args.lse.strides[0] + h * args.lse.strides[1];
  for (std::int64_t i = 0; i < rows; ++i) {
    const T sum = tiles.sum[i];
    const T inverse = sum == 0 ? T{0} : 1 / sum;
    for (std::int64_t d = 0; d < D; ++d) tiles.out[i * tiles.width + d] *= inverse;
    lse[(queries.begin + i) * args.lse.strides[2]] =
        sum == 0 ? -std::numeric_limits<T>::infinity() : tiles.max[i] * static_cast<T>(args.scale) + std::log(sum);
  }
  store_tile(tiles.out, tiles.width, rows, D, head_rows<E>(args.out, b, h).at_row(queries.begin));
}

AttentionForwardArgs sequence_args(const AttentionForwardArgs& all, const Sequence& rows) {
  return {.q = cut(all.q, 1, rows.queries), .k = cut(all.k, 1, rows.keys), .v = cut(all.v, 1, rows.keys),
          .out = cut(all.out, 1, rows.queries), .lse = cut(all.lse, 2, rows.queries), .is_causal = all.is_causal, .scale = all.scale};
}

}  // namespace

std::int64_t attention_forward_workspace(const AttentionProblem& problem, AttentionTile tile) {
  return dispatch_float(problem.dtype, "attention", [&](auto type) -> std::int64_t {
    using T = accumulate_t<typename decltype(type)::type>;
    Arena<T> arena(nullptr);
    ForwardTiles<T>(arena, tile, problem.D);
    return num_threads() * arena.used() * static_cast<std::int64_t>(sizeof(T));
  });
}

void attention_forward(const AttentionForwardArgs& args, AttentionTile tile, void* workspace) {
  if (args.cu_seqlens_q.defined()) {
    for_each_sequence(args, [&](const Sequence& rows) { attention_forward(sequence_args(args, rows), tile, workspace); });
    return;
  }
  const AttentionMask mask{args.q.shape[1], args.k.shape[1], args.is_causal};
  const std::int64_t B = args.q.shape[0], Hq = args.q.shape[2], D = args.q.shape[3];
  const std::int64_t query_tiles = tile_count(mask.Sq, tile.query);
  dispatch_float(args.q.dtype, "attention", [&](auto type) {
    using E = typename decltype(type)::type;
    using T = accumulate_t<E>;
    Arena<T> one_thread(nullptr);
    ForwardTiles<T>(one_thread, tile, D);
    parallel_tasks(B * Hq * query_tiles, [&](std::int64_t task) {
      Arena<T> arena(static_cast<T*>(workspace) + thread_index() * one_thread.used());
      const ForwardTiles<T> tiles(arena, tile, D);
      const std::int64_t head = task / query_tiles;
      // The last tile of a causal head is the longest: it goes first, so that no thread is left alone with it.
      const std::int64_t i = query_tiles - 1 - task % query_tiles;
      forward_tile<E>(args, mask, tile, head / Hq, head % Hq, tile_span(i, tile.query, mask.Sq), tiles);
    });
  });
}

}  // namespace heddle::cpu
