#include "kernels/attention/attention_sm90.h"

#include <cudaTypedefs.h>

#include "kernels/runtime/allocator.h"
#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/device_cuda.h"

namespace heddle::cuda::sm90 {
namespace {

constexpr int kCapability = 90;  // wgmma exists on 9.0 only
// A tile of 256 columns leaves no shared memory for the next tile's queries and for the output.
constexpr int kMaxHeadSize = 128;
// Up to this workspace the kernels of a backward pass start while the one before ends: 2 to 8 % at 4 8 1024, whose workspace is 8 or
// 16 MiB. At 16 16 1024, with 130 MiB, it costs 1 to 3 %. The last of them is compiled for the architectures of the build.
#ifdef HEDDLE_BUILT_FOR_90
constexpr std::int64_t kEarlyBytes = std::int64_t{32} << 20;
#else
constexpr std::int64_t kEarlyBytes = -1;
#endif

// The driver's encoder, fetched through the runtime so that nothing links against libcuda.
PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    HEDDLE_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    HEDDLE_CHECK(found == cudaDriverEntryPointSuccess, "attention: the driver has no cuTensorMapEncodeTiled; install a newer one");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// What BackwardPlan's pointers point to.
struct BackwardWorkspace {
  std::int64_t lse_log2, delta, turns, bytes;  // where the parts behind the sums of dq start, and the end

  BackwardWorkspace(const PaddedRows& rows, std::int64_t Hq, std::int64_t D, bool is_deterministic) {
    const std::int64_t row_bytes = Hq * rows.total_rows * 4;
    lse_log2 = row_bytes * backward_columns(D);
    delta = lse_log2 + row_bytes;
    turns = delta + row_bytes;
    bytes = turns + (is_deterministic ? row_bytes / rows.tile * kBackwardTurns : 0);
  }
};

// Whether tensor_map takes the view as it is: not if a gradient was expanded, transposed or cut out at an odd place.
bool has_tma_strides(const ConstView& view) {
  bool fits = view.strides[3] == 1 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (int d = 0; d < 3; ++d)
    fits = fits && (view.shape[d] == 1 || (view.strides[d] > 0 && view.strides[d] * 2 % 16 == 0));
  return fits;
}

}  // namespace

AttentionSupport supports(const AttentionProblem& problem, AttentionPass) {
  if (!problem.device.is_cuda()) return {false, "it runs on CUDA devices"};
  const int capability = device_info(problem.device.index).capability;
  if (capability != kCapability)
    return {false, concat_text("it needs compute capability 9.0, the device has ", capability / 10, ".", capability % 10)};
  if (problem.dtype != DType::bf16 && problem.dtype != DType::f16)
    return {false, concat_text("it takes bfloat16 and float16, not ", problem.dtype)};
  if (problem.D > kMaxHeadSize || problem.D % 8 != 0)
    return {false, concat_text("it takes head sizes that are multiples of 8 up to ", kMaxHeadSize, ", not ", problem.D)};
  if (!problem.has_16_byte_rows) return {false, "it needs addresses and strides that are multiples of 16 bytes"};
  return {true, ""};
}

std::int64_t workspace_bytes(const AttentionProblem& problem, AttentionPass pass) {
  if (pass == AttentionPass::forward) return 0;
  const int tile = backward_rows(problem.D);
  const PaddedRows rows = problem.is_varlen ? PaddedRows::ragged(problem.B, problem.Sq, problem.Tq, nullptr, tile)
                                            : PaddedRows::dense(problem.B, problem.Sq, tile);
  return BackwardWorkspace(rows, problem.Hq, problem.D, problem.deterministic).bytes;
}

void forward(const AttentionForwardArgs& args, void*, const ExecContext& ctx) {
  const bool has_no_sequence = args.cu_seqlens_q.defined() && args.cu_seqlens_q.shape[0] == 1;
  if (args.q.numel() == 0 || has_no_sequence) return;
  args.q.shape[3] <= 64 ? forward_d64(args, ctx) : forward_d128(args, ctx);
}

void backward(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx) {
  const std::int64_t B = args.q.shape[0], Sq = args.q.shape[1], Hq = args.q.shape[2], D = args.q.shape[3];
  const int tile = backward_rows(D), columns = backward_columns(D);
  PaddedRows rows = PaddedRows::dense(B, Sq, tile);
  if (args.cu_seqlens_q.defined())
    rows = PaddedRows::ragged(args.cu_seqlens_q.shape[0] - 1, args.max_seqlen_q, Sq, args.cu_seqlens_q.as<std::int32_t>(), tile);
  const BackwardWorkspace at(rows, Hq, D, ctx.deterministic);
  auto* const memory = static_cast<std::uint8_t*>(workspace);
  auto* const dq_sum = reinterpret_cast<float*>(memory);
  BackwardPlan plan{rows, dq_sum, reinterpret_cast<float*>(memory + at.lse_log2), reinterpret_cast<float*>(memory + at.delta), nullptr, args.dout,
                    at.bytes <= kEarlyBytes};
  if (at.bytes > at.turns) {
    plan.turns = reinterpret_cast<unsigned*>(memory + at.turns);
    HEDDLE_CUDA_CHECK(cudaMemsetAsync(plan.turns, 0, static_cast<std::size_t>(at.bytes - at.turns), static_cast<cudaStream_t>(ctx.stream)));
  }
  Buffer dout_copy;
  if (!has_tma_strides(args.dout)) {
    dout_copy = Buffer(args.dout.numel() * 2, args.dout.device);
    plan.dout.data = dout_copy.data();
    plan.dout.strides = contiguous_strides(args.dout.shape);
  }
  backward_prepare({.out = args.out, .dout = args.dout, .lse = args.lse, .dlse = args.dlse, .rows = rows, .lse_log2 = plan.lse_log2,
                    .delta = plan.delta, .dq_sum = dq_sum, .columns = columns, .dout_copy = dout_copy.data()}, ctx);
  if (args.k.numel() > 0) columns == 64 ? backward_d64(args, plan, ctx) : backward_d128(args, plan, ctx);
  backward_finish({.dq_sum = dq_sum, .order = DqOrder::warpgroup_blocks, .rows = rows, .columns = columns,
                   .scale = args.scale, .dq = args.dq, .starts_early = plan.starts_early}, ctx);
}

CUtensorMap tensor_map(const ConstView& view, int rows) {
  const auto& [B, S, H, D] = std::array{view.shape[0], view.shape[1], view.shape[2], view.shape[3]};
  // A dimension of size 1 may have any stride in the view, but the encoder wants a multiple of 16 bytes.
  const auto stride = [&](int d) { return static_cast<cuuint64_t>(view.shape[d] == 1 ? D : view.strides[d]) * 2; };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(D), static_cast<cuuint64_t>(S), static_cast<cuuint64_t>(H),
                              static_cast<cuuint64_t>(B)};
  const cuuint64_t strides[] = {stride(1), stride(2), stride(0)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const auto type = view.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  const CUresult status = map_encoder()(&map, type, 4, const_cast<void*>(view.data), sizes, strides, box, steps,
                                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  HEDDLE_CHECK(status == CUDA_SUCCESS, "attention: TMA cannot describe a view ", view.shape, " with strides ", view.strides,
               " (driver status ", static_cast<int>(status), ")");
  return map;
}

}  // namespace heddle::cuda::sm90
