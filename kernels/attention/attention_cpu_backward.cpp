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

// What one thread keeps in the cache. Scores have one row a query, so that the transposed operands belong to the keys,
// which stay while the queries pass.
template <typename T>
struct BackwardTiles {
  std::int64_t keys;   // padded key columns
  std::int64_t width;  // padded D
  T* kt;               // [D, keys]
  T* vt;               // [D, keys]
  T* k;                // [tile.key, width], scaled by scale: it makes dq
  T* q;                // [tile.query, width]
  T* dout;             // [tile.query, width]
  T* p;                // [tile.query, keys] scores, then probabilities
  T* ds;               // [tile.query, keys] gradient of p, then of the scaled scores
  T* dq;               // [tile.query, width]
  T* dk;               // [tile.key, width]
  T* dv;               // [tile.key, width]

  BackwardTiles(Arena<T>& arena, AttentionTile tile, std::int64_t D)
      : keys(padded_columns<T>(tile.key)), width(padded_columns<T>(D)) {
    kt = arena.take(D * keys);
    vt = arena.take(D * keys);
    k = arena.take(tile.key * width);
    q = arena.take(tile.query * width);
    dout = arena.take(tile.query * width);
    p = arena.take(tile.query * keys);
    ds = arena.take(tile.query * keys);
    dq = arena.take(tile.query * width);
    dk = arena.take(tile.key * width);
    dv = arena.take(tile.key * width);
  }
};

enum class Wanted { all, key_gradients, query_gradient };

// Algorithm 2 of FlashAttention-2 for storage type E.
template <typename E>
class Backward {
 public:
  using T = accumulate_t<E>;

  Backward(const AttentionBackwardArgs& args, AttentionTile tile, void* workspace)
      : args_(args), tile_(tile), mask_{args.q.shape[1], args.k.shape[1], args.is_causal}, B_(args.q.shape[0]),
        Hq_(args.q.shape[2]), Hkv_(args.k.shape[2]), group_(Hq_ / Hkv_), D_(args.q.shape[3]), scale_(static_cast<T>(args.scale)),
        key_tiles_(tile_count(mask_.Sk, tile.key)), query_tiles_(tile_count(mask_.Sq, tile.query)) {
    Arena<T> arena(static_cast<T*>(workspace));
    delta_ = arena.take(B_ * Hq_ * mask_.Sq);
    thread_tiles_ = static_cast<T*>(workspace) + arena.used();
    Arena<T> one_thread(nullptr);
    BackwardTiles<T>(one_thread, tile, D_);
    thread_stride_ = one_thread.used();
  }

  // Note: Backward without atomics
  // A pair of tiles adds to the gradients of its keys and of its queries. Either one thread walks all pairs of a
  // key/value head (five products a pair), or the keys and the queries are walked separately, a tile of them a task
  // (four products and three). The first form leaves threads idle when heads are few, and needs dq to accumulate in the
  // output itself. Both add the same products in the same order, so the choice, and with it the number of threads,
  // does not change a bit.
  void run() {
    compute_delta();
    const std::int64_t heads = B_ * Hkv_, threads = num_threads();
    const bool whole_heads = std::is_same_v<E, T> && 5 * tile_count(heads, threads) * threads <= 7 * heads;
    if (whole_heads) {
      parallel_tasks(heads, [&](std::int64_t head) { run_head(tiles(), head / Hkv_, head % Hkv_); });
      return;
    }
    parallel_tasks(heads * key_tiles_, [&](std::int64_t task) {
      const std::int64_t head = task / key_tiles_;
      run_keys(tiles(), head / Hkv_, head % Hkv_, keys_of(task % key_tiles_), Wanted::key_gradients);
    });
    parallel_tasks(B_ * Hq_ * query_tiles_, [&](std::int64_t task) {
      const std::int64_t head = task / query_tiles_;
      run_queries(tiles(), head / Hq_, head % Hq_, queries_of(query_tiles_ - 1 - task % query_tiles_));
    });
  }

