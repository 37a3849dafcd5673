#include "quant/fp8_linear.h"

#include <algorithm>
#include <utility>

#include "autograd/node.h"
#include "autograd/ops.h"
#include "autograd/ops/joined.h"
#include "autograd/ops/linear_parts.h"
#include "autograd/ops/param_grad.h"

namespace heddle::quant {
namespace {

constexpr QuantFormat kValues = QuantFormat::fp8_e4m3, kGradients = QuantFormat::fp8_e5m2;

Fp8Matrix empty_matrix(QuantFormat format, std::int64_t rows, std::int64_t columns, Device device) {
  return {.format = format,
          .codes = Tensor::empty({rows, columns}, DType::u8, device),
          .turned = Tensor::empty({columns, fp8_padded(rows)}, DType::u8, device),
          .scale = Tensor::empty({1}, DType::f32, device)};
}

Fp8View view_of(QuantFormat format, const Tensor& codes, const Tensor& scale) {
  return {.format = format, .codes = codes.view(), .scale = scale.view()};
}

// The matrix itself where its rows are dense and at multiples of 16 bytes, else a copy.
Tensor readable(const Tensor& x) {
  const ConstView view = x.view();
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.strides[0] % 8 == 0;
  return view.strides[1] == 1 && (is_aligned || view.numel() == 0) ? x : x.clone();
}

}  // namespace

// Inputs x, the weights, the biases.
struct Fp8ProjectionsNode final : Node {
  Fp8ProjectionsNode(std::shared_ptr<Fp8Projections> projections, const Tensor& x, const Fp8Matrix& codes)
      : Node("fp8_projections"), projections_(std::move(projections)), x_shape_(x.shape()) {
    save("x", codes.turned);
    save("x's scale", codes.scale);
    for (const auto& part : projections_->parts_) {
      save("weight", part.codes.turned);
      save("weight's scale", part.codes.scale);
    }
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    std::vector<Tensor> out(edges().size());
    Tensor dx = needs(0) ? take_gradient_so_far(0) : Tensor();
    for (std::size_t p = 0; p < projections_->parts_.size(); ++p) {
      const auto& part = projections_->parts_[p];
      const std::vector<Tensor> douts = rows_of(part, grads);
      if (std::ranges::none_of(douts, &Tensor::defined)) continue;
      const Fp8Matrix dout = quantized(part, douts, static_cast<int>(1 + p));
      if (needs(0)) dx = input_gradient(dx, dout, p);
      std::int64_t start = 0;
      for (std::size_t i = 0; i < part.count; start += size_of(part, i++)) {
        if (!douts[i].defined()) continue;
        const std::size_t layer = part.first + i, count = projections_->weights_.size();
        out[1 + layer] = weight_gradient(edges()[1 + layer], dout, start, size_of(part, i));
        out[1 + count + layer] = linear_bias_gradient(edges()[1 + count + layer], douts[i]);
      }
    }
    if (needs(0)) out[0] = dx;
    return out;
  }

 private:
  using Part = Fp8Projections::Part;

  std::int64_t size_of(const Part& part, std::size_t i) const { return projections_->weights_[part.first + i].size(0); }

  static std::vector<Tensor> rows_of(const Part& part, const std::vector<Tensor>& grads) {
    std::vector<Tensor> out;
    for (std::size_t i = part.first; i < part.first + part.count; ++i) out.push_back(grads[i].defined() ? as_rows(grads[i]) : Tensor());
    return out;
  }

  // The gradients of a part's results side by side; those that are undefined are 0.
  Fp8Matrix quantized(const Part& part, const std::vector<Tensor>& douts, int row) const {
    const Tensor& any = *std::ranges::find_if(douts, &Tensor::defined);
    const Fp8Matrix out = empty_matrix(kGradients, any.size(0), part.weight.size(0), any.device());
    std::vector<Fp8Projections::Piece> pieces;
    if (const Tensor joined = joined_columns(douts); joined.defined()) {
      pieces.push_back({joined});
    } else {
      std::int64_t start = 0;
      for (std::size_t i = 0; i < part.count; start += size_of(part, i++))
        if (douts[i].defined()) pieces.push_back({douts[i], start});
    }
    if (std::ranges::any_of(douts, [](const Tensor& dout) { return !dout.defined(); })) {
      out.codes.zero_();
      out.turned.zero_();
    }
    projections_->quantize(out, pieces, row);
    return out;
  }

