#include "kernels/quantize/quantize.h"

#include "kernels/quantize/scales.h"
#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

bool has_dense_rows(const ConstView& view) {
  return view.shape.rank() == 2 && (view.strides[1] == 1 || view.shape[1] <= 1);
}

bool is_dense(const ConstView& view, DType dtype, const Shape& shape) {
  return view.dtype == dtype && view.shape == shape && view.is_contiguous();
}

void check_matrix(const char* op, const ConstView& x) {
  HEDDLE_CHECK(has_dense_rows(x) && is_floating(x.dtype), op, ": needs a matrix of floating dtype with dense rows, got ", x.dtype, " ",
               x.shape, "; copy it first");
}

void check_source(const char* op, const ConstView& x) {
  check_matrix(op, x);
  HEDDLE_CHECK(x.dtype != DType::f64, op, ": not for float64; cast to float32");
}

void check_part(const char* op, const char* what, const ConstView& view, DType dtype, const Shape& shape) {
  HEDDLE_CHECK(is_dense(view, dtype, shape), op, ": ", what, " must be dense ", dtype, " ", shape, ", got ", view.dtype, " ", view.shape);
}

void check_parts(const char* op, const QuantView& w) {
  const QuantLayout layout = quant_layout(w.spec, w.rows, w.columns);
  check_part(op, "codes", w.codes, DType::u8, layout.codes);
  check_part(op, "scales", w.scales, layout.scale_dtype, layout.scales);
  if (layout.has_global) check_part(op, "global", w.global, DType::f32, {1});
}

}  // namespace

std::string_view name_of(QuantFormat format) {
  switch (format) {
    case QuantFormat::fp8_e4m3: return "fp8_e4m3";
    case QuantFormat::fp8_e5m2: return "fp8_e5m2";
    case QuantFormat::fp4: return "fp4";
    case QuantFormat::mxfp4: return "mxfp4";
    case QuantFormat::nvfp4: return "nvfp4";
  }
  return "unknown";
}

QuantLayout quant_layout(const QuantSpec& spec, std::int64_t rows, std::int64_t columns) {
  const Shape packed = {rows, blocks_of(columns, 2)};
  switch (spec.format) {
    case QuantFormat::fp4: return {packed, {1}, DType::f32, false};
    case QuantFormat::mxfp4: return {packed, {rows, blocks_of(columns, kMxBlock)}, DType::u8, false};
    case QuantFormat::nvfp4: return {packed, {rows, blocks_of(columns, kNvBlock)}, DType::u8, true};
    default: break;
  }
  const Shape codes = {rows, columns};
  if (spec.grain == ScaleGrain::tensor) return {codes, {1}, DType::f32, false};
  if (spec.grain == ScaleGrain::channel) return {codes, {rows, 1}, DType::f32, false};
  return {codes, {blocks_of(rows, kFp8Block), blocks_of(columns, kFp8Block)}, DType::f32, false};
}

void amax(const AmaxArgs& args, const ExecContext& ctx) {
  check_source("amax", args.x);
  check_part("amax", "the result", args.out, DType::f32, {1});
  HEDDLE_DISPATCH(ctx, amax, args);
}

void quantize(const QuantizeArgs& args, const ExecContext& ctx) {
  check_source("quantize", args.x);
  check_parts("quantize", {args.spec, args.x.shape[0], args.x.shape[1], args.codes, args.scales, args.global});
  if (args.spec.needs_amax()) check_part("quantize", "amax", args.amax, DType::f32, {1});
  HEDDLE_DISPATCH(ctx, quantize, args);
}

void dequantize(const DequantizeArgs& args, const ExecContext& ctx) {
  const auto& [w, first_row, first_column, out] = args;
  check_matrix("dequantize", out);
  check_parts("dequantize", w);
  HEDDLE_CHECK(first_row >= 0 && first_row + out.shape[0] <= w.rows && first_column >= 0 && first_column % 2 == 0 &&
                   first_column + out.shape[1] <= w.columns,
               "dequantize: ", out.shape, " from [", first_row, ", ", first_column, "] on is not in [", w.rows, ", ", w.columns,
               "]; the first column must be even");
  if (out.numel() == 0) return;
  HEDDLE_DISPATCH(ctx, dequantize, args);
}

void quant_error(const QuantErrorArgs& args, const ExecContext& ctx) {
  check_source("quant_error", args.x);
  check_parts("quant_error", args.w);
  check_part("quant_error", "sums", args.sums, DType::f64, {5});
  HEDDLE_CHECK((args.x.shape == Shape{args.w.rows, args.w.columns}), "quant_error: the source is ", args.x.shape, ", the quantised matrix [",
               args.w.rows, ", ", args.w.columns, "]");
  HEDDLE_DISPATCH(ctx, quant_error, args);
}

}  // namespace heddle
