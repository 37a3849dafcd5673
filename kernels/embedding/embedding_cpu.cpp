#include "kernels/embedding/embedding.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/runtime/parallel.h"

namespace heddle::cpu {
namespace {

// Elements a thread must move to be worth starting.
constexpr std::int64_t kGrain = 16384;

std::int64_t id_at(const ConstView& ids, std::int64_t i) {
  return ids.dtype == DType::i64 ? ids.as<std::int64_t>()[i] : ids.as<std::int32_t>()[i];
}

template <typename T>
void gather(const EmbeddingArgs& args) {
  const std::int64_t C = args.weight.shape[1];
  parallel_for(args.ids.shape[0], std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(C, 1)), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const T* from = args.weight.as<T>() + id_at(args.ids, i) * args.weight.strides[0];
      T* to = args.out.as<T>() + i * args.out.strides[0];
      for (std::int64_t c = 0; c < C; ++c) to[c * args.out.strides[1]] = from[c * args.weight.strides[1]];
    }
  });
}

// The positions of every id, in order: those of id v are order[starts[v]] up to order[starts[v + 1]].
struct Occurrences {
  std::vector<std::int64_t> starts;
  std::vector<std::int64_t> order;

  Occurrences(const ConstView& ids, std::int64_t V)
      : starts(static_cast<std::size_t>(V + 1)), order(static_cast<std::size_t>(ids.shape[0])) {
    const std::int64_t n = ids.shape[0];
    for (std::int64_t i = 0; i < n; ++i) ++starts[static_cast<std::size_t>(id_at(ids, i) + 1)];
    for (std::size_t v = 1; v < starts.size(); ++v) starts[v] += starts[v - 1];
    std::vector<std::int64_t> next = starts;
    for (std::int64_t i = 0; i < n; ++i) order[static_cast<std::size_t>(next[static_cast<std::size_t>(id_at(ids, i))]++)] = i;
  }
};

// Sums the occurrences of one id into its row of dweight, a block of columns at a time.
template <typename T, typename Out>
void scatter_row(const EmbeddingBackwardArgs& args, std::int64_t v, const std::int64_t* begin, const std::int64_t* end) {
  using A = accumulate_t<T>;
  constexpr std::int64_t kBlock = 128;
  const std::int64_t C = args.dout.shape[1], in_step = args.dout.strides[1], out_step = args.dweight.strides[1];
  const T* dout = args.dout.as<T>();
  Out* row = args.dweight.as<Out>() + v * args.dweight.strides[0];
  const bool adds = args.write == Write::accumulate;
  if (adds && begin == end) return;
  for (std::int64_t first = 0; first < C; first += kBlock) {
    const std::int64_t count = std::min(kBlock, C - first);
    std::array<A, kBlock> sums{};
    for (const std::int64_t* i = begin; i != end; ++i) {
      const T* from = dout + *i * args.dout.strides[0] + first * in_step;
      if (in_step == 1) {
        for (std::int64_t c = 0; c < count; ++c) sums[c] += static_cast<A>(from[c]);
      } else {
        for (std::int64_t c = 0; c < count; ++c) sums[c] += static_cast<A>(from[c * in_step]);
      }
    }
    for (std::int64_t c = 0; c < count; ++c) {
      Out& to = row[(first + c) * out_step];
      to = static_cast<Out>(adds ? static_cast<A>(to) + sums[c] : sums[c]);
    }
  }
}

template <typename T, typename Out>
void scatter(const EmbeddingBackwardArgs& args) {
  const std::int64_t V = args.dweight.shape[0], work = args.dout.numel() + args.dweight.numel();
  const Occurrences found(args.ids, V);
  const std::int64_t grain = std::max<std::int64_t>(1, V * kGrain / std::max<std::int64_t>(work, 1));
  parallel_for(V, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t v = begin; v < end; ++v) {
      const std::int64_t* from = found.order.data() + found.starts[static_cast<std::size_t>(v)];
      const std::int64_t* to = found.order.data() + found.starts[static_cast<std::size_t>(v + 1)];
      scatter_row<T, Out>(args, v, from, v == args.padding_idx ? from : to);
    }
  });
}

}  // namespace

void embedding(const EmbeddingArgs& args, const ExecContext&) {
  const std::int64_t V = args.weight.shape[0];
  for (std::int64_t i = 0; i < args.ids.shape[0]; ++i) {
    const std::int64_t id = id_at(args.ids, i);
    HEDDLE_CHECK(id >= 0 && id < V, "embedding: id ", id, " at position ", i, " is outside the vocabulary [0, ", V, ")");
  }
  dispatch_float(args.weight.dtype, "embedding", [&](auto tag) { gather<typename decltype(tag)::type>(args); });
}

void embedding_backward(const EmbeddingBackwardArgs& args, const ExecContext&) {
  dispatch_float(args.dout.dtype, "embedding_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (args.dweight.dtype == args.dout.dtype) scatter<T, T>(args);
    else scatter<T, float>(args);
  });
}

}  // namespace heddle::cpu
