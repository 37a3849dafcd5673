#pragma once

#include "kernels/attention/attention.h"

// float32 in the portable variant: products of three TF32 mma.sync each. Every head size, layout and mask of the contract,
// sequences of different lengths included; the same bits in every run.

namespace heddle::cuda::sm80 {

void forward_f32(const AttentionForwardArgs& args, const ExecContext& ctx);
std::int64_t backward_workspace_bytes_f32(const AttentionProblem& problem);
void backward_f32(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx);

}  // namespace heddle::cuda::sm80
