#include "quant/quant_linear.h"

#include <map>
#include <string_view>
#include <utility>

#include "autograd/node.h"
#include "autograd/ops.h"
#include "autograd/ops/linear_parts.h"
#include "nn/config_field.h"

namespace heddle::quant {
namespace {

// Inputs x and bias. The weight takes part in the graph as a constant.
struct QuantLinearNode final : Node {
  QuantLinearNode(const Tensor& x, const QuantizedWeight& weight) : Node("quant_linear"), x_shape_(x.shape()), weight_(weight) {}

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dout = as_rows(grads[0]);  // [rows, out]
    return {needs(0) ? input_gradient(dout) : Tensor(), linear_bias_gradient(edges()[1], dout)};
  }

 private:
  Tensor input_gradient(const Tensor& dout) {
    const Tensor so_far = take_gradient_so_far(0);
    const Tensor dx = so_far.defined() ? so_far : Tensor::empty(x_shape_, dout.dtype(), dout.device());
    quant_gemm({.x = dout.view(),
                .w = weight_.view(),
                .out = as_rows(dx).mutable_view(),
                .of_rows = true,
                .write = so_far.defined() ? Write::accumulate : Write::assign},
               device_context(dout.device()));
    return dx;
  }

  Shape x_shape_;
  QuantizedWeight weight_;
};

// What a product takes beside x.
struct Factors {
  const QuantizedWeight& weight;
  const Tensor& bias;
  QuantCompute compute;
};

void check_factors(const Tensor& x, const Factors& factors) {
  const auto& [weight, bias, compute] = factors;
  const std::int64_t out_features = weight.out_features();
  HEDDLE_CHECK(x.rank() >= 1 && x.size(-1) == weight.in_features() && is_floating(x.dtype()) && x.device() == weight.device(),
               "quant_linear: x is ", x.describe(), ", the weight [", out_features, ", ", weight.in_features(), "] on ", weight.device(),
               "; x must be floating, on the same device, and its last size the second of the weight");
  HEDDLE_CHECK(!bias.defined() || (bias.shape() == Shape{out_features} && bias.dtype() == x.dtype()), "quant_linear: bias must be ", x.dtype(),
               " [", out_features, "], got ", bias.describe());
}

std::vector<Tensor> quant_linears(const Tensor& x, const std::vector<Factors>& layers) {
  const Tensor rows = as_rows(x);
  std::vector<Tensor> out;
  std::vector<QuantGemmArgs> products;
  for (const Factors& layer : layers) {
    check_factors(x, layer);
    Shape shape = x.shape();
    shape[x.rank() - 1] = layer.weight.out_features();
    out.push_back(Tensor::empty(shape, x.dtype(), x.device()));
    products.push_back({.x = rows.view(),
                        .w = layer.weight.view(),
                        .out = as_rows(out.back()).mutable_view(),
                        .bias = layer.bias.defined() ? layer.bias.view() : ConstView{},
                        .compute = layer.compute});
  }
  quant_gemms(products, device_context(x.device()));
  for (std::size_t i = 0; i < layers.size(); ++i)
    if (needs_grad({&x, &layers[i].bias})) record(out[i], std::make_shared<QuantLinearNode>(x, layers[i].weight), {&x, &layers[i].bias});
  return out;
}

QuantCompute chosen_compute(const QuantizedWeight& weight, DType dtype, std::optional<QuantCompute> asked) {
  if (asked == QuantCompute::fp8) require_fp8_products(weight.spec(), weight.out_features(), weight.in_features(), dtype, weight.device());
  return asked.value_or(weight.spec().is_fp8() && fp8_products(weight.view(), dtype) ? QuantCompute::fp8 : QuantCompute::wide);
}

// How the products of a layer are computed, in words that layers computed alike have in common.
std::string description(const QuantLinear& layer) {
  const QuantSpec& spec = layer.weight().spec();
  if (layer.compute() == QuantCompute::wide)
    return concat_text("stored so; products on ", layer.weight().device(), " decode them to ", layer.dtype());
  const char* const scales = !spec.is_fp8() || spec.grain == ScaleGrain::channel ? "a scale a row"
                             : spec.grain == ScaleGrain::tensor                   ? "one scale"
                                                                                  : "a scale for 128 of a row";
  return concat_text("products on ", layer.weight().device(), " run in FP8, ", spec.is_fp8() ? "" : "weights decoded and ",
                     "activations rounded to it with ", scales, "; those of few rows, and gradients of activations, decode the weights");
}

}  // namespace

Tensor quant_linear(const Tensor& x, const QuantizedWeight& weight, const Tensor& bias, QuantCompute compute) {
  return quant_linears(x, {{weight, bias, compute}})[0];
}

QuantLinear::QuantLinear(const QuantizedWeight& weight, const Tensor& bias, DType dtype, std::optional<QuantCompute> compute)
    : weight_(weight), bias_(bias), dtype_(dtype), compute_(chosen_compute(weight, dtype, compute)) {
  if (!bias_.defined()) return;
  const bool was_trainable = bias_.requires_grad();
  register_parameter("bias", bias_);
  bias_.set_requires_grad(was_trainable);
}

Tensor QuantLinear::forward(const Tensor& x, Generator*) const { return quant_linear(x, weight_, bias_, compute_); }

std::vector<Tensor> QuantLinear::forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const {
  std::vector<Factors> all;
  for (const LinearBase* layer : layers)
    if (const auto* other = dynamic_cast<const QuantLinear*>(layer); other != nullptr) all.push_back({other->weight_, other->bias_, other->compute_});
  return all.size() == layers.size() ? quant_linears(x, all) : LinearBase::forward_together(layers, x, dropout);
}

void require_fp8_products(const QuantSpec& spec, std::int64_t out_features, std::int64_t in_features, DType dtype, Device device) {
  const QuantView shape = {.spec = spec, .rows = out_features, .columns = in_features, .codes = {.device = device}, .scales = {}};
  if (!fp8_products(shape, dtype))
    throw nn::BadValue("quantize.compute",
                       concat_text("bf16 or null, as ", dtype, " is not multiplied in FP8 with ", name_of(spec.format), " [", out_features, ", ", in_features,
                                   "] on ", device),
                       "fp8");
}

std::vector<std::string> describe_products(const nn::Module& model) {
  std::map<std::pair<std::string_view, std::string>, int> layers;  // by format and description
  for (const auto& [name, module] : model.modules())
    if (const auto* layer = dynamic_cast<const QuantLinear*>(module.get()); layer != nullptr)
      layers[{name_of(layer->weight().spec().format), description(*layer)}] += 1;
  std::vector<std::string> out;
  for (const auto& [kind, count] : layers)
    out.push_back(concat_text(kind.first, " weights of ", count, count == 1 ? " layer: " : " layers: ", kind.second));
  return out;
}

}  // namespace heddle::quant
