#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/ops.h"
#include "kernels/attention/attention.h"
#include "tests/support/attention_run.h"
#include "tests/support/devices.h"

// Runs the attention kernels on tensors of any device, with NaN around all of them.
namespace heddle::test {

// A tensor inside memory that is NaN wherever the tensor is not.
struct Guarded {
  Tensor whole, part;

  // Whether everything outside the tensor still is NaN.
  bool is_intact() const {
    const Tensor host = whole.device().is_cpu() ? whole.clone() : whole.to(kCpu);
    host.alias(part.shape(), part.strides(), part.storage_offset()).fill_(std::numeric_limits<double>::quiet_NaN());
    return dispatch_float(host.dtype(), "is_intact", [&]<typename T>(std::type_identity<T>) {
      const T* values = host.view().as<T>();
      return std::all_of(values, values + host.numel(), [](T value) { return std::isnan(static_cast<double>(value)); });
    });
  }
};

enum class Gaps { none, aligned, odd };

// Where a tensor lies: its order in memory, and what is between its rows. `aligned` leaves one row, head and sequence of NaN
// after each, at multiples of 16 bytes; `odd` is the same at odd offsets; `none` is dense. Bands of kGuard elements lie at both ends.
struct Layout {
  MemoryOrder order = kRows;
  Gaps gaps = Gaps::aligned;
};

inline constexpr std::int64_t kGuard = 512;

inline Guarded guarded(const Shape& shape, DType dtype, Device device, const Layout& layout = {}) {
  const int rank = shape.rank();
  Shape strides = Shape::filled(rank, 0);
  std::int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    const int dim = rank == 4 ? layout.order[i] : i;
    strides[dim] = stride;
    const bool is_row = i == rank - 1;
    const std::int64_t gap = layout.gaps == Gaps::none ? 0 : !is_row ? 1 : layout.gaps == Gaps::odd ? 3 : 16 - shape[dim] % 8;
    stride *= shape[dim] + gap;
  }
  const std::int64_t start = kGuard + (layout.gaps == Gaps::odd ? 1 : 0);
  const Tensor whole = Tensor::full({stride + 2 * kGuard}, std::numeric_limits<double>::quiet_NaN(), dtype, device);
  return {whole, whole.alias(shape, strides, start)};
}

inline Guarded guarded(const Tensor& values, DType dtype, Device device, const Layout& layout = {}) {
  const Guarded out = guarded(values.shape(), dtype, device, layout);
  out.part.copy_(values);
  return out;
}

// What a forward and a backward take and give; q, k, v, dout and dlse are float64 on the host and hold values of the tested type.
struct AttentionValues {
  Tensor q, k, v, dout, dlse;
};
struct AttentionOutputs {
  Tensor out, lse, dq, dk, dv;  // float64 on the host
};

// Standard normal values that `dtype` holds. Those for 16 bits fit both bfloat16 and float16.
inline Tensor held_values(const Shape& shape, DType dtype, std::uint64_t seed) {
  Generator generator{.seed = seed};
  const Tensor values = normal(shape, 0, 1, generator, DType::f64);
  const Tensor rounded = dtype == DType::f32 ? cast(values, DType::f32) : cast(cast(values, DType::f16), DType::bf16);
  return cast(rounded, DType::f64);
}

inline AttentionValues held_inputs(const AttentionSizes& s, DType dtype, std::uint64_t seed) {
  const Shape like_q{s.B, s.Sq, s.Hq, s.D}, like_k{s.B, s.Sk, s.Hkv, s.D};
  return {held_values(like_q, dtype, seed), held_values(like_k, dtype, seed + 1), held_values(like_k, dtype, seed + 2),
          held_values(like_q, dtype, seed + 3), held_values({s.B, s.Hq, s.Sq}, DType::f32, seed + 4)};
}

struct AttentionLayouts {
  Layout q, k, v, out, dout, dq, dk, dv;
};

inline AttentionLayouts all_of(const Layout& layout) { return {layout, layout, layout, layout, layout, layout, layout, layout}; }

// The saved state of a forward. `refusal` says why the variant did not run.
struct Forward {
  std::string refusal;
  Guarded out, lse;
};
struct Backward {
  std::string refusal;
  Guarded dq, dk, dv;
};

