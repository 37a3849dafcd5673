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
constexpr double kLargestRead = 0x1p127;  // below: with scales rounded up, less than twice the largest weight is read

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

const char* const kDamaged = "; the file is damaged or of another format";

// Which bytes a tensor holds.
std::array<bool, 256> bytes_of(const Tensor& bytes) {
  const Tensor host = bytes.to(kCpu);
  const std::uint8_t* data = host.view().as<std::uint8_t>();
  std::array<std::array<bool, 256>, kReductionChunks> found{};
  parallel_for(kReductionChunks, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t chunk = from; chunk < to; ++chunk)
      for (std::int64_t i = host.numel() * chunk / kReductionChunks; i < host.numel() * (chunk + 1) / kReductionChunks; ++i)
        found[static_cast<std::size_t>(chunk)][data[i]] = true;
  });
  std::array<bool, 256> out{};
  for (const std::array<bool, 256>& part : found)
    for (std::size_t byte = 0; byte < out.size(); ++byte) out[byte] = out[byte] || part[byte];
  return out;
}

// FP8 codes that are NaN or infinite.
template <typename F>
void check_codes(const std::string& name, const Tensor& codes) {
  const std::array<bool, 256> is_there = bytes_of(codes);
  for (std::size_t byte = 0; byte < is_there.size(); ++byte) {
    const float value = decode<F>(static_cast<std::uint8_t>(byte));
    HEDDLE_CHECK(!is_there[byte] || std::isfinite(value), "quantized weight '", name, "': codes hold the byte ", byte, ", which is ", value, kDamaged);
  }
}

// The different block scales, as numbers.
std::vector<double> scale_values(const QuantSpec& spec, const Tensor& scales) {
  if (scales.dtype() != DType::u8) return scales.to_doubles();
  const std::array<bool, 256> is_there = bytes_of(scales);
  std::vector<double> out;
  for (std::size_t i = 0; i < is_there.size(); ++i) {
    const auto byte = static_cast<std::uint8_t>(i);
    if (is_there[i]) out.push_back(spec.format == QuantFormat::mxfp4 ? decode_e8m0(byte) : decode<E4M3>(byte));
  }
  return out;
}

// Scales of 0 occur in files of other programs, for blocks that read as 0; a tensor scale is divided by.
void check_scales(const std::string& name, const QuantSpec& spec, const QuantizedWeight::Parts& parts) {
  double largest = 0;
  for (const double scale : scale_values(spec, parts.scales)) {
    HEDDLE_CHECK(std::isfinite(scale) && scale >= 0, "quantized weight '", name, "': scales hold ", scale, ", and must be finite and not negative", kDamaged);
    largest = std::max(largest, scale);
  }
  if (parts.global.defined()) {
    const double global = parts.global.item();
    HEDDLE_CHECK(std::isfinite(global) && global > 0, "quantized weight '", name, "': the global scale is ", global,
                 ", and must be finite and above 0", kDamaged);
    largest /= global;
  }
  const float most = spec.format == QuantFormat::fp8_e4m3 ? E4M3::kLargest : spec.format == QuantFormat::fp8_e5m2 ? E5M2::kLargest : E2M1::kLargest;
  HEDDLE_CHECK(largest * most <= kLargestRead, "quantized weight '", name, "': under its largest scale, ", largest, ", weights may be up to ",
               largest * most, ", beyond 2^127", kDamaged);
}

}  // namespace

QuantizedWeight::QuantizedWeight(const std::string& name, const QuantSpec& spec, std::int64_t out_features, std::int64_t in_features,
                                 const Parts& parts)
    : QuantizedWeight(spec, out_features, in_features, parts) {
  const QuantLayout layout = quant_layout(spec, out_features, in_features);
  check_part(name, "codes", parts.codes, DType::u8, layout.codes);
  check_part(name, "scales", parts.scales, layout.scale_dtype, layout.scales);
  if (layout.has_global) check_part(name, "global scale", parts.global, DType::f32, {1});
  if (spec.format == QuantFormat::fp8_e4m3) check_codes<E4M3>(name, parts.codes);
  if (spec.format == QuantFormat::fp8_e5m2) check_codes<E5M2>(name, parts.codes);
  check_scales(name, spec, parts);
}

QuantizedWeight QuantizedWeight::quantize(const std::string& name, const Tensor& weight, const QuantSpec& spec, const Tensor& amax,
                                          std::optional<std::uint64_t> seed) {
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
                    .global = layout.has_global ? parts.global.mutable_view() : MutView{},
                    .seed = seed},
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
  const Tensor source = as_source(weight), sums = Tensor::empty({5}, DType::f64, source.device());
  heddle::quant_error({.x = source.view(), .w = quantized.view(), .sums = sums.mutable_view()}, device_context(source.device()));
  const std::vector<double> found = sums.to_vector<double>();
  return {.count = source.numel(),
          .zeroed = static_cast<std::int64_t>(found[4]),
          .signal = found[0],
          .noise = found[1],
          .largest = found[2],
          .worst = found[3]};
}

}  // namespace heddle::quant
