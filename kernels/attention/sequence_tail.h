#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

namespace heddle::cuda {

// Writes `value` to the rows of x past the last sequence (Note: Sequences of different lengths).
//   x           any dtype of attention, any strides; `dim` is the dimension of its rows
//   cu_seqlens  [n + 1], int32, on the device
void fill_tail(const MutView& x, int dim, const ConstView& cu_seqlens, double value, const ExecContext& ctx);

}  // namespace heddle::cuda
