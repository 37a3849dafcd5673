#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <tuple>

#include "kernels/attention/attention_cpu.h"
#if HEDDLE_WITH_CUDA
#include "kernels/attention/attention_sm80.h"
#include "kernels/attention/attention_sm90.h"
#include "kernels/attention/sequence_check.h"
#include "kernels/attention/sequence_tail.h"
#endif
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

constexpr AttentionVariant kVariants[] = {
#if HEDDLE_WITH_CUDA
    {"sm90", cuda::sm90::supports, cuda::sm90::workspace_bytes, cuda::sm90::forward, cuda::sm90::backward},
    {"sm80", cuda::sm80::supports, cuda::sm80::workspace_bytes, cuda::sm80::forward, cuda::sm80::backward},
#endif
    {"cpu", cpu::attention_supports, cpu::attention_workspace, cpu::attention_forward, cpu::attention_backward},
};

std::string_view pass_name(AttentionPass pass) { return pass == AttentionPass::forward ? "forward" : "backward"; }

// The calling thread's, like its contexts.
std::vector<AttentionChoice>& choices() {
  thread_local std::vector<AttentionChoice> list;
  return list;
}

void remember(const AttentionProblem& problem, AttentionPass pass, const AttentionVariant& variant) {
  const AttentionChoice choice{pass, variant.name, problem.device, problem.dtype, problem.Hq, problem.Hkv, problem.D,
                               problem.is_causal, problem.is_varlen, problem.deterministic};
  if (std::ranges::find(choices(), choice) == choices().end()) choices().push_back(choice);
}

// Where a message starts.
std::string_view op_name(AttentionPass pass) {
  return pass == AttentionPass::forward ? "attention" : "attention backward";
}

void check_same_kind(const ConstView& view, std::string_view name, const ConstView& q, DType dtype, std::string_view op) {
  HEDDLE_CHECK(view.dtype == dtype, op, ": ", name, " is ", view.dtype, ", expected ", dtype, "; cast it first");
  HEDDLE_CHECK(view.device == q.device, op, ": ", name, " is on ", view.device, ", q on ", q.device,
               "; move them to one device");
}

void check_shape(const ConstView& view, std::string_view name, const Shape& expected, std::string_view op) {
  HEDDLE_CHECK(view.shape == expected, op, ": ", name, " is ", view.shape, ", expected ", expected);
}

// Kernels multiply by the scale, and by scale * log2(e), in the dtype of the sums; a product that is 0 or infinite there
// turns masked scores into NaN.
void check_scale(double scale, DType sums, std::string_view op) {
  HEDDLE_CHECK(std::isfinite(scale) && scale > 0, op, ": scale must be finite and greater than 0, got ", scale);
  const bool is_wide = sums == DType::f64;
  const double low = is_wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double high = (is_wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max()) / std::numbers::log2e;
  HEDDLE_CHECK(scale >= low && scale <= high, op, ": scale must be in [", low, ", ", high, "], what ", sums, " can hold, got ",
               scale);
}

DType lse_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

Shape lse_shape(const ConstView& q) { return {q.shape[0], q.shape[2], q.shape[1]}; }

// What 16-byte loads, stores and copies need of a view.
bool has_16_byte_rows(const ConstView& view) {
  const auto size = static_cast<std::int64_t>(dtype_size(view.dtype));
  bool fits = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (int d = 0; d < view.shape.rank() - 1; ++d) fits = fits && (view.shape[d] == 1 || view.strides[d] * size % 16 == 0);
  return fits;
}

// Checks the ends of the sequences against the rows of the tensor they cut.
void check_seqlens(const ConstView& cu_seqlens, char side, const ConstView& tensor, std::int64_t max_seqlen, std::string_view op) {
  const std::string name = concat_text("cu_seqlens_", side);
  check_same_kind(cu_seqlens, name, tensor, DType::i32, op);
  HEDDLE_CHECK(cu_seqlens.shape.rank() == 1 && cu_seqlens.shape[0] >= 1 && cu_seqlens.is_contiguous(), op, ": ", name,
               " must be a dense [n + 1] for n sequences, got ", cu_seqlens.shape, " with strides ", cu_seqlens.strides);
  HEDDLE_CHECK(tensor.shape[0] == 1, op, ": ", side, " is ", tensor.shape, "; with cu_seqlens its batch size must be 1");
  HEDDLE_CHECK(max_seqlen >= 0, op, ": max_seqlen_", side, " must be at least 0, got ", max_seqlen);
  if (!cu_seqlens.device.is_cpu()) return;
  const auto* ends = cu_seqlens.as<std::int32_t>();
  HEDDLE_CHECK(ends[0] == 0, op, ": ", name, " must start at 0, got ", ends[0]);
  for (std::int64_t i = 0; i + 1 < cu_seqlens.shape[0]; ++i) {
    HEDDLE_CHECK(ends[i] <= ends[i + 1], op, ": ", name, " decreases from ", ends[i], " to ", ends[i + 1], " at sequence ", i);
    HEDDLE_CHECK(ends[i + 1] - ends[i] <= max_seqlen, op, ": sequence ", i, " has ", ends[i + 1] - ends[i], " rows of ", side,
                 ", max_seqlen_", side, " is ", max_seqlen);
  }
  HEDDLE_CHECK(ends[cu_seqlens.shape[0] - 1] <= tensor.shape[1], op, ": ", name, " ends at ", ends[cu_seqlens.shape[0] - 1],
               ", ", side, " has ", tensor.shape[1], " rows");
}

