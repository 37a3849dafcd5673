#include "kernels/attention/forward_sm90_launch.cuh"

namespace heddle::cuda::sm90 {

// Three consumers: 574 TFLOP/s against 466 with two at 16k tokens, but tiles of 192 rows leave more of the card idle when
// there are few (244 against 301 at 1k, causal, 512 heads). H200, CUDA 13.0.
void forward_d64(const AttentionForwardArgs& args, const ExecContext& ctx) {
  constexpr std::int64_t kLongRows = 2048;
  const std::int64_t rows = args.cu_seqlens_q.defined() ? args.max_seqlen_q : args.q.shape[1];
  if (rows > kLongRows) forward<ForwardTile<64, 3, 128>>(args, ctx);
  else forward<ForwardTile<64, 2, 128>>(args, ctx);
}

}  // namespace heddle::cuda::sm90