// Calls run(). Returns the message if the variant refused the problem, which only its supports() can do; throws any other error.
template <typename Fn>
std::string refusal_of(std::string_view variant, const Fn& run) {
  try {
    run();
    return "";
  } catch (const Error& error) {
    if (std::string_view(error.what()).starts_with(concat_text("attention: kernel '", variant, "' cannot run this "))) return error.what();
    throw;
  }
}

// Where sequences of different lengths end in packed tensors, as the arguments of the kernels have it.
struct Sequences {
  std::vector<std::int32_t> q, k;  // cu_seqlens, [n + 1]
  std::int64_t max_q = 0, max_k = 0;
};

// One problem's tensors in a dtype on a device.
struct AttentionTensors {
  AttentionSizes sizes;
  AttentionLayouts layouts;
  Guarded q, k, v, dout, dlse;
  Tensor cu_seqlens_q, cu_seqlens_k;
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;

  AttentionTensors(const AttentionSizes& sizes_of, const AttentionValues& values, DType dtype, Device device,
                   const AttentionLayouts& at = {})
      : sizes(sizes_of), layouts(at), q(guarded(values.q, dtype, device, at.q)), k(guarded(values.k, dtype, device, at.k)),
        v(guarded(values.v, dtype, device, at.v)), dout(guarded(values.dout, dtype, device, at.dout)) {
    const DType wide = dtype == DType::f64 ? dtype : DType::f32;
    if (values.dlse.defined()) dlse = guarded(values.dlse, wide, device, {.gaps = at.q.gaps});
  }

  void set_sequences(const Sequences& sequences) {
    const auto placed = [&](const std::vector<std::int32_t>& ends) {
      return Tensor::from_vector(ends, {static_cast<std::int64_t>(ends.size())}, device());
    };
    cu_seqlens_q = placed(sequences.q), cu_seqlens_k = placed(sequences.k);
    max_seqlen_q = sequences.max_q, max_seqlen_k = sequences.max_k;
  }

  DType dtype() const { return q.part.dtype(); }
  DType lse_dtype() const { return dtype() == DType::f64 ? DType::f64 : DType::f32; }
  Device device() const { return q.part.device(); }

  Forward forward(std::string_view variant) const {
    Forward f{"", guarded(q.part.shape(), dtype(), device(), layouts.out),
              guarded({sizes.B, sizes.Hq, sizes.Sq}, lse_dtype(), device(), {.gaps = layouts.q.gaps})};
    const AttentionForwardArgs args{.q = q.part.view(), .k = k.part.view(), .v = v.part.view(), .out = f.out.part.mutable_view(),
                                    .lse = f.lse.part.mutable_view(), .is_causal = sizes.is_causal, .scale = sizes.scale,
                                    .cu_seqlens_q = optional(cu_seqlens_q), .cu_seqlens_k = optional(cu_seqlens_k),
                                    .max_seqlen_q = max_seqlen_q, .max_seqlen_k = max_seqlen_k};
    f.refusal = refusal_of(variant, [&] { attention_forward(args, variant, device_context(device())); });
    return f;
  }

  Backward backward(std::string_view variant, const Forward& saved) const {
    Backward b{"", guarded(q.part.shape(), dtype(), device(), layouts.dq), guarded(k.part.shape(), dtype(), device(), layouts.dk),
               guarded(k.part.shape(), dtype(), device(), layouts.dv)};
    const AttentionBackwardArgs args{.q = q.part.view(), .k = k.part.view(), .v = v.part.view(), .out = saved.out.part.view(),
                                     .lse = saved.lse.part.view(), .dout = dout.part.view(),
                                     .dlse = optional(dlse.part), .dq = b.dq.part.mutable_view(), .dk = b.dk.part.mutable_view(),
                                     .dv = b.dv.part.mutable_view(), .is_causal = sizes.is_causal, .scale = sizes.scale,
                                     .cu_seqlens_q = optional(cu_seqlens_q), .cu_seqlens_k = optional(cu_seqlens_k),
                                     .max_seqlen_q = max_seqlen_q, .max_seqlen_k = max_seqlen_k};
    b.refusal = refusal_of(variant, [&] { attention_backward(args, variant, device_context(device())); });
    return b;
  }