template <typename Args>
void set_sequences(const Args& args, std::string_view op, AttentionProblem& problem) {
  if (!args.cu_seqlens_q.defined() && !args.cu_seqlens_k.defined()) return;
  HEDDLE_CHECK(args.cu_seqlens_q.defined() && args.cu_seqlens_k.defined(), op, ": cu_seqlens_",
               args.cu_seqlens_q.defined() ? 'k' : 'q', " is missing; give both or none");
  check_seqlens(args.cu_seqlens_q, 'q', args.q, args.max_seqlen_q, op);
  check_seqlens(args.cu_seqlens_k, 'k', args.k, args.max_seqlen_k, op);
  HEDDLE_CHECK(args.cu_seqlens_q.shape == args.cu_seqlens_k.shape, op, ": cu_seqlens_k is ", args.cu_seqlens_k.shape,
               ", cu_seqlens_q is ", args.cu_seqlens_q.shape, "; they must be equal");
  problem.is_varlen = true;
  problem.B = args.cu_seqlens_q.shape[0] - 1;
  problem.Tq = problem.Sq, problem.Tk = problem.Sk;
  problem.Sq = args.max_seqlen_q, problem.Sk = args.max_seqlen_k;
}

// Checks q, k, v and the sequences against each other.
template <typename Args>
AttentionProblem checked_problem(const Args& args, const ExecContext& ctx, std::string_view op) {
  const auto& [q, k, v] = std::tie(args.q, args.k, args.v);
  const std::pair<std::string_view, const ConstView&> inputs[] = {{"q", q}, {"k", k}, {"v", v}};
  HEDDLE_CHECK(is_floating(q.dtype), op, ": needs a floating-point dtype, got ", q.dtype, "; cast it first");
  for (const auto& [name, view] : inputs) {
    HEDDLE_CHECK(view.shape.rank() == 4, op, ": ", name, " must be [B, S, H, D], got ", view.shape);
    check_same_kind(view, name, q, q.dtype, op);
  }
  AttentionProblem problem{.B = q.shape[0], .Sq = q.shape[1], .Sk = k.shape[1], .Hq = q.shape[2], .Hkv = k.shape[2],
                           .D = q.shape[3], .dtype = q.dtype, .is_causal = args.is_causal,
                           .scale = args.scale, .deterministic = ctx.deterministic, .device = q.device};
  HEDDLE_CHECK(problem.D >= 1 && problem.D <= kAttentionMaxHeadSize, op, ": head size must be in [1, ",
               kAttentionMaxHeadSize, "], got ", problem.D);
  HEDDLE_CHECK(k.shape[0] == problem.B && k.shape[3] == problem.D, op, ": k is ", k.shape, ", q is ", q.shape,
               "; batch and head size must be equal");
  HEDDLE_CHECK(v.shape == k.shape, op, ": v is ", v.shape, ", k is ", k.shape, "; they must be equal");
  HEDDLE_CHECK(problem.Hkv >= 1 && problem.Hq >= 1 && problem.Hq % problem.Hkv == 0, op, ": k has ", problem.Hkv,
               " heads, q has ", problem.Hq, "; q heads must be a multiple of k heads");
  for (const auto& [name, view] : inputs)
    HEDDLE_CHECK(view.strides[3] == 1 || problem.D == 1 || view.numel() == 0, op, ": ", name, " has stride ",
                 view.strides[3], " in its last dimension, it must be 1; make it contiguous");
  check_scale(args.scale, lse_dtype(q.dtype), op);
  set_sequences(args, op, problem);
  return problem;
}

}  // namespace

std::span<const AttentionVariant> attention_variants() { return kVariants; }

