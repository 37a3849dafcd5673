#pragma once

#include "kernels/norm/norm.h"

// Note: Norm rows in registers
// A dense, aligned float32 or bfloat16 row is read once, 16 bytes a load, and stays in registers until its output is written: in
// those of a warp, or of a block where it is longer. The backward keeps the sums of dweight and dbias over the rows of a thread in
// registers too, so that x and dout are read once for all three gradients.

namespace heddle::cuda {

// Each does its pass and returns true, or does nothing and returns false where some operand does not fit the note.
bool norm_rows(const NormArgs& args, const ExecContext& ctx);

// `parts` [chunks, 2, N] float32 receives the sums of dweight and dbias over a part of the rows each; null if neither is wanted.
struct NormParts {
  float* data = nullptr;
  std::int64_t chunks = 0;
};
// How many chunks norm_backward_rows makes; 0 where it does not apply.
std::int64_t norm_row_chunks(const NormBackwardArgs& args, const ExecContext& ctx);
void norm_backward_rows(const NormBackwardArgs& args, const NormParts& parts, const ExecContext& ctx);

}  // namespace heddle::cuda