 private:
  static ConstView optional(const Tensor& x) { return x.defined() ? x.view() : ConstView{}; }
};

// The CPU variant in float64.
inline AttentionOutputs exact_attention(const AttentionSizes& sizes, const AttentionValues& values) {
  const AttentionTensors tensors(sizes, values, DType::f64, kCpu, all_of({.gaps = Gaps::none}));
  const Forward forward = tensors.forward("cpu");
  const Backward backward = tensors.backward("cpu", forward);
  return {forward.out.part, forward.lse.part, backward.dq.part, backward.dk.part, backward.dv.part};
}

struct NaiveAttention : AttentionOutputs {
  double most_seen;  // the largest sum of one key's probabilities over the queries of its heads
};

// Attention with its score matrices in memory, on `device`, in the arithmetic that a tensor-core kernel has: float32 products and
// sums; probabilities, their gradients and results rounded to `dtype`. Its error is the measure of what a kernel's may be.
inline NaiveAttention naive_attention(const AttentionSizes& s, const AttentionValues& values, DType dtype, Device device) {
  const std::int64_t group = s.Hq / s.Hkv;
  const auto rounded = [&](const Tensor& x) { return cast(cast(x, dtype), DType::f32); };
  const auto heads_first = [&](const Tensor& x) { return contiguous(permute(cast(x, DType::f32).to(device), {0, 2, 1, 3})); };
  const auto per_query_head = [&](const Tensor& x) {
    return reshape(contiguous(expand(unsqueeze(heads_first(x), 2), {s.B, s.Hkv, group, s.Sk, s.D})), {s.B, s.Hq, s.Sk, s.D});
  };
  const Tensor q = heads_first(values.q), k = per_query_head(values.k), v = per_query_head(values.v), dout = heads_first(values.dout);
  const Tensor hidden = Tensor::empty({s.Sq, s.Sk}, DType::boolean);
  bool* is_hidden = hidden.mutable_view().as<bool>();
  for (std::int64_t i = 0; i < s.Sq; ++i)
    for (std::int64_t j = 0; j < s.Sk; ++j) is_hidden[i * s.Sk + j] = s.is_causal && j > i + s.Sk - s.Sq;
  const Tensor mask = hidden.to(device);

  // A finite stand-in for -inf: rows without keys come out as NaN otherwise, and are set to 0 below.
  const Tensor scores = masked_fill(scale(matmul(q, transpose(k, 2, 3)), s.scale), mask, -1e30);
  const Tensor top = max(scores, 3, /*keepdim=*/true);
  const Tensor weights = masked_fill(exp(sub(scores, top)), mask, 0), total = sum(weights, {3}, /*keepdim=*/true);
  const Tensor p = masked_fill(div(weights, total), mask, 0);
  const Tensor out = rounded(matmul(rounded(p), v));
  Tensor delta = sum(mul(dout, out), {3}, /*keepdim=*/true);
  if (values.dlse.defined()) delta = sub(delta, unsqueeze(cast(values.dlse, DType::f32).to(device), 3));
  const Tensor ds = rounded(mul(p, sub(matmul(dout, transpose(v, 2, 3)), delta)));
  const auto over_group = [&](const Tensor& x) { return sum(reshape(x, {s.B, s.Hkv, group, s.Sk, s.D}), {2}); };
  const auto on_host = [](const Tensor& x) { return cast(x.to(kCpu), DType::f64); };
  const auto finished = [&](const Tensor& x) { return on_host(permute(rounded(x), {0, 2, 1, 3})); };
  const Tensor dk = over_group(scale(matmul(transpose(ds, 2, 3), q), s.scale)), dv = over_group(matmul(transpose(rounded(p), 2, 3), dout));
  const Tensor seen = sum(reshape(sum(p, {2}), {s.B, s.Hkv, group, s.Sk}), {2});
  const Tensor lse = squeeze(add(top, log(total)), 3), dq = scale(matmul(ds, k), s.scale);
  NaiveAttention result{{finished(out), on_host(lse), finished(dq), finished(dk), finished(dv)}, 0};
  for (double value : seen.to_doubles()) result.most_seen = std::max(result.most_seen, value);
  return result;
}

}  // namespace heddle::test
