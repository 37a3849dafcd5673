#pragma once

#include <numbers>

#include "kernels/attention/products_sm80_f32.cuh"
#include "kernels/runtime/launch.cuh"

namespace heddle::cuda::sm80::f32 {

// Tile sizes, once. 99 KiB of shared memory a block, the least that devices of 8.0 and later have, holds each of them.
//   kWarps    of a block, 16 rows each: queries in the forward and for dq, keys for dk and dv
//   kStream   rows of the other side that a step handles
//   kColumns  of dk and dv that one block makes: more than 128 of both do not fit the registers
template <int kHeadSize>
struct Shape {
  static constexpr int kHead = kHeadSize;
  static constexpr int kForwardWarps = 4;
  static constexpr int kBackwardWarps = kHead <= 128 ? 4 : 2;
  static constexpr int kStream = kHead <= 64 ? 64 : kHead <= 128 ? 32 : 16;
  static constexpr int kColumns = kHead <= 128 ? kHead : 128;

  static constexpr int kForwardBytes = (kForwardWarps * 16 + 2 * kStream) * kPitch<kHead> * 4;
  static constexpr int kBackwardBytes = 2 * (kBackwardWarps * 16 + kStream) * kPitch<kHead> * 4;
};

// Calls fn(Shape<kHead>{}) with the smallest compiled head size that holds D columns.
template <typename Fn>
void with_shape(std::int64_t D, const Fn& fn) {
  if (D <= 32) fn(Shape<32>{});
  else if (D <= 64) fn(Shape<64>{});
  else if (D <= 128) fn(Shape<128>{});
  else fn(Shape<256>{});
}

template <typename Args>
Batch batch_of(const Args& args) {
  Batch all;
  all.Tq = args.q.shape[1], all.Tk = args.k.shape[1];
  all.longest_q = all.Tq, all.longest_k = all.Tk, all.count = args.q.shape[0];
  if (args.cu_seqlens_q.defined()) {
    all.cu_seqlens_q = args.cu_seqlens_q.template as<std::int32_t>();
    all.cu_seqlens_k = args.cu_seqlens_k.template as<std::int32_t>();
    all.longest_q = args.max_seqlen_q, all.longest_k = args.max_seqlen_k, all.count = args.cu_seqlens_q.shape[0] - 1;
  }
  all.Hq = static_cast<int>(args.q.shape[2]), all.Hkv = static_cast<int>(args.k.shape[2]), all.D = static_cast<int>(args.q.shape[3]);
  all.is_causal = args.is_causal;
  all.scale = static_cast<float>(args.scale), all.scale_log2 = static_cast<float>(args.scale * std::numbers::log2e);
  return all;
}

// Launches a kernel that takes one argument; none if there are no blocks.
template <typename Kernel, typename Params>
void launch(Kernel kernel, const Params& p, std::int64_t blocks, int threads, int shared_bytes, const char* op, const ExecContext& ctx) {
  if (blocks == 0) return;
  HEDDLE_CHECK(blocks <= INT32_MAX, op, ": ", blocks, " tiles of rows are more than a grid holds; split the batch");
  HEDDLE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream_of(ctx)>>>(p);
  check_launch(op);
}

}  // namespace heddle::cuda::sm80::f32
