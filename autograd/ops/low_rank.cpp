#include <algorithm>
#include <utility>

#include "autograd/ops.h"
#include "autograd/ops/joined.h"
#include "autograd/ops/linear_parts.h"
#include "kernels/gemm/gemm.h"

namespace heddle {
namespace {

// How the terms of one input share h = x A^T, which holds the products with all the different A side by side.
struct Inner {
  std::vector<std::size_t> block;    // of each term: which of the different A it has
  std::vector<std::size_t> owner;    // of each block: its first term
  std::vector<std::int64_t> start;   // of each block: its first column of h; and the end of the last
  std::vector<double> scales;        // of each term

  explicit Inner(const std::vector<LowRank>& terms) : start{0} {
    for (const LowRank& term : terms) {
      std::size_t at = 0;
      while (at < owner.size() && terms[owner[at]].a.impl_ptr() != term.a.impl_ptr()) ++at;
      if (at == owner.size()) {
        owner.push_back(block.size());
        start.push_back(width() + term.a.size(0));
      }
      block.push_back(at);
      scales.push_back(term.scale);
    }
  }

  std::int64_t width() const { return start.back(); }
  Tensor columns(const Tensor& h, std::size_t at) const { return slice(h, 1, start[at], start[at + 1]); }

  // Whether all terms are one: they share A and scale, and both B and their results (or the gradients of those, [rows, out] each) lie
  // side by side. Then `bs` and `parts` become those of the one.
  bool join(std::vector<Tensor>& bs, std::vector<Tensor>& parts) const {
    const bool is_shared = owner.size() == 1 && std::ranges::all_of(scales, [&](double scale) { return scale == scales[0]; });
    const Tensor b = is_shared ? joined_rows(bs) : Tensor(), part = is_shared ? joined_columns(parts) : Tensor();
    if (!b.defined() || !part.defined()) return false;
    bs = {b};
    parts = {part};
    return true;
  }
};

// Inputs x, the ys, the As, the Bs.
struct AddLowRankNode final : Node {
  AddLowRankNode(const Tensor& x, const std::vector<LowRank>& terms, const Inner& inner, const Tensor& h)
      : Node("add_low_rank"), x_shape_(x.shape()), inner_(inner), count_(terms.size()) {
    for (const std::size_t i : inner.owner) save("a", terms[i].a);
    for (const LowRank& term : terms) save("b", term.b);
    if (std::ranges::any_of(terms, [](const LowRank& term) { return term.a.requires_grad(); })) x_ = save("x", x);
    if (std::ranges::any_of(terms, [](const LowRank& term) { return term.b.requires_grad(); })) h_ = save("h", h);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    std::vector<Tensor> out(edges().size()), douts(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      if (!grads[i].defined()) continue;
      out[1 + i] = grads[i];
      douts[i] = as_rows(grads[i]);
      if (const std::size_t b = 1 + 2 * count_ + i; edges()[b])
        out[b] = linear_weight_gradient(edges()[b], inner_.columns(saved(h_), inner_.block[i]), douts[i], inner_.scales[i]);
    }
    if (!needs(0) && x_ < 0) return out;
    const Tensor dh = inner_gradient(douts);
    for (std::size_t at = 0; at < inner_.owner.size(); ++at)
      if (const std::size_t a = 1 + count_ + inner_.owner[at]; edges()[a])
        out[a] = linear_weight_gradient(edges()[a], as_rows(saved(x_)), inner_.columns(dh, at));
    if (needs(0)) out[0] = input_gradient(dh);
    return out;
  }

 private:
  // Of h: [rows, width].
  Tensor inner_gradient(std::vector<Tensor> douts) const {
    const auto is_there = [](const Tensor& dout) { return dout.defined(); };
    const Tensor some = *std::ranges::find_if(douts, is_there);
    const bool is_whole = std::ranges::all_of(douts, is_there);
    const Tensor dh = Tensor::empty({some.size(0), inner_.width()}, some.dtype(), some.device());
    if (!is_whole) dh.zero_();
    std::vector<Tensor> bs;
    for (std::size_t i = 0; i < count_; ++i) bs.push_back(saved(static_cast<int>(inner_.owner.size() + i)));
    if (is_whole) inner_.join(bs, douts);
    for (std::size_t i = 0; i < douts.size(); ++i) {
      if (!douts[i].defined()) continue;
      const std::size_t at = inner_.block[i];
      gemm({.a = douts[i].view(),
            .b = bs[i].view(),
            .c = inner_.columns(dh, at).mutable_view(),
            .write = is_whole && inner_.owner[at] == i ? Write::assign : Write::accumulate,
            .scale = inner_.scales[i]},
           device_context(dh.device()));
    }
    return dh;
  }

