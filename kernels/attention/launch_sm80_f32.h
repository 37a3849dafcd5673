#pragma once

#include <numbers>

#include "kernels/attention/products_sm80_f32.cuh"
#include "kernels/runtime/launch.cuh"

namespace heddle::cuda::sm80::f32 {

// A kernel's tiles. 99 KiB of shared memory a block, the least that devices of 8.0 and later have, hold each of them.
//   kHead         columns of a row in shared memory
//   kWarps        of a block; each keeps kBlocks times 16 rows
//   kStreamRows   rows of the other side that a step handles
//   kKept         tensors whose rows are kept; kStreamed: whose rows are streamed
//   kResult       columns of a result that a block makes: dk and dv of more than 128 do not fit the registers
template <int kHeadSize, int kWarps, int kBlocks, int kStreamRows, int kKept, int kStreamed, int kResult = kHeadSize>
struct Tiles {
  static constexpr int kHead = kHeadSize, kM = kBlocks, kStream = kStreamRows, kColumns = kResult;
  static constexpr int kThreads = kWarps * kWarp, kRows = kWarps * kBlocks * kBlockRows;
  static constexpr int kSharedBytes = (kKept * kRows + kStreamed * kStream) * kPitch<kHead> * 4;
  static_assert(kSharedBytes <= 99 << 10);
};

// By measurement: see NOTES.md.
template <int kHead>
struct Shape {
  using Forward = Tiles<kHead, 4, 2, 64, 1, 2>;
  using QueryGradient = Tiles<kHead, 4, 1, 64, 2, 2>;
  using KeyGradients = Tiles<kHead, 4, 1, 64, 2, 2>;
};
template <>
struct Shape<128> {
  using Forward = Tiles<128, 4, 2, 32, 1, 2>;
  using QueryGradient = Tiles<128, 4, 1, 32, 2, 2>;
  using KeyGradients = Tiles<128, 4, 1, 32, 2, 2>;
};
template <>
struct Shape<256> {
  using Forward = Tiles<256, 4, 1, 16, 1, 2>;
  using QueryGradient = Tiles<256, 2, 1, 16, 2, 2>;
  using KeyGradients = Tiles<256, 2, 1, 16, 2, 2, 128>;
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

// Launches a kernel with the threads and the shared memory of Tiles; none if there are no blocks.
template <typename Tiles, typename... Parameters, typename... Values>
void launch(void (*kernel)(Parameters...), std::int64_t blocks, const char* op, const ExecContext& ctx, const Values&... values) {
  if (blocks == 0) return;
  HEDDLE_CHECK(blocks <= INT32_MAX, op, ": ", blocks, " tiles of rows are more than a grid holds; split the batch");
  HEDDLE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::kSharedBytes));
  kernel<<<static_cast<unsigned>(blocks), Tiles::kThreads, Tiles::kSharedBytes, stream_of(ctx)>>>(values...);
  check_launch(op);
}

}  // namespace heddle::cuda::sm80::f32
