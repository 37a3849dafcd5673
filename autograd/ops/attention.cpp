#include "kernels/attention/attention.h"

#include <cmath>

#include "autograd/node.h"
#include "autograd/ops.h"
#include "autograd/ops/joined.h"

namespace heddle {
namespace {

ConstView view_or_none(const Tensor& tensor) { return tensor.defined() ? tensor.view() : ConstView{}; }

// Saves the inputs, the output and one number a row; the probabilities are computed again from them.
struct AttentionNode final : Node {
  AttentionNode(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionResult& result,
                const AttentionOptions& options, double scale)
      : Node("attention"), is_causal_(options.is_causal), scale_(scale), max_seqlen_q_(options.max_seqlen_q),
        max_seqlen_k_(options.max_seqlen_k), kernel_(options.kernel) {
    save("q", q);
    save("k", k);
    save("v", v);
    save("out", result.out);
    save("lse", result.lse);
    save("cu_seqlens_q", options.cu_seqlens_q);
    save("cu_seqlens_k", options.cu_seqlens_k);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor q = saved(0), k = saved(1), v = saved(2), out = saved(3), lse = saved(4);
    const Tensor cu_seqlens_q = saved(5), cu_seqlens_k = saved(6);
    const Tensor dout = grads[0].defined() ? grads[0] : Tensor::zeros(out.shape(), out.dtype(), out.device());
    const std::vector<Tensor> dqkv = empty_like_heads({q, k, v});
    const Tensor &dq = dqkv[0], &dk = dqkv[1], &dv = dqkv[2];
    attention_backward({.q = q.view(),
                        .k = k.view(),
                        .v = v.view(),
                        .out = out.view(),
                        .lse = lse.view(),
                        .dout = dout.view(),
                        .dlse = view_or_none(grads[1]),
                        .dq = dq.mutable_view(),
                        .dk = dk.mutable_view(),
                        .dv = dv.mutable_view(),
                        .is_causal = is_causal_,
                        .scale = scale_,
                        .cu_seqlens_q = view_or_none(cu_seqlens_q),
                        .cu_seqlens_k = view_or_none(cu_seqlens_k),
                        .max_seqlen_q = max_seqlen_q_,
                        .max_seqlen_k = max_seqlen_k_},
                       kernel_, device_context(q.device()));
    return {dq, dk, dv};
  }

 private:
  bool is_causal_;
  double scale_;
  std::int64_t max_seqlen_q_, max_seqlen_k_;
  std::string kernel_;
};

}  // namespace

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  HEDDLE_CHECK(q.rank() == 4, "attention: q must be [B, Sq, Hq, D], got ", q.shape());
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  const DType wide = q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const AttentionResult result = {Tensor::empty(q.shape(), q.dtype(), q.device()),
                                  Tensor::empty({q.size(0), q.size(2), q.size(1)}, wide, q.device())};
  attention_forward({.q = q.view(),
                     .k = k.view(),
                     .v = v.view(),
                     .out = result.out.mutable_view(),
                     .lse = result.lse.mutable_view(),
                     .is_causal = options.is_causal,
                     .scale = scale,
                     .cu_seqlens_q = view_or_none(options.cu_seqlens_q),
                     .cu_seqlens_k = view_or_none(options.cu_seqlens_k),
                     .max_seqlen_q = options.max_seqlen_q,
                     .max_seqlen_k = options.max_seqlen_k},
                    options.kernel, device_context(q.device()));
  const std::vector<Tensor> inputs = {q, k, v};
  if (needs_grad(inputs))
    record({result.out, result.lse}, std::make_shared<AttentionNode>(q, k, v, result, options, scale), inputs);
  return result;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  return attention_with_lse(q, k, v, options).out;
}

}  // namespace heddle