 private:
  BackwardTiles<T> tiles() const {
    Arena<T> arena(thread_tiles_ + thread_index() * thread_stride_);
    return BackwardTiles<T>(arena, tile_, D_);
  }
  Span keys_of(std::int64_t j) const { return tile_span(j, tile_.key, mask_.Sk); }
  Span queries_of(std::int64_t i) const { return tile_span(i, tile_.query, mask_.Sq); }

  // delta = rowsum(dout * out) - dlse: what every dp of the row has subtracted. out = p v makes the row sum equal to
  // that of p * dp, and the gradient of lse is p.
  void compute_delta() const {
    // Several rows at once: each sum is a chain of dependent additions, in the order in which dp adds, so that with a
    // single key dp - delta is exactly 0.
    constexpr std::int64_t kRows = 8;
    const std::int64_t blocks = tile_count(mask_.Sq, kRows);
    parallel_for(B_ * Hq_ * blocks, 8, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t index = begin; index < end; ++index) {
        const Span rows = tile_span(index % blocks, kRows, mask_.Sq);
        const std::int64_t h = index / blocks % Hq_, b = index / blocks / Hq_;
        const auto out = head_rows<E>(args_.out, b, h), dout = head_rows<E>(args_.dout, b, h);
        const E *o[kRows], *g[kRows];
        for (std::int64_t r = 0; r < kRows; ++r) {
          const std::int64_t row = std::min(rows.begin + r, rows.end - 1);
          o[r] = out.at_row(row).data, g[r] = dout.at_row(row).data;
        }
        T sum[kRows] = {};
        for (std::int64_t d = 0; d < D_; ++d)
          for (std::int64_t r = 0; r < kRows; ++r)
            sum[r] += static_cast<T>(o[r][d * out.column]) * static_cast<T>(g[r][d * dout.column]);
        for (std::int64_t row = rows.begin; row < rows.end; ++row)
          delta_[(b * Hq_ + h) * mask_.Sq + row] =
              sum[row - rows.begin] - (args_.dlse.defined() ? row_value(args_.dlse, b, h, row) : T{0});
      }
    });
  }

  T row_value(const ConstView& view, std::int64_t b, std::int64_t h, std::int64_t row) const {
    return view.as<T>()[b * view.strides[0] + h * view.strides[1] + row * view.strides[2]];
  }

  void run_head(const BackwardTiles<T>& tiles, std::int64_t b, std::int64_t hkv) const {
    // The first key tile writes dq of the rows it reaches; the others see no key.
    const std::int64_t blind = key_tiles_ == 0 ? query_tiles_ : visited_query_tiles(mask_, tile_, keys_of(0)).begin;
    std::fill(tiles.dq, tiles.dq + tile_.query * tiles.width, T{0});
    for (std::int64_t h = hkv * group_; h < (hkv + 1) * group_; ++h)
      for (std::int64_t i = 0; i < blind; ++i) store_dq(tiles, b, h, queries_of(i));
    for (std::int64_t j = 0; j < key_tiles_; ++j) run_keys(tiles, b, hkv, keys_of(j), Wanted::all);
  }

  // dk and dv of a tile of keys, and with Wanted::all this tile's part of dq, added to the output.
  void run_keys(const BackwardTiles<T>& tiles, std::int64_t b, std::int64_t hkv, Span keys, Wanted wanted) const {
    load_keys(tiles, b, hkv, keys);
    std::fill(tiles.dk, tiles.dk + keys.size() * tiles.width, T{0});
    std::fill(tiles.dv, tiles.dv + keys.size() * tiles.width, T{0});
    const Span visited = visited_query_tiles(mask_, tile_, keys);
    for (std::int64_t h = hkv * group_; h < (hkv + 1) * group_; ++h) {
      for (std::int64_t i = visited.begin; i < visited.end; ++i) {
        const Span queries = queries_of(i);
        if (wanted == Wanted::all && keys.begin == 0)
          std::fill(tiles.dq, tiles.dq + queries.size() * tiles.width, T{0});
        else if (wanted == Wanted::all)
          load_tile(dq_rows(b, h, queries), queries.size(), D_, tiles.width, tiles.dq);
        run_pair(tiles, b, h, queries, keys, wanted);
        if (wanted == Wanted::all) store_dq(tiles, b, h, queries);
      }
    }
    store_tile(tiles.dk, tiles.width, keys.size(), D_, head_rows<E>(args_.dk, b, hkv).at_row(keys.begin), scale_);
    store_tile(tiles.dv, tiles.width, keys.size(), D_, head_rows<E>(args_.dv, b, hkv).at_row(keys.begin));
  }

  // dq of a tile of query rows.
  void run_queries(const BackwardTiles<T>& tiles, std::int64_t b, std::int64_t h, Span queries) const {
    std::fill(tiles.dq, tiles.dq + queries.size() * tiles.width, T{0});
    const Span visited = visited_key_tiles(mask_, tile_, queries);
    for (std::int64_t j = visited.begin; j < visited.end; ++j) {
      load_keys(tiles, b, h / group_, keys_of(j));
      run_pair(tiles, b, h, queries, keys_of(j), Wanted::query_gradient);
    }
    store_dq(tiles, b, h, queries);
  }

  HeadRows<E> dq_rows(std::int64_t b, std::int64_t h, Span queries) const {
    return head_rows<E>(args_.dq, b, h).at_row(queries.begin);
  }
  void store_dq(const BackwardTiles<T>& tiles, std::int64_t b, std::int64_t h, Span queries) const {
    store_tile(tiles.dq, tiles.width, queries.size(), D_, dq_rows(b, h, queries));
  }

  void load_keys(const BackwardTiles<T>& tiles, std::int64_t b, std::int64_t hkv, Span keys) const {
    const auto k = head_rows<E>(args_.k, b, hkv).at_row(keys.begin), v = head_rows<E>(args_.v, b, hkv).at_row(keys.begin);
    load_tile(k, keys.size(), D_, tiles.width, tiles.k, scale_);
    load_transposed(k, keys.size(), D_, tiles.keys, tiles.kt);
    load_transposed(v, keys.size(), D_, tiles.keys, tiles.vt);
  }

  void run_pair(const BackwardTiles<T>& tiles, std::int64_t b, std::int64_t h, Span queries, Span keys, Wanted wanted) const {
    const std::int64_t rows = queries.size(), columns = padded_columns<T>(keys.size()), width = tiles.width;
    const auto row_of = [](T* tile, std::int64_t ld) { return LeftOperand<T>{tile, ld, 1}; };
    const auto column_of = [](T* tile, std::int64_t ld) { return LeftOperand<T>{tile, 1, ld}; };
    const auto keys_seen = [&](std::int64_t i) { return local_keys(mask_, queries.begin + i, keys); };
    const auto seen_by = [&](std::int64_t j) { return local_queries(mask_, keys.begin + j, queries); };
    const auto needed = [&](Span panel) { return seen_by(panel.begin); };
    load_tile(head_rows<E>(args_.q, b, h).at_row(queries.begin), rows, D_, width, tiles.q);
    load_tile(head_rows<E>(args_.dout, b, h).at_row(queries.begin), rows, D_, width, tiles.dout);
    multiply_scores(tiles.p, tiles.keys, row_of(tiles.q, width), tiles.kt, tiles.keys, columns, D_, needed);
    multiply_scores(tiles.ds, tiles.keys, row_of(tiles.dout, width), tiles.vt, tiles.keys, columns, D_, needed);
    softmax_backward(tiles, b, h, queries, keys);
    if (wanted != Wanted::query_gradient) {
      multiply_visible(tiles.dv, width, column_of(tiles.p, tiles.keys), tiles.dout, width, keys.size(), width, seen_by);
      multiply_visible(tiles.dk, width, column_of(tiles.ds, tiles.keys), tiles.q, width, keys.size(), width, seen_by);
    }
    if (wanted != Wanted::key_gradients)
      multiply_visible(tiles.dq, width, row_of(tiles.ds, tiles.keys), tiles.k, width, rows, width, keys_seen);
  }

  // p = exp(scale * s - lse) and ds = p * (dp - delta) of the visible pairs.
  void softmax_backward(const BackwardTiles<T>& tiles, std::int64_t b, std::int64_t h, Span queries, Span keys) const {
    constexpr T kInfinity = std::numeric_limits<T>::infinity();
    const T factor = scale_ * std::numbers::log2e_v<T>;  // exp(scale * x) = 2^(factor * x)
    for (std::int64_t i = 0; i < queries.size(); ++i) {
      const std::int64_t row = queries.begin + i;
      const T lse = row_value(args_.lse, b, h, row);
      // A row whose visible scores are all -inf has no weights: subtracting +inf makes every p zero.
      const T shift = lse == -kInfinity ? kInfinity : lse * std::numbers::log2e_v<T>;
      const T delta = delta_[(b * Hq_ + h) * mask_.Sq + row];
      const std::int64_t visible = local_keys(mask_, row, keys).end;
      T* p = tiles.p + i * tiles.keys;
      T* ds = tiles.ds + i * tiles.keys;
      for (std::int64_t j = 0; j < visible; ++j) {
        p[j] = exp2_of(p[j] * factor - shift);
        ds[j] = p[j] * (ds[j] - delta);
      }
    }
  }

  const AttentionBackwardArgs& args_;
  AttentionTile tile_;
  AttentionMask mask_;
  std::int64_t B_, Hq_, Hkv_, group_, D_;
  T scale_;
  std::int64_t key_tiles_, query_tiles_;
  T* delta_;  // [B, Hq, Sq]
  T* thread_tiles_;
  std::int64_t thread_stride_;
};

