#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/attention/tile.h"

namespace heddle::cpu {

// By measurement: see NOTES.md.
inline constexpr AttentionTile kForwardTile{96, 96};
inline constexpr AttentionTile kBackwardTile{96, 96};

// The "cpu" row of the variant table.
AttentionSupport attention_supports(const AttentionProblem& problem, AttentionPass pass);
std::int64_t attention_workspace(const AttentionProblem& problem, AttentionPass pass);
void attention_forward(const AttentionForwardArgs& args, void* workspace, const ExecContext& ctx);
void attention_backward(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx);

// The same with any tile sizes, so that tests can run several. The arguments have been checked. The workspace is
// 64-byte aligned and has the bytes that the first two ask for at the present number of threads.
std::int64_t attention_forward_workspace(const AttentionProblem& problem, AttentionTile tile);
std::int64_t attention_backward_workspace(const AttentionProblem& problem, AttentionTile tile);
void attention_forward(const AttentionForwardArgs& args, AttentionTile tile, void* workspace);
void attention_backward(const AttentionBackwardArgs& args, AttentionTile tile, void* workspace);

}  // namespace heddle::cpu
