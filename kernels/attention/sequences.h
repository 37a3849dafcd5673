#pragma once

#include "kernels/attention/tile.h"
#include "kernels/runtime/view.h"

// Cutting a batch of sequences that lie end to end into calls of one sequence (Note: Sequences of different lengths).
namespace heddle::cpu {

// The rows of one sequence.
struct Sequence {
  Span queries;
  Span keys;
};

// The part of a view that has the indices `range` of dimension `dim`.
template <typename View>
View cut(View view, int dim, Span range) {
  using Byte = std::conditional_t<std::is_same_v<View, MutView>, char, const char>;
  view.data = static_cast<Byte*>(view.data) + range.begin * view.strides[dim] * static_cast<std::int64_t>(dtype_size(view.dtype));
  view.shape[dim] = range.size();
  return view;
}

// Calls run(sequence) for each. The rows past the last sequence are two more: queries without keys and keys without
// queries, whose results are the zeros that those rows must have.
template <typename Args, typename Run>
void for_each_sequence(const Args& args, const Run& run) {
  const auto *q = args.cu_seqlens_q.template as<std::int32_t>(), *k = args.cu_seqlens_k.template as<std::int32_t>();
  const std::int64_t n = args.cu_seqlens_q.shape[0] - 1;
  for (std::int64_t i = 0; i < n; ++i) run(Sequence{{q[i], q[i + 1]}, {k[i], k[i + 1]}});
  run(Sequence{{q[n], args.q.shape[1]}, {0, 0}});
  run(Sequence{{0, 0}, {k[n], args.k.shape[1]}});
}

}  // namespace heddle::cpu
