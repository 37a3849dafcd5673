#pragma once

#include <cuda_runtime.h>

#include "kernels/attention/attention.h"
#include "kernels/attention/params_sm80.h"

// The portable tensor-core variant: mma.sync, ldmatrix and cp.async, for compute capability 8.0 and later. bfloat16 and
// float16, head sizes up to 256 in multiples of 8; float32 by kernels of its own (attention_sm80_f32.h), any head size.

namespace heddle::cuda::sm80 {

AttentionSupport supports(const AttentionProblem& problem, AttentionPass pass);
std::int64_t workspace_bytes(const AttentionProblem& problem, AttentionPass pass);
void forward(const AttentionForwardArgs& args, void* workspace, const ExecContext& ctx);
void backward(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx);

// The kernels of a shape (tile_sm80.h), instantiated in a file each.
template <typename Shape>
void forward_with(const ForwardParams& p, DType dtype, cudaStream_t stream);
template <typename Shape>
void backward_with(const BackwardParams& p, DType dtype, cudaStream_t stream);

}  // namespace heddle::cuda::sm80
