#include "examples/attention_check.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "autograd/ops.h"

namespace heddle::examples {
namespace {

constexpr std::int64_t kBlock = 64;
constexpr double kFloat32Error = 0x1p-17;

double unit_roundoff(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : dtype == DType::f32 ? 0x1p-24 : 0x1p-53;
}

// One batch entry and one group of heads, on the host, in the dtype of the reference.
class Part {
 public:
  Part(const AttentionTensors& all, std::int64_t batch, std::int64_t kv_head) : scale_(all.scale), is_causal_(all.is_causal) {
    const std::int64_t group = all.q.size(2) / all.k.size(2);
    const DType dtype = all.q.dtype() == DType::f32 || all.q.dtype() == DType::f64 ? DType::f64 : DType::f32;
    const auto take = [&](const Tensor& x, int head_dim, std::int64_t heads) {
      const Tensor part = slice(slice(x, 0, batch, batch + 1), head_dim, kv_head * heads, (kv_head + 1) * heads);
      return cast(part.to(kCpu), dtype);
    };
    q = take(all.q, 2, group), k = take(all.k, 2, 1), v = take(all.v, 2, 1), out = take(all.out, 2, group);
    lse = take(all.lse, 1, group), dout = take(all.dout, 2, group);
    dq = take(all.dq, 2, group), dk = take(all.dk, 2, 1), dv = take(all.dv, 2, 1);
  }

  // out and lse of query rows [first, last).
  std::pair<Tensor, Tensor> forward(std::int64_t first, std::int64_t last) const {
    const std::int64_t keys = is_causal_ ? last : k.size(1);
    const Tensor rows = slice(q, 1, first, last), o = Tensor::empty(rows.shape(), q.dtype());
    const Tensor l = Tensor::empty({1, q.size(2), last - first}, q.dtype());
    attention_forward({.q = rows.view(), .k = slice(k, 1, 0, keys).view(), .v = slice(v, 1, 0, keys).view(), .out = o.mutable_view(),
                       .lse = l.mutable_view(), .is_causal = is_causal_, .scale = scale_}, "cpu", device_context(kCpu));
    return {o, l};
  }

  // dq of query rows [first, last).
  Tensor query_gradient(std::int64_t first, std::int64_t last) const {
    return backward(first, last, 0, is_causal_ ? last : k.size(1), is_causal_)[0];
  }

  // dk and dv of key rows [first, last). Under a causal mask the queries of the diagonal block come first, then those that see all of it.
  std::pair<Tensor, Tensor> key_gradients(std::int64_t first, std::int64_t last) const {
    if (!is_causal_) {
      const std::vector<Tensor> all = backward(0, q.size(1), first, last, false);
      return {all[1], all[2]};
    }
    const std::vector<Tensor> diagonal = backward(first, last, first, last, true);
    const std::vector<Tensor> rest = backward(last, q.size(1), first, last, false);
    return {add(diagonal[1], rest[1]), add(diagonal[2], rest[2])};
  }

  Tensor q, k, v, out, lse, dout, dq, dk, dv;

 private:
  // dq, dk, dv of a rectangle of the score matrix: the saved lse makes the probabilities of any part exact.
  std::vector<Tensor> backward(std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1, bool is_causal) const {
    const auto queries = [&](const Tensor& x) { return slice(x, 1, q0, q1); };
    const Tensor keys = slice(k, 1, k0, k1), values = slice(v, 1, k0, k1);
    const auto empty_like = [](const Tensor& x) { return Tensor::empty(x.shape(), x.dtype()); };
    const Tensor gq = empty_like(queries(q)), gk = empty_like(keys), gv = empty_like(keys);
    attention_backward({.q = queries(q).view(), .k = keys.view(), .v = values.view(), .out = queries(out).view(),
                        .lse = slice(lse, 2, q0, q1).view(), .dout = queries(dout).view(), .dq = gq.mutable_view(),
                        .dk = gk.mutable_view(), .dv = gv.mutable_view(), .is_causal = is_causal, .scale = scale_},
                       "cpu", device_context(kCpu));
    return {gq, gk, gv};
  }

  double scale_;
  bool is_causal_;
};

double relative_error(const Tensor& got, const Tensor& expected) {
  const std::vector<double> a = got.to_doubles(), b = expected.to_doubles();
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
  return difference == 0 ? 0 : std::sqrt(difference / size);
}

}  // namespace

AttentionForwardArgs AttentionTensors::forward_args() const {
  return {.q = q.view(), .k = k.view(), .v = v.view(), .out = out.mutable_view(), .lse = lse.mutable_view(), .is_causal = is_causal,
          .scale = scale};
}

AttentionBackwardArgs AttentionTensors::backward_args() const {
  return {.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = lse.view(), .dout = dout.view(),
          .dq = dq.mutable_view(), .dk = dk.mutable_view(), .dv = dv.mutable_view(), .is_causal = is_causal, .scale = scale};
}

std::string attention_fault(const AttentionTensors& tensors, AttentionPass pass) {
  const std::int64_t S = tensors.q.size(1), block = std::min(kBlock, S);
  const double bound = 4 * unit_roundoff(tensors.q.dtype()) + kFloat32Error;
  std::string fault;
  const auto check = [&](const char* name, const Tensor& got, int dim, std::int64_t first, const Tensor& expected, double limit) {
    const double error = relative_error(slice(got, dim, first, first + block), expected);
    if (fault.empty() && !(error <= limit))
      fault = concat_text(name, " of rows ", first, " to ", first + block, " is off by a relative ", error, ", more than ", limit);
  };
  for (const auto& [batch, head] : {std::pair<std::int64_t, std::int64_t>{0, 0}, {tensors.q.size(0) - 1, tensors.k.size(2) - 1}}) {
    const Part part(tensors, batch, head);
    for (const std::int64_t first : {std::int64_t{0}, (S - block) / 2, S - block}) {
      if (pass == AttentionPass::forward) {
        const auto [out, lse] = part.forward(first, first + block);
        check("out", part.out, 1, first, out, bound);
        check("lse", part.lse, 2, first, lse, kFloat32Error);
      } else {
        const auto [dk, dv] = part.key_gradients(first, first + block);
        check("dq", part.dq, 1, first, part.query_gradient(first, first + block), bound);
        check("dk", part.dk, 1, first, dk, bound);
        check("dv", part.dv, 1, first, dv, bound);
      }
    }
  }
  return fault;
}

}  // namespace heddle::examples
