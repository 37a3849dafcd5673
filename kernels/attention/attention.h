#pragma once

#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

namespace heddle {

// Scaled dot-product attention: out = softmax(scale * q k^T + mask) v for every batch and head.
//   q      [B, Sq, Hq, D]   float32, bfloat16, float16 or float64; 1 <= D <= 256; any batch, row and head strides,
//                           unit stride on D
//   k, v   [B, Sk, Hkv, D]  dtype of q; Hq is a multiple of Hkv; query head h reads key head h / (Hq / Hkv)
//   out    [B, Sq, Hq, D]   dtype of q, any strides; written (=)
//   lse    [B, Hq, Sq]      natural log of the sum of exp of the row's scaled scores; float32 (float64 for float64
//                           inputs), any strides; written (=)
//   scale  > 0; it and its product with log2(e) are finite and normal in the dtype of the sums
// A causal mask is aligned at the bottom right: query row i sees the keys j <= i + Sk - Sq. A row that sees no key gives
// out = 0 and lse = -inf. What a key or value holds never reaches a row that does not see it, NaN included.
// Scores, sums and outputs are accumulated in float32 (float64 for float64 inputs). Sq = 0 and Sk = 0 are legal.
// Dao 2023, "FlashAttention-2", algorithm 1.
//
// Note: Sequences of different lengths
// With cu_seqlens a batch of n sequences lies in one row of tensors, end to end: q and out are [1, Tq, Hq, D], k and v
// [1, Tk, Hkv, D], lse [1, Hq, Tq], and sequence i owns the query rows [cu_seqlens_q[i], cu_seqlens_q[i + 1]) and the keys
// [cu_seqlens_k[i], cu_seqlens_k[i + 1]). Every sequence gets what a call of its own would give it; none sees another.
//   cu_seqlens_q, cu_seqlens_k  [n + 1], int32, dense, on the device of q; both or none; they start at 0, never decrease
//                               and end within Tq and Tk. Sequences without queries, without keys or without both are legal
//   max_seqlen_q, max_seqlen_k  no sequence is longer; ignored without cu_seqlens
// Rows past the last sequence belong to nobody: out and gradients there are 0, lse is -inf, and what q, k, v and dout hold
// there reaches nothing.
// Throws heddle::Error if a value of cu_seqlens on the CPU breaks this. On a GPU, whose values the host never reads, it becomes a
// fault (device_cuda.h, Note: Faults).
struct AttentionForwardArgs {
  ConstView q;
  ConstView k;
  ConstView v;
  MutView out;
  MutView lse;
  bool is_causal = false;
  double scale = 1.0;
  ConstView cu_seqlens_q = {};
  ConstView cu_seqlens_k = {};
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
};

// Gradients of attention_forward with respect to q, k and v.
//   q, k, v, out, lse, is_causal, scale, cu_seqlens, max_seqlen  as the forward pass had and wrote them; any variant's
//               forward will do
//   dout        [B, Sq, Hq, D]   dtype of q; any strides, stride 0 and a strided last dimension included
//   dlse        [B, Hq, Sq]      dtype of lse, any strides; optional
//   dq, dk, dv  shapes and dtype of q, k, v, any strides; written (=)
// A row that sees no key has a zero gradient. With grouped heads dk and dv are sums over the group. What is not finite in a key or value
// reaches dq of no row that does not see it.
// Dao 2023, "FlashAttention-2", algorithm 2.
struct AttentionBackwardArgs {
  ConstView q;
  ConstView k;
  ConstView v;
  ConstView out;
  ConstView lse;
  ConstView dout;
  ConstView dlse = {};
  MutView dq;
  MutView dk;
  MutView dv;
  bool is_causal = false;
  double scale = 1.0;
  ConstView cu_seqlens_q = {};
  ConstView cu_seqlens_k = {};
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
};

// What decides which variant can run.
struct AttentionProblem {
  std::int64_t B = 0;   // with is_varlen: how many sequences
  std::int64_t Sq = 0;  // with is_varlen: max_seqlen_q
  std::int64_t Sk = 0;  // with is_varlen: max_seqlen_k
  std::int64_t Hq = 0;
  std::int64_t Hkv = 0;
  std::int64_t D = 0;
  DType dtype = DType::f32;
  bool is_causal = false;
  double scale = 1.0;
  bool deterministic = false;  // asks for the same bits in every run
  Device device = kCpu;
  // Addresses and strides of what the pass reads and writes with 16-byte accesses are multiples of 16 bytes: q, k, v, and out
  // in the forward or dk and dv in the backward.
  bool has_16_byte_rows = true;
  bool is_varlen = false;        // Note: Sequences of different lengths
  std::int64_t Tq = 0;           // with is_varlen: rows of q
  std::int64_t Tk = 0;           // with is_varlen: rows of k

  std::int64_t query_rows() const { return is_varlen ? Tq : B * Sq; }
  std::int64_t key_rows() const { return is_varlen ? Tk : B * Sk; }
};

inline constexpr std::int64_t kAttentionMaxHeadSize = 256;

enum class AttentionPass { forward, backward };

struct AttentionSupport {
  bool ok = false;
  std::string reason;  // why not, and what to do
};

// One implementation. A CUDA variant leaves rows past the last sequence alone: its caller clears them. Saved state is common to all: any variant's backward takes any variant's forward.
struct AttentionVariant {
  std::string_view name;
  AttentionSupport (*supports)(const AttentionProblem& problem, AttentionPass pass);
  std::int64_t (*workspace_bytes)(const AttentionProblem& problem, AttentionPass pass);
  void (*forward)(const AttentionForwardArgs& args, void* workspace, const ExecContext& ctx);
  void (*backward)(const AttentionBackwardArgs& args, void* workspace, const ExecContext& ctx);
};

// Every variant of this build, in order of preference.
std::span<const AttentionVariant> attention_variants();

// The variant that runs a pass. `wanted` is "auto" for the first that supports the problem, or a variant's name.
// Throws heddle::ConfigError for an unknown name, and heddle::Error for a named variant that cannot run it (with its reason)
// and when no variant can (with the reason of each).
const AttentionVariant& select_attention(const AttentionProblem& problem, AttentionPass pass, std::string_view wanted);

// Which variant ran a kind of problem. Lengths are not part of it: they change with every batch.
struct AttentionChoice {
  AttentionPass pass = AttentionPass::forward;
  std::string_view variant;
  Device device = kCpu;
  DType dtype = DType::f32;
  std::int64_t Hq = 0;
  std::int64_t Hkv = 0;
  std::int64_t D = 0;
  bool is_causal = false;
  bool is_varlen = false;
  bool deterministic = false;

  friend bool operator==(const AttentionChoice&, const AttentionChoice&) = default;
};

// "attention forward: sm90 on cuda:0 (bfloat16, 16 query and 8 key heads of size 64, causal)"
std::ostream& operator<<(std::ostream& out, const AttentionChoice& choice);

// What the calling thread's calls below have run on since the thread began or forgot: each choice once, the oldest first.
const std::vector<AttentionChoice>& attention_choices();
void forget_attention_choices();

// Both throw heddle::Error when a shape, dtype, device, stride or the scale breaks the contracts above.
void attention_forward(const AttentionForwardArgs& args, std::string_view wanted, const ExecContext& ctx);
void attention_backward(const AttentionBackwardArgs& args, std::string_view wanted, const ExecContext& ctx);

}  // namespace heddle
