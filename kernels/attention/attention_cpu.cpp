#include "kernels/attention/attention_cpu.h"

namespace heddle::cpu {

AttentionSupport attention_supports(const AttentionProblem& problem, AttentionPass) {
  if (!problem.device.is_cpu())
    return {false, concat_text("the tensors are on ", problem.device, "; move them to the cpu")};
  return {true, ""};
}

std::int64_t attention_workspace(const AttentionProblem& problem, AttentionPass pass) {
  return pass == AttentionPass::forward ? attention_forward_workspace(problem, kForwardTile)
                                        : attention_backward_workspace(problem, kBackwardTile);
}

void attention_forward(const AttentionForwardArgs& args, void* workspace, const ExecContext&) {
  attention_forward(args, kForwardTile, workspace);
}

void attention_backward(const AttentionBackwardArgs& args, void* workspace, const ExecContext&) {
  attention_backward(args, kBackwardTile, workspace);
}

}  // namespace heddle::cpu
