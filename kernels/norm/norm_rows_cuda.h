#pragma once

#include "kernels/norm/norm.h"

// Note: Norm rows in registers
// A dense, aligned float32 or bfloat16 row of up to 8 KB is read once, 16 bytes a load, and stays in registers until its output is
// written. In the forward a warp has a row, or a block where it is longer. In the backward a thread has the same columns of many rows
// and sums their dweight and dbias in registers, so that x and dout are read once for all three gradients.

namespace heddle::cuda {

// Returns false, and does nothing, where some operand does not fit the note.
bool norm_rows(const NormArgs& args, const ExecContext& ctx);

// `parts` [chunks, 2, N] float32 receives the sums of dweight and dbias over a part of the rows each; null if neither is wanted.
// norm_row_chunks says how many chunks there are, 0 where some operand does not fit the note.
std::int64_t norm_row_chunks(const NormBackwardArgs& args, const ExecContext& ctx);
void norm_backward_rows(const NormBackwardArgs& args, float* parts, const ExecContext& ctx);

}  // namespace heddle::cuda
