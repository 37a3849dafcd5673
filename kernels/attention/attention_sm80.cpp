#include "kernels/attention/attention_sm80.h"

#include <algorithm>
#include <numbers>
#include <type_traits>

#include "kernels/attention/attention_sm80_f32.h"
#include "kernels/attention/tile.h"
#include "kernels/attention/tile_sm80.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/device_cuda.h"

namespace heddle::cuda::sm80 {
namespace {

constexpr int kCapability = 80;
// What one section of heads may take of the L2 cache (Note: Block order): it is 40 MB on compute capability 8.0, 50 on 9.0.
constexpr std::int64_t kSectionBytes = std::int64_t{32} << 20;
// Launches of up to this many blocks a multiprocessor with a causal mask are one section, so that their longest blocks start
// first: +16 to 22 % in the backward of grouped heads, 512 blocks on an H200.
constexpr int kFewBlocks = 8;
// Rows of a block of DqOrder::warpgroup_blocks; the kernels' tiles divide it.
constexpr int kDqBlock = 64;
// Rows that share a turn, at least (Note: Turns).
constexpr int kSmallestTile = 32;

// Calls fn(std::type_identity<Shape>{}) with the shape of the smallest compiled head size that holds D columns.
template <typename Fn>
void with_forward_shape(std::int64_t D, const Fn& fn) {
  if (D <= 32) fn(std::type_identity<Shapes<32>::Forward>{});
  else if (D <= 64) fn(std::type_identity<Shapes<64>::Forward>{});
  else if (D <= 96) fn(std::type_identity<Shapes<96>::Forward>{});
  else if (D <= 128) fn(std::type_identity<Shapes<128>::Forward>{});
  else if (D <= 192) fn(std::type_identity<Shapes<192>::Forward>{});
  else fn(std::type_identity<Shapes<256>::Forward>{});
}

// The same for the backward, with the small shape where the large one does not fit `shared_bytes`.
template <typename Shape, typename Small, typename Fn>
void with_shape_that_fits(int shared_bytes, const Fn& fn) {
  if (Shape::kSharedBytes <= shared_bytes) fn(std::type_identity<Shape>{});
  else fn(std::type_identity<Small>{});
}
template <typename Fn>
void with_backward_shape(std::int64_t D, int shared_bytes, const Fn& fn) {
  if (D <= 32) fn(std::type_identity<Shapes<32>::Backward>{});
  else if (D <= 64) fn(std::type_identity<Shapes<64>::Backward>{});
  else if (D <= 128) with_shape_that_fits<Shapes<128>::Backward, Shapes<128>::SmallBackward>(shared_bytes, fn);
  else with_shape_that_fits<Shapes<256>::Backward, Shapes<256>::SmallBackward>(shared_bytes, fn);
}

// Whether the kernels can read or write the view as it is: rows at multiples of 16 bytes, D side by side.
bool is_aligned(const ConstView& view) {
  const auto size = static_cast<std::int64_t>(dtype_size(view.dtype));
  bool fits = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.strides[3] == 1;
  for (int d = 0; d < 3; ++d) fits = fits && (view.shape[d] == 1 || view.strides[d] * size % 16 == 0);
  return fits;
}

Operand operand(const ConstView& view) {
  return {const_cast<void*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}

// Stands in for a view that the kernels cannot read or write as it is: a dense copy.
class Aligned {
 public:
  explicit Aligned(const ConstView& input, const ExecContext& ctx) : view_(input) {
    if (is_aligned(input)) return;
    replace(input);
    copy({.source = input, .out = dense()}, ctx);
  }
  explicit Aligned(const MutView& output) : view_(output) {
    if (!is_aligned(output)) replace(output);
  }

  Operand operand() const { return sm80::operand(view_); }
  // Copies a replaced output to where it belongs.
  void finish(const MutView& output, const ExecContext& ctx) const {
    if (memory_.data() != nullptr) copy({.source = view_, .out = output}, ctx);
  }

 private:
  MutView dense() const { return {memory_.data(), view_.dtype, view_.device, view_.shape, view_.strides}; }
  void replace(const ConstView& view) {
    memory_ = Buffer(view.numel() * static_cast<std::int64_t>(dtype_size(view.dtype)), view.device);
    view_ = {memory_.data(), view.dtype, view.device, view.shape, contiguous_strides(view.shape)};
  }

  Buffer memory_;
  ConstView view_;
};

template <typename Args>
Sequences sequences(const Args& args) {
  if (!args.cu_seqlens_q.defined())
    return {.cu_seqlens_q = nullptr, .cu_seqlens_k = nullptr, .count = static_cast<int>(args.q.shape[0]),
            .longest_q = static_cast<int>(args.q.shape[1]), .longest_k = static_cast<int>(args.k.shape[1])};
  return {.cu_seqlens_q = args.cu_seqlens_q.template as<std::int32_t>(), .cu_seqlens_k = args.cu_seqlens_k.template as<std::int32_t>(),
          .count = static_cast<int>(args.cu_seqlens_q.shape[0] - 1), .longest_q = static_cast<int>(args.max_seqlen_q),
          .longest_k = static_cast<int>(args.max_seqlen_k)};
}

// How many heads of `head_bytes` each make a section. `blocks` start in all, for `heads` heads.
int section_heads(std::int64_t head_bytes, std::int64_t heads, std::int64_t blocks, bool is_causal, const ExecContext& ctx) {
  if (is_causal && blocks <= kFewBlocks * device_info(ctx.device.index).multiprocessors) return static_cast<int>(heads);
  return static_cast<int>(std::clamp<std::int64_t>(kSectionBytes / std::max<std::int64_t>(head_bytes, 1), 1, heads));
}

// The backward's workspace: where its parts start, and its bytes.
struct BackwardWorkspace {
  PaddedRows rows;
  int columns = 0;
  std::int64_t lse_log2 = 0, delta = 0, turns = 0, bytes = 0;

  BackwardWorkspace(const PaddedRows& padded, std::int64_t heads, std::int64_t D, bool is_deterministic) : rows(padded) {
    with_backward_shape(D, 0, [&]<typename S>(std::type_identity<S>) { columns = std::max(S::kHead, kDqBlock); });
    const std::int64_t row_bytes = heads * rows.total_rows * 4;
    lse_log2 = row_bytes * columns;
    delta = lse_log2 + row_bytes;
    turns = delta + row_bytes;
    bytes = turns + (is_deterministic ? row_bytes / kSmallestTile : 0);
  }
};

// The main kernel: dk, dv and the sums of dq.
void sum_gradients(const AttentionBackwardArgs& args, const Sequences& all, const BackwardWorkspace& workspace, std::uint8_t* memory,
                   const ExecContext& ctx) {
  const Aligned q(args.q, ctx), k(args.k, ctx), v(args.v, ctx), dout(args.dout, ctx), dk(args.dk), dv(args.dv);
  const std::int64_t Hq = args.q.shape[2], Hkv = args.k.shape[2], D = args.q.shape[3];
  const auto stream = static_cast<cudaStream_t>(ctx.stream);
  BackwardParams p = {};
  p.q = q.operand(), p.k = k.operand(), p.v = v.operand(), p.dout = dout.operand(), p.dk = dk.operand(), p.dv = dv.operand();
  p.lse_log2 = reinterpret_cast<float*>(memory + workspace.lse_log2);
  p.delta = reinterpret_cast<float*>(memory + workspace.delta);
  p.dq_sum = reinterpret_cast<float*>(memory);
  p.columns = workspace.columns;
  p.rows = workspace.rows;
  if (ctx.deterministic) {
    p.turns = reinterpret_cast<unsigned*>(memory + workspace.turns);
    HEDDLE_CUDA_CHECK(cudaMemsetAsync(p.turns, 0, static_cast<std::size_t>(workspace.bytes - workspace.turns), stream));
  }
  p.sequences = all;
  p.heads = static_cast<int>(Hq);
  p.group = static_cast<int>(Hq / Hkv);
  p.D = static_cast<int>(D);
  p.is_causal = args.is_causal;
  p.scale = static_cast<float>(args.scale);
  p.scale_log2 = static_cast<float>(args.scale * std::numbers::log2e);
  with_backward_shape(D, device_info(ctx.device.index).shared_bytes_per_block, [&]<typename S>(std::type_identity<S>) {
    const std::int64_t heads = Hkv * all.count, blocks = heads * tile_count(all.longest_k, S::kKeys);
    p.section_heads = section_heads(all.longest_q * D * 8 * p.group, heads, blocks, p.is_causal, ctx);
    backward_with<S>(p, args.q.dtype, stream);
  });
  dk.finish(args.dk, ctx);
  dv.finish(args.dv, ctx);
}

}  // namespace

AttentionSupport supports(const AttentionProblem& problem, AttentionPass) {
  if (!problem.device.is_cuda()) return {false, "it runs on CUDA devices"};
  const DeviceInfo& info = device_info(problem.device.index);
  if (info.capability < kCapability)
    return {false, concat_text("it needs compute capability 8.0, the device has ", info.capability / 10, ".", info.capability % 10)};
  if (problem.dtype == DType::f32) return {true, ""};
  if (problem.dtype != DType::bf16 && problem.dtype != DType::f16)
    return {false, concat_text("it takes float32, bfloat16 and float16, not ", problem.dtype)};
  if (problem.D % 8 != 0) return {false, concat_text("it takes head sizes that are multiples of 8, not ", problem.D)};
  return {true, ""};
}

std::int64_t workspace_bytes(const AttentionProblem& problem, AttentionPass pass) {
  if (pass == AttentionPass::forward) return 0;
  if (problem.dtype == DType::f32) return backward_workspace_bytes_f32(problem);
  const PaddedRows rows = problem.is_varlen ? PaddedRows::ragged(problem.B, problem.Sq, problem.Tq, nullptr, kDqBlock)
                                            : PaddedRows::dense(problem.B, problem.Sq, kDqBlock);
  return BackwardWorkspace(rows, problem.Hq, problem.D, problem.deterministic).bytes;
}

void forward(const AttentionForwardArgs& args, void*, const ExecContext& ctx) {
  if (args.q.dtype == DType::f32) return forward_f32(args, ctx);
  const Sequences all = sequences(args);
  if (args.q.numel() == 0 || all.count == 0 || all.longest_q == 0) return;
  const Aligned q(args.q, ctx), k(args.k, ctx), v(args.v, ctx), out(args.out);
  const std::int64_t Hq = args.q.shape[2], D = args.q.shape[3], group = Hq / args.k.shape[2];
  ForwardParams p = {};
  p.q = q.operand(), p.k = k.operand(), p.v = v.operand(), p.out = out.operand();
  p.lse = args.lse.as<float>();
  p.lse_batch = args.lse.strides[0], p.lse_head = args.lse.strides[1], p.lse_row = args.lse.strides[2];
  p.sequences = all;
  p.heads = static_cast<int>(Hq);
  p.group = static_cast<int>(group);
  p.D = static_cast<int>(D);
  p.is_causal = args.is_causal;
  p.scale = static_cast<float>(args.scale);
  p.scale_log2 = static_cast<float>(args.scale * std::numbers::log2e);
  with_forward_shape(D, [&]<typename S>(std::type_identity<S>) {
    const std::int64_t heads = Hq * all.count, blocks = heads * tile_count(all.longest_q, S::kRows);
    p.section_heads = section_heads(all.longest_k * D * 4 / group, heads, blocks, p.is_causal, ctx);
    forward_with<S>(p, args.q.dtype, static_cast<cudaStream_t>(ctx.stream));
  });
  out.finish(args.out, ctx);
}

void backward(const AttentionBackwardArgs& args, void* memory, const ExecContext& ctx) {
  if (args.q.dtype == DType::f32) return backward_f32(args, memory, ctx);
  const Sequences all = sequences(args);
  if (all.count == 0) return;
  const std::int64_t Hq = args.q.shape[2], D = args.q.shape[3];
  const PaddedRows rows = all.cu_seqlens_q == nullptr
                              ? PaddedRows::dense(all.count, all.longest_q, kDqBlock)
                              : PaddedRows::ragged(all.count, all.longest_q, args.q.shape[1], all.cu_seqlens_q, kDqBlock);
  const BackwardWorkspace workspace(rows, Hq, D, ctx.deterministic);
  const auto at = [&](std::int64_t offset) { return reinterpret_cast<float*>(static_cast<std::uint8_t*>(memory) + offset); };
  backward_prepare({.out = args.out, .dout = args.dout, .lse = args.lse, .dlse = args.dlse, .rows = rows,
                    .lse_log2 = at(workspace.lse_log2), .delta = at(workspace.delta), .dq_sum = at(0), .columns = workspace.columns},
                   ctx);
  if (args.k.numel() > 0 && all.longest_k > 0) sum_gradients(args, all, workspace, static_cast<std::uint8_t*>(memory), ctx);
  backward_finish({.dq_sum = at(0), .order = DqOrder::warpgroup_blocks, .rows = rows, .columns = workspace.columns, .scale = args.scale, .dq = args.dq}, ctx);
}

}  // namespace heddle::cuda::sm80
