#pragma once

#include <vector>

#include "autograd/tensor.h"
#include "kernels/quantize/quantize.h"

namespace heddle::test {

// A matrix quantised by the kernels, and what it reads as.
struct Quantized {
  QuantSpec spec;
  std::int64_t rows, columns;
  Tensor codes, scales, global;

  QuantView view() const {
    return {spec, rows, columns, codes.view(), scales.view(), global.defined() ? global.view() : ConstView{}};
  }
  Tensor values(DType dtype = DType::f32) const {
    const Tensor out = Tensor::empty({rows, columns}, dtype, codes.device());
    dequantize({.w = view(), .out = out.mutable_view()}, device_context(codes.device()));
    return out;
  }
  std::vector<std::uint8_t> code_bytes() const { return codes.to_vector<std::uint8_t>(); }
  std::vector<std::uint8_t> scale_bytes() const { return scales.to_vector<std::uint8_t>(); }
};

// With `shared` in place of the matrix's own largest magnitude.
inline Quantized quantized(const Tensor& x, const QuantSpec& spec, std::optional<std::uint64_t> seed = {}, const Tensor& shared = {}) {
  const ExecContext& ctx = device_context(x.device());
  const QuantLayout layout = quant_layout(spec, x.size(0), x.size(1));
  const Tensor largest = Tensor::empty({1}, DType::f32, x.device());
  if (shared.defined()) largest.copy_(shared);
  else amax({.x = x.view(), .out = largest.mutable_view()}, ctx);
  Quantized out{spec, x.size(0), x.size(1), Tensor::empty(layout.codes, DType::u8, x.device()),
                Tensor::empty(layout.scales, layout.scale_dtype, x.device()), {}};
  if (layout.has_global) out.global = Tensor::empty({1}, DType::f32, x.device());
  quantize({.x = x.view(), .spec = spec, .amax = largest.view(), .codes = out.codes.mutable_view(), .scales = out.scales.mutable_view(),
            .global = layout.has_global ? out.global.mutable_view() : MutView{}, .seed = seed}, ctx);
  return out;
}

// QuantErrorArgs::sums of a matrix and its quantised form.
inline std::vector<double> error_sums(const Tensor& x, const Quantized& q) {
  const Tensor sums = Tensor::full({5}, -1.0, DType::f64, x.device());
  quant_error({.x = x.view(), .w = q.view(), .sums = sums.mutable_view()}, device_context(x.device()));
  return sums.to_vector<double>();
}

// Every form there is, with a name for messages.
struct NamedSpec {
  const char* name;
  QuantSpec spec;
};
inline const std::vector<NamedSpec>& all_specs() {
  using enum QuantFormat;
  static const std::vector<NamedSpec> specs = {
      {"fp8_e4m3 tensor", {.format = fp8_e4m3}},
      {"fp8_e4m3 channel", {.format = fp8_e4m3, .grain = ScaleGrain::channel}},
      {"fp8_e4m3 block", {.format = fp8_e4m3, .grain = ScaleGrain::block}},
      {"fp8_e5m2 tensor", {.format = fp8_e5m2}},
      {"fp8_e5m2 channel", {.format = fp8_e5m2, .grain = ScaleGrain::channel}},
      {"fp8_e5m2 block", {.format = fp8_e5m2, .grain = ScaleGrain::block}},
      {"fp4", {.format = fp4}},
      {"mxfp4 floor", {.format = mxfp4}},
      {"mxfp4 ceil", {.format = mxfp4, .mx_rounding = MxRounding::ceil}},
      {"nvfp4 nearest", {.format = nvfp4}},
      {"nvfp4 up", {.format = nvfp4, .scale_rounding = ScaleRounding::up}},
      {"nvfp4 four_over_six", {.format = nvfp4, .scale_search = ScaleSearch::four_over_six}},
      {"nvfp4 mse", {.format = nvfp4, .scale_search = ScaleSearch::mse}},
  };
  return specs;
}

}  // namespace heddle::test