  Tensor input_gradient(const Tensor& so_far, const Fp8Matrix& dout, std::size_t part) const {
    const Tensor dx = so_far.defined() ? so_far : Tensor::empty(x_shape_, DType::bf16, dout.codes.device());
    const int index = static_cast<int>(2 + 2 * part);
    fp8_gemm({.a = view_of(kGradients, dout.codes, dout.scale),
              .b = view_of(kValues, saved(index), saved(index + 1)),
              .out = as_rows(dx).mutable_view(),
              .write = so_far.defined() ? Write::accumulate : Write::assign,
              .is_precise = true},
             device_context(dx.device()));
    return dx;
  }

  // Of the layer whose results are columns [start, start + size) of a part's.
  Tensor weight_gradient(const Edge& edge, const Fp8Matrix& dout, std::int64_t start, std::int64_t size) const {
    if (!edge) return {};
    const Tensor x = saved(0);
    const ParamGrad dweight(edge, {size, x.size(0)}, DType::bf16, x.device());
    fp8_gemm({.a = view_of(kGradients, slice(dout.turned, 0, start, start + size), dout.scale),
              .b = view_of(kValues, x, saved(1)),
              .out = dweight.view,
              .write = dweight.write,
              .is_precise = true},
             device_context(x.device()));
    return dweight.returned;
  }

