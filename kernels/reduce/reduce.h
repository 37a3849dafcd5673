#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// Reductions. Operands have equal rank: where the output has size 1 and the input more, the input is reduced. Any strides.
// The order of the additions depends on the shape only, never on the number of threads.

namespace heddle {

// out = factor * sum(x), or out += factor * sum(x). The sum of no elements is 0.
//   x    any floating dtype
//   out  dtype of x, or float32; summed in float32 (float64 for float64) and rounded once
struct SumArgs {
  ConstView x;
  MutView out;
  double factor = 1.0;
  Write write = Write::assign;
};
void sum(const SumArgs& args, const ExecContext& ctx);

// The largest value along one dimension, of size >= 1, and the index of its first occurrence. NaN counts as largest.
struct MaxArgs {
  ConstView x;    // any floating dtype
  int dim;        // in [0, rank)
  MutView out;    // dtype of x, size 1 along dim
  MutView index;  // int64, shape of out
};
void max(const MaxArgs& args, const ExecContext& ctx);

// dx = dout at the index along dim, 0 elsewhere.
struct MaxBackwardArgs {
  ConstView dout;
  ConstView index;
  int dim;
  MutView dx;
};
void max_backward(const MaxBackwardArgs& args, const ExecContext& ctx);

namespace cpu {
void sum(const SumArgs& args, const ExecContext& ctx);
void max(const MaxArgs& args, const ExecContext& ctx);
void max_backward(const MaxBackwardArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void sum(const SumArgs& args, const ExecContext& ctx);
void max(const MaxArgs& args, const ExecContext& ctx);
void max_backward(const MaxBackwardArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
