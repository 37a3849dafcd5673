#pragma once

#include <algorithm>
#include <numbers>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_sm90.h"
#include "kernels/attention/backward_sm90.cuh"
#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/device_cuda.h"
#include "kernels/runtime/launch.cuh"

namespace heddle::cuda::sm90 {

// What one section of key heads reads and adds to again and again, queries, dout and sums of dq of one query head each, may
// take this much of the L2 cache: half of Hopper's 60 MB.
constexpr std::int64_t kBackwardSectionBytes = std::int64_t{32} << 20;

template <typename Tile>
BackwardParams backward_params(const AttentionBackwardArgs& args, const BackwardPlan& plan, const ExecContext& ctx) {
  const ConstView dk = args.dk, dv = args.dv;
  const auto Sq = args.q.shape[1], Hq = args.q.shape[2], D = args.q.shape[3];
  const auto Sk = args.k.shape[1], Hkv = args.k.shape[2];
  const std::int64_t group = Hq / Hkv, head_bytes = plan.rows.longest * Tile::kHeadSize * (2 + 2 + 4);
  BackwardParams p = {};
  // TMA cannot describe an empty tensor. Without queries none is read, so that any other map will do.
  p.q = tensor_map(Sq > 0 ? args.q : args.k, Tile::kRows);
  p.k = tensor_map(args.k, Tile::kColumns);
  p.v = tensor_map(args.v, Tile::kColumns);
  p.dout = tensor_map(Sq > 0 ? plan.dout : args.k, Tile::kRows);
  p.rows = plan.rows;
  p.sequence_rows = plan.rows.longest_padded();
  p.lse_log2 = plan.lse_log2;
  p.delta = plan.delta;
  p.dq_sum = plan.dq_sum;
  p.turns = plan.turns;
  p.row_tiles = static_cast<int>(plan.rows.total_rows / Tile::kRows);
  p.alternates = args.is_causal && group > 1 && plan.turns == nullptr;
  p.dk = args.dk.data;
  p.dk_batch = dk.strides[0];
  p.dk_row = dk.strides[1];
  p.dk_head = dk.strides[2];
  p.dv = args.dv.data;
  p.dv_batch = dv.strides[0];
  p.dv_row = dv.strides[1];
  p.dv_head = dv.strides[2];
  const bool is_packed = args.cu_seqlens_k.defined();
  const std::int64_t longest = is_packed ? args.max_seqlen_k : Sk;
  if (is_packed) p.cu_seqlens_k = args.cu_seqlens_k.as<std::int32_t>();
  p.D = static_cast<int>(D);
  p.Sq = static_cast<int>(plan.rows.longest);
  p.Sk = static_cast<int>(longest);
  p.sequences = static_cast<int>(plan.rows.sequences);
  p.key_heads = static_cast<int>(Hkv);
  p.group = static_cast<int>(group);
  p.key_tiles = static_cast<int>((longest + Tile::kColumns - 1) / Tile::kColumns);
  p.section_heads = static_cast<int>(std::max<std::int64_t>(1, std::min(kBackwardSectionBytes / std::max<std::int64_t>(head_bytes, 1),
                                                                         plan.rows.sequences * Hkv)));
  p.scale = static_cast<float>(args.scale);
  p.scale_log2 = static_cast<float>(args.scale * std::numbers::log2e);
  p.tiles = static_cast<unsigned>(p.key_tiles) * p.key_heads * p.sequences;
  if (p.tiles > static_cast<unsigned>(device_info(ctx.device.index).multiprocessors)) p.schedule = schedule_counters(ctx.device.index);
  return p;
}

template <typename T, typename Tile, bool kCausal, bool kDeterministic>
void launch_backward(const AttentionBackwardArgs& args, const BackwardPlan& plan, const ExecContext& ctx) {
  const auto kernel = attention_backward_kernel<T, Tile, kCausal, kDeterministic>;
  constexpr int kMemory = backward_memory_bytes<Tile>();
  static const cudaError_t opted_in = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory);
  HEDDLE_CUDA_CHECK(opted_in);
  const BackwardParams p = backward_params<Tile>(args, plan, ctx);
  if (p.tiles == 0) return;
  const unsigned blocks = std::min<unsigned>(p.tiles, device_info(ctx.device.index).multiprocessors);
  launch_early(plan.starts_early, kernel, blocks, Tile::kThreads, kMemory, ctx, p);
  check_launch("attention backward");
}

template <typename T, typename Tile>
void backward_of(const AttentionBackwardArgs& args, const BackwardPlan& plan, const ExecContext& ctx) {
  if (plan.turns != nullptr)
    args.is_causal ? launch_backward<T, Tile, true, true>(args, plan, ctx) : launch_backward<T, Tile, false, true>(args, plan, ctx);
  else
    args.is_causal ? launch_backward<T, Tile, true, false>(args, plan, ctx) : launch_backward<T, Tile, false, false>(args, plan, ctx);
}

template <typename Tile>
void backward(const AttentionBackwardArgs& args, const BackwardPlan& plan, const ExecContext& ctx) {
  static_assert(Tile::kRows == backward_rows(Tile::kHeadSize) && Tile::kHeadSize == backward_columns(Tile::kHeadSize) &&
                Tile::kConsumers == kBackwardTurns);
  args.q.dtype == DType::bf16 ? backward_of<__nv_bfloat16, Tile>(args, plan, ctx) : backward_of<__half, Tile>(args, plan, ctx);
}

}  // namespace heddle::cuda::sm90
