#include "kernels/attention/backward_sm90_launch.cuh"

namespace heddle::cuda::sm90 {

void backward_d128(const AttentionBackwardArgs& args, const BackwardPlan& plan, const ExecContext& ctx) {
  backward<BackwardTile<128, 64>>(args, plan, ctx);
}

}  // namespace heddle::cuda::sm90
