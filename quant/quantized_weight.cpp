#include "quant/quantized_weight.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "autograd/ops.h"
#include "kernels/quantize/formats.h"
#include "kernels/runtime/parallel.h"

namespace heddle::quant {
namespace {

constexpr double kLargestWeight = 0x1p126;

// As the kernels read it: a matrix with dense rows, at most float32.
Tensor as_source(const Tensor& weight) {
  HEDDLE_CHECK(weight.rank() == 2 && is_floating(weight.dtype()), "quantize: needs a matrix of floating dtype, got ", weight.describe());
  Tensor source = weight.detach();
  if (source.dtype() == DType::f64) source = cast(source, DType::f32);
  return source.strides()[1] == 1 || source.size(1) <= 1 ? source : source.clone();
}

[[noreturn]] void refuse_value(const std::string& name, const Tensor& weight) {
  const std::vector<double> values = weight.to_doubles();
  const auto found = std::find_if(values.begin(), values.end(), [](double value) { return !(std::abs(value) <= kLargestWeight); });
  const std::int64_t index = found - values.begin();
  throw Error(concat_text("quantize: '", name, "' holds ", *found, " at [", index / weight.size(1), ", ", index % weight.size(1),
                          "]; weights must be finite and at most 2^126"));
}

void check_part(const std::string& name, const char* what, const Tensor& part, DType dtype, const Shape& shape) {
  HEDDLE_CHECK(part.defined() && part.dtype() == dtype && part.shape() == shape, "quantized weight '", name, "': ", what, " must be ", dtype, " ",
               shape, ", got ", part.defined() ? part.describe() : "nothing");
}

// The values of scales, or of codes where codes need not all be numbers.
template <typename Value>
void check_bytes(const std::string& name, const char* what, const Tensor& bytes, bool must_be_positive, const Value& value_of) {
  std::array<bool, 256> is_good{};
  for (int code = 0; code < 256; ++code) {
    const float value = value_of(static_cast<std::uint8_t>(code));
    is_good[static_cast<std::size_t>(code)] = std::isfinite(value) && (!must_be_positive || value > 0);
  }
  for (const std::uint8_t byte : bytes.to_vector<std::uint8_t>())
    HEDDLE_CHECK(is_good[byte], "quantized weight '", name, "': ", what, " hold the byte ", static_cast<int>(byte), ", which is ",
                 value_of(byte), "; the file is damaged or of another format");
}

void check_floats(const std::string& name, const char* what, const Tensor& scales) {
  for (const double scale : scales.to_doubles())
    HEDDLE_CHECK(std::isfinite(scale) && scale > 0, "quantized weight '", name, "': ", what, " hold ", scale,
                 "; they must be finite and above 0");
}

}  // namespace

QuantizedWeight::QuantizedWeight(const std::string& name, const QuantSpec& spec, std::int64_t out_features, std::int64_t in_features,
                                 const Parts& parts)
    : QuantizedWeight(spec, out_features, in_features, parts) {
  const QuantLayout layout = quant_layout(spec, out_features, in_features);
  check_part(name, "codes", parts.codes, DType::u8, layout.codes);
  check_part(name, "scales", parts.scales, layout.scale_dtype, layout.scales);
  if (layout.has_global) {
    check_part(name, "global scale", parts.global, DType::f32, {1});
    check_floats(name, "global scales", parts.global);
  }
  if (spec.format == QuantFormat::fp8_e4m3) check_bytes(name, "codes", parts.codes, false, decode<E4M3>);
  if (spec.format == QuantFormat::fp8_e5m2) check_bytes(name, "codes", parts.codes, false, decode<E5M2>);
  if (spec.format == QuantFormat::nvfp4) check_bytes(name, "scales", parts.scales, true, decode<E4M3>);
  else if (spec.format == QuantFormat::mxfp4) check_bytes(name, "scales", parts.scales, true, decode_e8m0);
  else check_floats(name, "scales", parts.scales);
}

QuantizedWeight QuantizedWeight::quantize(const std::string& name, const Tensor& weight, const QuantSpec& spec, const Tensor& amax) {
  const Tensor source = as_source(weight), largest = amax.defined() ? amax : largest_magnitude(name, weight);
  const std::int64_t out = source.size(0), in = source.size(1);
  const QuantLayout layout = quant_layout(spec, out, in);
  Parts parts = {Tensor::empty(layout.codes, DType::u8, source.device()), Tensor::empty(layout.scales, layout.scale_dtype, source.device()), {}};
  if (layout.has_global) parts.global = Tensor::empty({1}, DType::f32, source.device());
  heddle::quantize({.x = source.view(),
                    .spec = spec,
                    .amax = largest.view(),
                    .codes = parts.codes.mutable_view(),
                    .scales = parts.scales.mutable_view(),
                    .global = layout.has_global ? parts.global.mutable_view() : MutView{}},
                   device_context(source.device()));
  return {spec, out, in, parts};
}

std::int64_t QuantizedWeight::nbytes() const {
  return parts_.codes.nbytes() + parts_.scales.nbytes() + (parts_.global.defined() ? parts_.global.nbytes() : 0);
}

double QuantizedWeight::bits_per_weight() const {
  return 8.0 * static_cast<double>(nbytes()) / static_cast<double>(std::max<std::int64_t>(out_ * in_, 1));
}

QuantView QuantizedWeight::view() const {
  return {spec_, out_, in_, parts_.codes.view(), parts_.scales.view(), parts_.global.defined() ? parts_.global.view() : ConstView{}};
}

Tensor QuantizedWeight::dequantize(DType dtype) const {
  const Tensor out = Tensor::empty({out_, in_}, dtype, device());
  heddle::dequantize({.w = view(), .out = out.mutable_view()}, device_context(device()));
  return out;
}

QuantizedWeight QuantizedWeight::to(Device device) const {
  return {spec_, out_, in_, {parts_.codes.to(device), parts_.scales.to(device), parts_.global.defined() ? parts_.global.to(device) : Tensor()}};
}

void QuantizedWeight::set_requires_grad(bool value) const {
  HEDDLE_CHECK(!value, "quantized weight [", out_, ", ", in_, "]: quantised weights are frozen; add a LoRA adapter to train the layer");
}

Tensor largest_magnitude(const std::string& name, const Tensor& weight) {
  const Tensor source = as_source(weight), out = Tensor::empty({1}, DType::f32, source.device());
  amax({.x = source.view(), .out = out.mutable_view()}, device_context(source.device()));
  if (!(out.item() <= kLargestWeight)) refuse_value(name, weight);
  return out;
}

double QuantError::mse() const { return noise / static_cast<double>(std::max<std::int64_t>(count, 1)); }

double QuantError::sqnr_db() const { return noise > 0 ? 10 * std::log10(signal / noise) : std::numeric_limits<double>::infinity(); }

double QuantError::peak() const { return signal > 0 ? largest / std::sqrt(signal / static_cast<double>(count)) : 0; }

void QuantError::add(const QuantError& other) {
  count += other.count;
  zeroed += other.zeroed;
  signal += other.signal;
  noise += other.noise;
  largest = std::max(largest, other.largest);
  worst = std::max(worst, other.worst);
}

QuantError quant_error(const Tensor& weight, const QuantizedWeight& quantized) {
  const Tensor given = cast(weight.detach().to(kCpu), DType::f32).clone(), read = quantized.dequantize(DType::f32).to(kCpu);
  const float* w = given.view().as<float>();
  const float* q = read.view().as<float>();
  std::array<QuantError, kReductionChunks> parts;
  parallel_for(kReductionChunks, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t chunk = from; chunk < to; ++chunk) {
      QuantError part;
      for (std::int64_t i = given.numel() * chunk / kReductionChunks; i < given.numel() * (chunk + 1) / kReductionChunks; ++i) {
        const double value = w[i], error = value - static_cast<double>(q[i]);
        part.count += 1;
        part.zeroed += value != 0 && q[i] == 0 ? 1 : 0;
        part.signal += value * value;
        part.noise += error * error;
        part.largest = std::max(part.largest, std::abs(value));
        part.worst = std::max(part.worst, std::abs(error));
      }
      parts[static_cast<std::size_t>(chunk)] = part;
    }
  });
  QuantError out;
  for (const QuantError& part : parts) out.add(part);
  return out;
}

}  // namespace heddle::quant
