#include "kernels/loss/loss.h"

#include <array>
#include <cmath>
#include <limits>

#include "kernels/elementwise/row_cpu.h"

namespace heddle::cpu {
namespace {

// Natural log of the sum of exp(x), through a buffer that stays in L1: V may be large, and one row is read, not copied.
template <typename A>
A log_sum_exp(const A* x, std::int64_t size) {
  constexpr std::int64_t kPiece = 256;
  alignas(64) std::array<A, kPiece> buffer;
  const A largest = max_row(x, size);
  if (largest == -std::numeric_limits<A>::infinity()) return largest;
  A total = 0;
  for (std::int64_t first = 0; first < size; first += kPiece)
    total += exp_row(x + first, largest, std::min(kPiece, size - first), buffer.data());
  return largest + std::log(total);
}

template <typename T>
void cross_entropy_typed(const CrossEntropyArgs& args) {
  using A = accumulate_t<T>;
  const std::int64_t rows = args.logits.shape[0], V = args.logits.shape[1];
  const std::int64_t* labels = args.labels.as<std::int64_t>();
  A* lse = args.lse.as<A>();
  const RowScratch<A> scratch(V, 1);
  parallel_for(rows, row_grain(V), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* logits = args.logits.as<T>() + r * args.logits.strides[0];
      lse[r] = log_sum_exp(read_row(logits, args.logits.strides[1], V, scratch.row(0)), V);
    }
  });
  double total = 0.0;
  std::int64_t valid = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    if (labels[r] == args.ignore_index) continue;
    ++valid;
    const A chosen = static_cast<A>(args.logits.as<T>()[r * args.logits.strides[0] + labels[r] * args.logits.strides[1]]);
    // -inf against an lse of -inf is a probability of 0 as well, not the NaN of their difference.
    const bool is_impossible = chosen == -std::numeric_limits<A>::infinity();
    total += is_impossible ? std::numeric_limits<double>::infinity() : static_cast<double>(lse[r]) - static_cast<double>(chosen);
  }
  *args.valid.as<std::int64_t>() = valid;
  *args.loss.as<A>() = static_cast<A>(args.is_mean && valid > 0 ? total / static_cast<double>(valid) : total);
}

template <typename T>
void cross_entropy_backward_typed(const CrossEntropyBackwardArgs& args) {
  using A = accumulate_t<T>;
  const std::int64_t rows = args.logits.shape[0], V = args.logits.shape[1], step = args.dlogits.strides[1];
  const std::int64_t valid = std::max<std::int64_t>(1, *args.valid.as<std::int64_t>());
  const A factor = *args.dloss.as<A>() / (args.is_mean ? static_cast<A>(valid) : A(1));
  const RowScratch<A> scratch(V, 2);
  parallel_for(rows, row_grain(V), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t label = args.labels.as<std::int64_t>()[r];
      const A lse = args.lse.as<A>()[r];
      T* to = args.dlogits.as<T>() + r * args.dlogits.strides[0];
      const T* from = args.logits.as<T>() + r * args.logits.strides[0];
      MutRow<A> dlogits(from == to ? scratch.row(1) : row_target(to, step, scratch.row(1)), V);
      if (label == args.ignore_index || lse == -std::numeric_limits<A>::infinity()) {
        dlogits = A(0);
      } else {
        exp_row(read_row(from, args.logits.strides[1], V, scratch.row(0)), lse, V, dlogits.data());
        dlogits *= factor;
      }
      if (label != args.ignore_index) dlogits[label] -= factor;
      write_row(dlogits.data(), to, step, V);
    }
  });
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& args, const ExecContext&) {
  const std::int64_t V = args.logits.shape[1];
  for (std::int64_t r = 0; r < args.labels.shape[0]; ++r) {
    const std::int64_t label = args.labels.as<std::int64_t>()[r];
    HEDDLE_CHECK(label == args.ignore_index || (label >= 0 && label < V), "cross_entropy: label ", label, " at position ", r,
                 " is outside [0, ", V, ") and is not ignore_index ", args.ignore_index);
  }
  dispatch_float(args.logits.dtype, "cross_entropy", [&](auto tag) { cross_entropy_typed<typename decltype(tag)::type>(args); });
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecContext&) {
  dispatch_float(args.logits.dtype, "cross_entropy_backward",
                 [&](auto tag) { cross_entropy_backward_typed<typename decltype(tag)::type>(args); });
}

}  // namespace heddle::cpu
