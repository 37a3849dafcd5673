#include "kernels/attention/attention_sm80_f32.h"
#include "kernels/attention/backward_sm80_f32.cuh"

namespace heddle::cuda::sm80 {
namespace {

constexpr int kPaddedTile = 128;  // a multiple of every kernel's tile of queries

PaddedRows padded_rows(const f32::Batch& all) {
  return all.cu_seqlens_q == nullptr ? PaddedRows::dense(all.count, all.longest_q, kPaddedTile)
                                     : PaddedRows::ragged(all.count, all.longest_q, all.Tq, all.cu_seqlens_q, kPaddedTile);
}

}  // namespace

std::int64_t backward_workspace_bytes_f32(const AttentionProblem& problem) {
  const PaddedRows padded = problem.is_varlen ? PaddedRows::ragged(problem.B, problem.Sq, problem.Tq, nullptr, kPaddedTile)
                                              : PaddedRows::dense(problem.B, problem.Sq, kPaddedTile);
  return 2 * problem.Hq * padded.total_rows * static_cast<std::int64_t>(sizeof(float));
}

void backward_f32(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx) {
  using Input = f32::Operand<const float>;
  using Output = f32::Operand<float>;
  const f32::Batch all = f32::batch_of(args);
  const PaddedRows padded = padded_rows(all);
  float* const lse_log2 = static_cast<float*>(workspace);
  float* const delta = lse_log2 + all.Hq * padded.total_rows;
  backward_prepare({.out = args.out, .dout = args.dout, .lse = args.lse, .dlse = args.dlse, .rows = padded, .lse_log2 = lse_log2, .delta = delta}, ctx);
  const f32::BackwardParams p{Input(args.q), Input(args.k), Input(args.v), Input(args.dout), Output(args.dq), Output(args.dk), Output(args.dv),
                              lse_log2, delta, padded, all};
  f32::query_gradient(p, ctx);
  f32::key_gradients(p, ctx);
}

}  // namespace heddle::cuda::sm80
