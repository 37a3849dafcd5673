#pragma once

#include <cuda.h>

#include "kernels/attention/attention.h"

// The Hopper variant: wgmma products fed by TMA. Head sizes that are multiples of 8 up to 128, bfloat16 and float16, forward
// only.

namespace heddle::cuda::sm90 {

AttentionSupport supports(const AttentionProblem& problem, AttentionPass pass);
std::int64_t workspace_bytes(const AttentionProblem& problem, AttentionPass pass);
void forward(const AttentionForwardArgs& args, void* workspace, const ExecContext& ctx);
void backward(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx);

// One per tile of columns, up to 64 and up to 128, in a file each: they take most of the compile time.
void forward_d64(const AttentionForwardArgs& args, const ExecContext& ctx);
void forward_d128(const AttentionForwardArgs& args, const ExecContext& ctx);

// The TMA description of a [B, S, H, D] view for boxes of `rows` rows by 64 columns, 128-byte swizzled.
CUtensorMap tensor_map(const ConstView& view, int rows);

}  // namespace heddle::cuda::sm90