  Tensor input_gradient(const Tensor& dh) {
    std::vector<Tensor> as;
    for (std::size_t at = 0; at < inner_.owner.size(); ++at) as.push_back(saved(static_cast<int>(at)));
    Tensor dx = take_gradient_so_far(0);
    if (const Tensor all = joined_rows(as); all.defined()) return linear_input_gradient(dx, dh, all, x_shape_);
    for (std::size_t at = 0; at < as.size(); ++at) dx = linear_input_gradient(dx, inner_.columns(dh, at), as[at], x_shape_);
    return dx;
  }

  Shape x_shape_;
  Inner inner_;
  std::size_t count_;
  int x_ = -1, h_ = -1;
};

// h [rows, width] of x [rows, in].
Tensor inner_rows(const Tensor& x, const std::vector<LowRank>& terms, const Inner& inner) {
  std::vector<Tensor> as;
  for (const std::size_t i : inner.owner) as.push_back(terms[i].a.detach());
  if (const Tensor all = joined_rows(as); all.defined()) return linear_rows(x, all, {});
  const Tensor h = Tensor::empty({x.size(0), inner.width()}, x.dtype(), x.device());
  for (std::size_t at = 0; at < as.size(); ++at)
    gemm({.a = x.view(), .b = transpose(as[at], 0, 1).view(), .c = inner.columns(h, at).mutable_view()}, device_context(x.device()));
  return h;
}

// rows[i] += scale h b^T, [rows, out] each.
void add_terms(const Tensor& h, const std::vector<LowRank>& terms, const Inner& inner, std::vector<Tensor> rows) {
  std::vector<Tensor> bs;
  for (const LowRank& term : terms) bs.push_back(term.b.detach());
  inner.join(bs, rows);
  for (std::size_t i = 0; i < rows.size(); ++i)
    gemm({.a = inner.columns(h, inner.block[i]).view(),
          .b = transpose(bs[i], 0, 1).view(),
          .c = rows[i].mutable_view(),
          .write = Write::accumulate,
          .scale = inner.scales[i]},
         device_context(h.device()));
}

void check_term(const Tensor& y, const Tensor& x, const LowRank& term) {
  const auto& [a, b, scale] = term;
  HEDDLE_CHECK(a.rank() == 2 && b.rank() == 2 && a.size(0) == b.size(1), "add_low_rank: a must be [r, in] and b [out, r], got ", a.shape(),
               " and ", b.shape());
  HEDDLE_CHECK(x.rank() >= 1 && x.size(-1) == a.size(1), "add_low_rank: x ", x.shape(), " does not fit a ", a.shape(),
               "; the last size of x must be the second of a");
  Shape shape = x.shape();
  shape[x.rank() - 1] = b.size(0);
  HEDDLE_CHECK(y.shape() == shape, "add_low_rank: y must be ", shape, " for x ", x.shape(), " and b ", b.shape(), ", got ", y.shape());
  for (const Tensor* other : {&y, &a, &b})
    HEDDLE_CHECK(other->dtype() == x.dtype() && other->device() == x.device(), "add_low_rank: x is ", x.describe(), ", another operand ",
                 other->describe(), "; cast or move one");
}

// Whether nobody but `ys` holds their memory.
bool are_only_owners(const std::vector<Tensor>& ys) {
  return std::ranges::all_of(ys, [&](const Tensor& y) {
    const auto sharing = std::ranges::count_if(ys, [&](const Tensor& other) { return other.storage() == y.storage(); });
    return y.impl_ptr().use_count() == 1 && y.storage().use_count() == sharing;
  });
}

}  // namespace

std::vector<Tensor> add_low_rank(std::vector<Tensor> ys, const Tensor& x, const std::vector<LowRank>& terms) {
  HEDDLE_CHECK(ys.size() == terms.size(), "add_low_rank: needs a term for each y, got ", terms.size(), " and ", ys.size());
  const bool may_overwrite = are_only_owners(ys);
  std::vector<std::size_t> at;  // where the terms are that are not left out
  std::vector<Tensor> outs, rows, inputs = {x};
  std::vector<LowRank> used;
  for (std::size_t i = 0; i < ys.size(); ++i) {
    if (!terms[i].a.defined()) continue;
    check_term(ys[i], x, terms[i]);
    const Tensor in_place = as_rows(ys[i]);
    const bool is_view = in_place.storage() == ys[i].storage();
    at.push_back(i);
    used.push_back(terms[i]);
    outs.push_back(may_overwrite && is_view ? ys[i].detach() : ys[i].clone());
    rows.push_back(as_rows(outs.back()));
    inputs.push_back(ys[i]);
  }
  if (used.empty()) return ys;
  for (const LowRank& term : used) inputs.push_back(term.a);
  for (const LowRank& term : used) inputs.push_back(term.b);
  const Inner inner(used);
  const Tensor h = inner_rows(as_rows(x), used, inner);
  add_terms(h, used, inner, std::move(rows));
  if (needs_grad(inputs)) record(outs, std::make_shared<AddLowRankNode>(x, used, inner, h), inputs);
  for (std::size_t i = 0; i < at.size(); ++i) ys[at[i]] = outs[i];
  return ys;
}

}  // namespace heddle