AttentionBackwardArgs sequence_args(const AttentionBackwardArgs& all, const Sequence& rows) {
  return {.q = cut(all.q, 1, rows.queries), .k = cut(all.k, 1, rows.keys), .v = cut(all.v, 1, rows.keys),
          .out = cut(all.out, 1, rows.queries), .lse = cut(all.lse, 2, rows.queries), .dout = cut(all.dout, 1, rows.queries),
          .dlse = all.dlse.defined() ? cut(all.dlse, 2, rows.queries) : ConstView{}, .dq = cut(all.dq, 1, rows.queries),
          .dk = cut(all.dk, 1, rows.keys), .dv = cut(all.dv, 1, rows.keys), .is_causal = all.is_causal, .scale = all.scale};
}

}  // namespace

std::int64_t attention_backward_workspace(const AttentionProblem& problem, AttentionTile tile) {
  return dispatch_float(problem.dtype, "attention", [&](auto type) -> std::int64_t {
    using T = accumulate_t<typename decltype(type)::type>;
    Arena<T> delta(nullptr), one_thread(nullptr);
    delta.take(problem.Hq * problem.query_rows());
    BackwardTiles<T>(one_thread, tile, problem.D);
    return (delta.used() + num_threads() * one_thread.used()) * static_cast<std::int64_t>(sizeof(T));
  });
}

void attention_backward(const AttentionBackwardArgs& args, AttentionTile tile, void* workspace) {
  if (args.cu_seqlens_q.defined()) {
    for_each_sequence(args, [&](const Sequence& rows) { attention_backward(sequence_args(args, rows), tile, workspace); });
    return;
  }
  dispatch_float(args.q.dtype, "attention", [&](auto type) {
    Backward<typename decltype(type)::type>(args, tile, workspace).run();
  });
}

}  // namespace heddle::cpu
