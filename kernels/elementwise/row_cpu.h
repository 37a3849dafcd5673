#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/runtime/allocator.h"
#include "kernels/runtime/dtype.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/view.h"

// Note: Rows
// CPU kernels that work along one dimension see each slice as a dense row of the accumulation type: the tensor's memory
// where it is one already, else a copy in a scratch row of the calling thread. Eigen then vectorises whole-row
// expressions, one path serves every dtype and stride, and a half row is rounded once, when it is written back.

namespace heddle::cpu {

template <typename A>
using Row = Eigen::Map<const Eigen::Array<A, Eigen::Dynamic, 1>>;
template <typename A>
using MutRow = Eigen::Map<Eigen::Array<A, Eigen::Dynamic, 1>>;

// Items a thread must have to be worth starting, in elements of a row kernel.
constexpr std::int64_t row_grain(std::int64_t row_size) { return std::max<std::int64_t>(1, 8192 / std::max<std::int64_t>(row_size, 1)); }

// `rows` rows of `size` values for every thread.
template <typename A>
class RowScratch {
 public:
  RowScratch(std::int64_t size, int rows)
      : size_(size), rows_(rows), memory_(num_threads() * rows * size * static_cast<std::int64_t>(sizeof(A)), kCpu) {}

  A* row(int i) const { return static_cast<A*>(memory_.data()) + (std::int64_t{thread_index()} * rows_ + i) * size_; }

 private:
  std::int64_t size_;
  int rows_;
  Buffer memory_;
};

template <typename A, typename T>
const A* read_row(const T* from, std::int64_t stride, std::int64_t size, A* scratch) {
  if constexpr (std::is_same_v<A, T>)
    if (stride == 1) return from;
  for (std::int64_t i = 0; i < size; ++i) scratch[i] = static_cast<A>(from[i * stride]);
  return scratch;
}

// Where a row may be computed: the destination itself, or scratch to be handed to write_row.
template <typename A, typename T>
A* row_target(T* to, std::int64_t stride, A* scratch) {
  if constexpr (std::is_same_v<A, T>)
    if (stride == 1) return to;
  return scratch;
}

template <typename A, typename T>
void write_row(const A* row, T* to, std::int64_t stride, std::int64_t size) {
  if constexpr (std::is_same_v<A, T>)
    if (row == to) return;
  for (std::int64_t i = 0; i < size; ++i) to[i * stride] = static_cast<T>(row[i]);
}

// A rank-1 view as numbers; `size` times `absent` when it is undefined.
template <typename T>
std::vector<accumulate_t<T>> read_vector(const ConstView& view, std::int64_t size, accumulate_t<T> absent) {
  std::vector<accumulate_t<T>> values(static_cast<std::size_t>(size), absent);
  if (!view.defined()) return values;
  for (std::int64_t i = 0; i < size; ++i) values[static_cast<std::size_t>(i)] = static_cast<accumulate_t<T>>(view.as<T>()[i * view.strides[0]]);
  return values;
}

// out = values or out += values, for a rank-1 view of any floating dtype.
template <typename A>
void write_vector(const A* values, const MutView& out, Write write) {
  dispatch_float(out.dtype, "write_vector", [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t i = 0; i < out.shape[0]; ++i) {
      T& to = out.as<T>()[i * out.strides[0]];
      to = static_cast<T>(write == Write::accumulate ? static_cast<A>(to) + values[i] : values[i]);
    }
  });
}

// out = exp(x - shift) for a finite shift, and the sum of it. Eigen's exp clamps its argument, so that exp(-inf) would be
// 3e-39; here it is 0. `out` must not be `x`.
template <typename A>
A exp_row(const A* x, A shift, std::int64_t size, A* out) {
  MutRow<A> row(out, size);
  row = (Row<A>(x, size) - shift).exp();
  for (std::int64_t i = 0; i < size; ++i) out[i] = x[i] == -std::numeric_limits<A>::infinity() ? A(0) : out[i];
  return row.sum();
}

// The largest value; NaN if there is one.
template <typename A>
A max_row(const A* x, std::int64_t size) {
  return Row<A>(x, size).template maxCoeff<Eigen::PropagateNaN>();
}

}  // namespace heddle::cpu