const AttentionVariant& select_attention(const AttentionProblem& problem, AttentionPass pass, std::string_view wanted) {
  std::string reasons;
  for (const AttentionVariant& variant : kVariants) {
    if (wanted != "auto" && wanted != variant.name) continue;
    const AttentionSupport support = variant.supports(problem, pass);
    if (support.ok) return variant;
    HEDDLE_CHECK(wanted == "auto", "attention: kernel '", wanted, "' cannot run this ", pass_name(pass), ": ", support.reason);
    reasons += concat_text(reasons.empty() ? "" : "; ", variant.name, ": ", support.reason);
  }
  if (wanted != "auto") {
    std::string names = "auto";
    for (const AttentionVariant& variant : kVariants) names += concat_text(", ", variant.name);
    throw ConfigError(concat_text("attention: there is no kernel '", wanted, "'; choose one of ", names));
  }
  throw Error(concat_text("attention: no kernel can run this ", pass_name(pass), ": ", reasons));
}

std::ostream& operator<<(std::ostream& out, const AttentionChoice& choice) {
  return out << "attention " << pass_name(choice.pass) << ": " << choice.variant << " on " << choice.device << " (" << choice.dtype
             << ", " << choice.Hq << " query and " << choice.Hkv << " key heads of size " << choice.D
             << (choice.is_causal ? ", causal" : "") << (choice.is_varlen ? ", sequences end to end" : "")
             << (choice.deterministic ? ", deterministic" : "") << ')';
}

const std::vector<AttentionChoice>& attention_choices() { return choices(); }
void forget_attention_choices() { choices().clear(); }

void attention_forward(const AttentionForwardArgs& args, std::string_view wanted, const ExecContext& ctx) {
  constexpr auto kPass = AttentionPass::forward;
  const std::string_view op = op_name(kPass);
  AttentionProblem problem = checked_problem(args, ctx, op);
  for (const ConstView& view : {args.q, args.k, args.v, ConstView(args.out)})
    problem.has_16_byte_rows = problem.has_16_byte_rows && has_16_byte_rows(view);
  check_same_kind(args.out, "out", args.q, args.q.dtype, op);
  check_same_kind(args.lse, "lse", args.q, lse_dtype(args.q.dtype), op);
  check_shape(args.out, "out", args.q.shape, op);
  check_shape(args.lse, "lse", lse_shape(args.q), op);
  const AttentionVariant& variant = select_attention(problem, kPass, wanted);
  remember(problem, kPass, variant);
  const Buffer workspace(variant.workspace_bytes(problem, kPass), problem.device);
  make_current(ctx);
  variant.forward(args, workspace.data(), ctx);
#if HEDDLE_WITH_CUDA
  if (problem.is_varlen && problem.device.is_cuda()) {
    cuda::check_sequences(args, ctx);
    cuda::fill_tail(args.out, 1, args.cu_seqlens_q, 0.0, ctx);
    cuda::fill_tail(args.lse, 2, args.cu_seqlens_q, -std::numeric_limits<double>::infinity(), ctx);
  }
#endif
}

void attention_backward(const AttentionBackwardArgs& args, std::string_view wanted, const ExecContext& ctx) {
  constexpr auto kPass = AttentionPass::backward;
  const std::string_view op = op_name(kPass);
  AttentionProblem problem = checked_problem(args, ctx, op);
  for (const ConstView& view : {args.q, args.k, args.v, ConstView(args.dk), ConstView(args.dv)})
    problem.has_16_byte_rows = problem.has_16_byte_rows && has_16_byte_rows(view);
  const std::pair<std::string_view, ConstView> like_q[] = {{"out", args.out}, {"dout", args.dout}, {"dq", args.dq}};
  const std::pair<std::string_view, ConstView> like_k[] = {{"dk", args.dk}, {"dv", args.dv}};
  for (const auto& [name, view] : like_q) {
    check_same_kind(view, name, args.q, args.q.dtype, op);
    check_shape(view, name, args.q.shape, op);
  }
  for (const auto& [name, view] : like_k) {
    check_same_kind(view, name, args.q, args.q.dtype, op);
    check_shape(view, name, args.k.shape, op);
  }
  const std::pair<std::string_view, const ConstView&> rows[] = {{"lse", args.lse}, {"dlse", args.dlse}};
  for (const auto& [name, view] : rows) {
    if (name == "dlse" && !view.defined()) continue;
    check_same_kind(view, name, args.q, lse_dtype(args.q.dtype), op);
    check_shape(view, name, lse_shape(args.q), op);
  }
  const AttentionVariant& variant = select_attention(problem, kPass, wanted);
  remember(problem, kPass, variant);
  const Buffer workspace(variant.workspace_bytes(problem, kPass), problem.device);
  make_current(ctx);
  variant.backward(args, workspace.data(), ctx);
#if HEDDLE_WITH_CUDA
  if (problem.is_varlen && problem.device.is_cuda()) {
    cuda::fill_tail(args.dq, 1, args.cu_seqlens_q, 0.0, ctx);
    cuda::fill_tail(args.dk, 1, args.cu_seqlens_k, 0.0, ctx);
    cuda::fill_tail(args.dv, 1, args.cu_seqlens_k, 0.0, ctx);
  }
#endif
}

}  // namespace heddle
