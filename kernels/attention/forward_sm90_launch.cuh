#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_sm90.h"
#include "kernels/attention/forward_sm90.cuh"
#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/device_cuda.h"

namespace heddle::cuda::sm90 {

// What keys and values of one section of heads may take of the L2 cache, with causal masks; see Note: Tile order. Sections of
// four tiles a block instead: level to 5 % slower at 4096 rows and more. H200, CUDA 13.0.
constexpr std::int64_t kSectionBytes = std::int64_t{32} << 20;

// Where tiles are taken late: key tiles a row tile sees, against tiles a block gets. Late against early at 1024 rows: 306 and 287
// TFLOP/s with 2 tiles a block, 454 and 471 with 16; at 8192 rows 687 and 665 with 16. H200, CUDA 13.0.
constexpr std::int64_t kLateLength = 2;

template <typename Tile>
ForwardParams forward_params(const AttentionForwardArgs& args, const ExecContext& ctx) {
  const ConstView out = args.out, lse = args.lse;
  const auto B = args.q.shape[0], Sq = args.q.shape[1], Hq = args.q.shape[2], D = args.q.shape[3];
  const auto Sk = args.k.shape[1], Hkv = args.k.shape[2];
  const bool is_varlen = args.cu_seqlens_q.defined();
  ForwardParams p = {};
  p.q = tensor_map(args.q, Tile::kRows);
  // Without keys the maps are never read, but they must be maps.
  p.k = tensor_map(Sk > 0 ? args.k : args.q, Tile::kColumns);
  p.v = tensor_map(Sk > 0 ? args.v : args.q, Tile::kColumns);
  p.out = tensor_map(args.out, kOutRows);
  p.out_data = args.out.data;
  p.out_batch = out.strides[0];
  p.out_row = out.strides[1];
  p.out_head = out.strides[2];
  p.lse = args.lse.as<float>();
  p.lse_batch = lse.strides[0];
  p.lse_head = lse.strides[1];
  p.lse_row = lse.strides[2];
  p.Sq = static_cast<int>(Sq);
  p.Sk = static_cast<int>(Sk);
  p.D = static_cast<int>(D);
  p.batches = static_cast<int>(B);
  p.heads = static_cast<int>(Hq);
  p.group = static_cast<int>(Hq / Hkv);
  p.row_tiles = static_cast<int>((Sq + Tile::kRows - 1) / Tile::kRows);
  p.scale = static_cast<float>(args.scale);
  p.scale_log2 = static_cast<float>(args.scale * std::numbers::log2e);
  p.schedule = schedule_counters(ctx.device.index);
  if (is_varlen) {
    p.cu_seqlens_q = args.cu_seqlens_q.as<std::int32_t>();
    p.cu_seqlens_k = args.cu_seqlens_k.as<std::int32_t>();
    p.sequences = static_cast<int>(args.cu_seqlens_q.shape[0]) - 1;
    p.row_tiles = static_cast<int>(Sq / Tile::kRows) + p.sequences;  // Note: Tiles of sequences of different lengths
  }
  const std::int64_t keys = std::max<std::int64_t>(1, is_varlen ? args.max_seqlen_k : Sk);
  const std::int64_t section = std::max<std::int64_t>(1, kSectionBytes / (keys * D * 4)) * p.group;
  p.tiles = static_cast<unsigned>(B * Hq * p.row_tiles);
  p.takes_early = !args.is_causal || keys * device_info(ctx.device.index).multiprocessors < kLateLength * p.tiles * Tile::kColumns;
  p.section_heads = args.is_causal ? static_cast<int>(std::min(section, B * Hq)) : 1;
  return p;
}

template <typename T, typename Tile, bool kCausal>
void launch_forward(const AttentionForwardArgs& args, const ExecContext& ctx) {
  const auto kernel = attention_forward_kernel<T, Tile, kCausal>;
  constexpr int kMemory = forward_memory_bytes<Tile>();
  static const cudaError_t opted_in = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory);
  HEDDLE_CUDA_CHECK(opted_in);
  const ForwardParams p = forward_params<Tile>(args, ctx);
  const unsigned blocks = std::min<unsigned>(p.tiles, device_info(ctx.device.index).multiprocessors);
  kernel<<<blocks, Tile::kThreads, kMemory, static_cast<cudaStream_t>(ctx.stream)>>>(p);
  check_launch("attention");
}

template <typename Tile>
void forward(const AttentionForwardArgs& args, const ExecContext& ctx) {
  const bool is_bf16 = args.q.dtype == DType::bf16;
  if (args.is_causal)
    is_bf16 ? launch_forward<__nv_bfloat16, Tile, true>(args, ctx) : launch_forward<__half, Tile, true>(args, ctx);
  else
    is_bf16 ? launch_forward<__nv_bfloat16, Tile, false>(args, ctx) : launch_forward<__half, Tile, false>(args, ctx);
}

}  // namespace heddle::cuda::sm90