  std::shared_ptr<Fp8Projections> projections_;
  Shape x_shape_;
};

Fp8Projections::Fp8Projections(std::vector<Tensor> weights, std::vector<Tensor> biases, std::int64_t history)
    : weights_(std::move(weights)), biases_(std::move(biases)) {
  HEDDLE_CHECK(!weights_.empty() && weights_.size() == biases_.size() && history >= 0,
               "fp8: needs as many biases as weights, at least one, and a history >= 0, got ", biases_.size(), ", ", weights_.size(), " and ", history);
  const Device device = weights_[0].device();
  const DeviceSupport support = fp8_support(device);
  HEDDLE_CHECK(support.ok, "fp8: ", support.reason);
  for (const Tensor& weight : weights_)
    HEDDLE_CHECK(weight.dtype() == DType::bf16 && weight.rank() == 2 && weight.is_contiguous() && weight.size(0) % 16 == 0 &&
                     weight.size(1) % 16 == 0 && weight.numel() > 0,
                 "fp8: weights must be dense bfloat16 matrices of sizes that are multiples of 16, got ", weight.describe());
  const bool have_biases = biases_[0].defined();
  const Tensor weight = joined_rows(weights_), bias = have_biases ? joined_rows(biases_) : Tensor();
  if (weight.defined() && have_biases == bias.defined()) parts_.push_back({0, weights_.size(), weight, bias});
  else
    for (std::size_t i = 0; i < weights_.size(); ++i) parts_.push_back({i, 1, weights_[i].detach(), have_biases ? biases_[i].detach() : Tensor()});
  for (Part& part : parts_) part.codes = empty_matrix(kValues, part.weight.size(0), part.weight.size(1), device);
  if (history == 0) return;
  history_ = Tensor::zeros({1 + static_cast<std::int64_t>(parts_.size()), 1 + history}, DType::f32, device);
  slice(history_, 1, 0, 1).fill_(kNewHistory);
}

std::vector<Tensor> Fp8Projections::forward(const Tensor& x) {
  for (std::size_t i = 0; i < weights_.size(); ++i) check_linear("fp8", x, weights_[i], biases_[i]);
  std::vector<Tensor> inputs = {x};
  inputs.insert(inputs.end(), weights_.begin(), weights_.end());
  inputs.insert(inputs.end(), biases_.begin(), biases_.end());
  const bool is_recorded = needs_grad(inputs);
  if (is_recorded) begin_step();
  for (Part& part : parts_) refresh(part);

  const Tensor rows = as_rows(x);  // [M, in]
  const Fp8Matrix codes = empty_matrix(kValues, rows.size(0), rows.size(1), x.device());
  quantize(codes, {{rows}}, is_recorded ? 0 : -1);
  std::vector<Tensor> out;
  for (const Part& part : parts_) {
    const Tensor results = Tensor::empty({rows.size(0), part.weight.size(0)}, x.dtype(), x.device());
    fp8_gemm({.a = view_of(kValues, codes.codes, codes.scale),
              .b = view_of(kValues, part.codes.codes, part.codes.scale),
              .out = results.mutable_view(),
              .bias = part.bias.defined() ? part.bias.view() : ConstView{}},
             device_context(x.device()));
    std::int64_t start = 0;
    for (std::size_t i = part.first; i < part.first + part.count; start += weights_[i++].size(0)) {
      Shape shape = x.shape();
      shape[x.rank() - 1] = weights_[i].size(0);
      out.push_back(reshape(slice(results, 1, start, start + weights_[i].size(0)), shape));
    }
  }
  if (is_recorded) record(out, std::make_shared<Fp8ProjectionsNode>(shared_from_this(), x, codes), inputs);
  return out;
}

void Fp8Projections::begin_step() {
  if (step_version_ == weights_[0].version()) return;
  step_version_ = weights_[0].version();
  steps_ += 1;
  if (history_.defined()) advance_amax_history({.history = history_.mutable_view()}, device_context(history_.device()));
}

void Fp8Projections::refresh(Part& part) const {
  if (part.version == part.weight.version()) return;
  part.version = part.weight.version();
  quantize(part.codes, {{part.weight}}, -1);
}

void Fp8Projections::quantize(const Fp8Matrix& out, const std::vector<Piece>& pieces, int row) const {
  const ExecContext& ctx = device_context(out.codes.device());
  const bool is_delayed = row >= 0 && history_.defined();
  const bool needs_own = !is_delayed || steps_ <= 1;  // the history of a new run is empty in its first step
  std::vector<Piece> sources;
  for (const Piece& piece : pieces) sources.push_back({readable(piece.values), piece.start});
  Tensor own;
  if (needs_own) {
    own = Tensor::empty({1}, DType::f32, out.codes.device());
    for (const Piece& piece : sources)
      amax({.x = piece.values.view(), .out = own.mutable_view(), .write = &piece == &sources.front() ? Write::assign : Write::accumulate}, ctx);
  }
  for (const auto& [values, start] : sources)
    fp8_quantize({.x = values.view(),
                  .format = out.format,
                  .expected = is_delayed ? history_element(row, 0).view() : own.view(),
                  .fallback = is_delayed && needs_own ? own.view() : ConstView{},
                  .codes = slice(out.codes, 1, start, start + values.size(1)).mutable_view(),
                  .turned = slice(out.turned, 0, start, start + values.size(1)).mutable_view(),
                  .scale = out.scale.mutable_view(),
                  .seen = is_delayed ? history_element(row, 1).mutable_view() : MutView{}},
                 ctx);
}

Tensor Fp8Projections::history_element(int row, std::int64_t column) const {
  return history_.alias({1}, {1}, history_.storage_offset() + row * history_.size(1) + column);
}

Fp8Linear::Fp8Linear(std::shared_ptr<Fp8Projections> projections, std::size_t index) : projections_(std::move(projections)), index_(index) {
  const auto add = [&](const char* name, const Tensor& parameter) {
    const bool was_trainable = parameter.requires_grad();
    register_parameter(name, parameter);
    Tensor(parameter).set_requires_grad(was_trainable);
  };
  add("weight", weight());
  if (bias().defined()) add("bias", bias());
  if (index_ == 0 && projections_->history().defined()) register_state("fp8_amax", projections_->history());
}

Tensor Fp8Linear::forward(const Tensor& x, Generator*) const { return projections_->forward(x)[index_]; }

std::vector<Tensor> Fp8Linear::forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const {
  bool are_all = layers.size() == projections_->weights().size();
  for (std::size_t i = 0; are_all && i < layers.size(); ++i) {
    const auto* layer = dynamic_cast<const Fp8Linear*>(layers[i]);
    are_all = layer != nullptr && layer->projections_ == projections_ && layer->index_ == i;
  }
  return are_all ? projections_->forward(x) : LinearBase::forward_together(layers, x, dropout);
}

}  // namespace heddle::quant
