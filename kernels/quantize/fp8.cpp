#include "kernels/quantize/fp8.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

[[maybe_unused]] constexpr int kLeastCapability = 89;

DeviceSupport fp8_support_of_usable(Device device) {
  if (!device.is_cuda()) return {false, "FP8 products need a GPU of compute capability 8.9 or higher"};
#if HEDDLE_WITH_CUDA
  const int capability = cuda::fp8_capability(device.index);
  if (capability < kLeastCapability)
    return {false, concat_text("FP8 products need compute capability 8.9 or higher, and that of ", device, " is ", capability / 10, ".", capability % 10)};
#endif
  return {true, {}};
}

// Makes the device the current one.
void use_device(const char* op, const ExecContext& ctx) {
  const DeviceSupport support = fp8_support_of_usable(ctx.device);
  HEDDLE_CHECK(support.ok, op, ": ", support.reason);
  make_current(ctx);
}

bool has_dense_rows(const ConstView& view, DType dtype, const Shape& shape) {
  return view.dtype == dtype && view.shape == shape && (view.strides[1] == 1 || shape[1] <= 1);
}

bool is_one_float(const ConstView& view) { return view.dtype == DType::f32 && view.shape == Shape{1}; }

// Rows that start at multiples of 16 bytes.
bool is_aligned(const ConstView& view) {
  const std::int64_t stride = view.strides[0] * static_cast<std::int64_t>(dtype_size(view.dtype));
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && (stride % 16 == 0 || view.shape[0] <= 1);
}

bool is_fp8(QuantFormat format) { return QuantSpec{.format = format}.is_fp8(); }

void check_codes(const char* op, const char* what, const ConstView& codes, const Shape& shape) {
  HEDDLE_CHECK(has_dense_rows(codes, DType::u8, shape) && is_aligned(codes), op, ": ", what, " must be uint8 ", shape,
               ", rows dense and at multiples of 16 bytes, got ", codes.dtype, " ", codes.shape);
}

}  // namespace

DeviceSupport fp8_support(Device device) {
  const DeviceSupport support = device_support(device);
  return support.ok ? fp8_support_of_usable(device) : support;
}

void fp8_quantize(const Fp8QuantizeArgs& args, const ExecContext& ctx) {
  constexpr const char* kOp = "fp8_quantize";
  use_device(kOp, ctx);
  const auto& [x, format, expected, fallback, codes, turned, scale, seen] = args;
  HEDDLE_CHECK(x.shape.rank() == 2 && has_dense_rows(x, DType::bf16, x.shape) && is_aligned(x) && x.shape[1] % 16 == 0 && is_fp8(format), kOp,
               ": needs bfloat16 [R, C], rows dense and at multiples of 16 bytes, C a multiple of 16, as FP8, got ", x.dtype, " ", x.shape, " as ", name_of(format));
  check_codes(kOp, "codes", codes, x.shape);
  check_codes(kOp, "turned", turned, {x.shape[1], fp8_padded(x.shape[0])});
  HEDDLE_CHECK(is_one_float(expected) && is_one_float(scale) && (!fallback.defined() || is_one_float(fallback)) &&
                   (!seen.defined() || is_one_float(seen)),
               kOp, ": expected, fallback, scale and seen must be float32 [1]");
#if HEDDLE_WITH_CUDA
  cuda::fp8_quantize(args, ctx);
#endif
}

void advance_amax_history(const AmaxHistoryArgs& args, const ExecContext& ctx) {
  use_device("advance_amax_history", ctx);
  const MutView& history = args.history;
  HEDDLE_CHECK(history.dtype == DType::f32 && history.shape.rank() == 2 && history.shape[1] >= 2 && history.is_contiguous(),
               "advance_amax_history: needs dense float32 [rows, 1 + H] with H >= 1, got ", history.dtype, " ", history.shape);
  if (history.numel() == 0) return;
#if HEDDLE_WITH_CUDA
  cuda::advance_amax_history(args, ctx);
#endif
}

void fp8_gemm(const Fp8GemmArgs& args, const ExecContext& ctx) {
  constexpr const char* kOp = "fp8_gemm";
  use_device(kOp, ctx);
  const auto& [a, b, out, bias, write, is_precise] = args;
  HEDDLE_CHECK(a.codes.shape.rank() == 2 && b.codes.shape.rank() == 2 && a.codes.shape[1] == b.codes.shape[1] &&
                   out.shape == (Shape{a.codes.shape[0], b.codes.shape[0]}) && a.codes.shape[1] % 16 == 0 && b.codes.shape[0] % 16 == 0,
               kOp, ": rows ", a.codes.shape, " by ", b.codes.shape, " do not give ", out.shape, "; terms and columns must be multiples of 16");
  HEDDLE_CHECK(is_fp8(a.format) && is_fp8(b.format) && (a.format == QuantFormat::fp8_e4m3 || b.format == QuantFormat::fp8_e4m3), kOp,
               ": one operand must be fp8_e4m3 and the other FP8, got ", name_of(a.format), " and ", name_of(b.format));
  check_codes(kOp, "a", a.codes, a.codes.shape);
  check_codes(kOp, "b", b.codes, b.codes.shape);
  HEDDLE_CHECK(is_one_float(a.scale) && is_one_float(b.scale), kOp, ": scales must be float32 [1]");
  HEDDLE_CHECK((out.dtype == DType::bf16 || out.dtype == DType::f32) && has_dense_rows(out, out.dtype, out.shape) && is_aligned(out), kOp,
               ": out must be bfloat16 or float32, rows dense and at multiples of 16 bytes, got ", out.dtype, " ", out.shape);
  HEDDLE_CHECK(!bias.defined() || (bias.dtype == DType::bf16 && bias.shape == Shape{out.shape[1]} && bias.is_contiguous() &&
                                   out.dtype == DType::bf16 && write == Write::assign),
               kOp, ": bias must be dense bfloat16 [", out.shape[1], "] of an assigned bfloat16 product, got ", bias.dtype, " ", bias.shape);
  if (out.numel() == 0) return;
  HEDDLE_CHECK(a.codes.shape[1] > 0, kOp, ": needs at least one term");
#if HEDDLE_WITH_CUDA
  cuda::fp8_gemm(args, ctx);
#endif
}

}  // namespace heddle
