#include "kernels/gemm/plan_cuda.h"
#include "kernels/quantize/few_rows.h"
#include "kernels/quantize/quant_gemm.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/device_cuda.h"

namespace heddle::cuda {
namespace {

bool takes_fp8(const QuantGemmArgs& args, const ExecContext& ctx) {
  const auto fits = [](std::int64_t size) { return size % 16 == 0 && size > 0; };
  return args.compute == QuantCompute::fp8 && !args.of_rows && dtype_size(args.x.dtype) == 2 && fp8_products(args.w.spec, ctx.device.index) &&
         fits(args.w.rows) && fits(args.w.columns) && args.out.is_contiguous() && args.x.strides[1] == 1 &&
         reinterpret_cast<std::uintptr_t>(args.w.codes.data) % 16 == 0 && reinterpret_cast<std::uintptr_t>(args.out.data) % 16 == 0 &&
         (!args.bias.defined() || (args.bias.is_contiguous() && reinterpret_cast<std::uintptr_t>(args.bias.data) % 16 == 0));
}

// out = x w^T in FP8, x quantised as the weight is. The layouts are those of Note: Row-major products, gemm_cuda.cpp.
void multiply_fp8(const QuantGemmArgs& args, const ExecContext& ctx) {
  const std::int64_t M = args.x.shape[0], K = args.w.columns, N = args.w.rows;
  const QuantSpec spec = args.w.spec;
  const QuantLayout layout = quant_layout(spec, M, K);
  const Buffer codes(M * K, ctx.device), scales((layout.scales.numel() + 1) * static_cast<std::int64_t>(sizeof(float)), ctx.device);
  const MutView scale_view = {scales.data(), DType::f32, ctx.device, layout.scales, contiguous_strides(layout.scales)};
  const MutView largest = {static_cast<float*>(scales.data()) + layout.scales.numel(), DType::f32, ctx.device, {1}, {1}};
  if (spec.needs_amax()) heddle::amax({.x = args.x, .out = largest}, ctx);
  heddle::quantize({.x = args.x,
                    .spec = spec,
                    .amax = largest,
                    .codes = {codes.data(), DType::u8, ctx.device, layout.codes, contiguous_strides(layout.codes)},
                    .scales = scale_view},
                   ctx);
  constexpr std::int64_t kAlignment = 16;
  const GemmKey key = {.a = {.rows = K, .columns = N, .leading = K, .is_transposed = 1, .alignment = kAlignment},
                       .b = {.rows = K, .columns = M, .leading = K, .alignment = kAlignment},
                       .d = {.rows = N, .columns = M, .leading = N, .alignment = kAlignment},
                       .in = static_cast<std::int64_t>(args.x.dtype),
                       .out = static_cast<std::int64_t>(args.x.dtype),
                       .has_bias = args.bias.defined() ? 1 : 0,
                       .accumulates = args.write == Write::accumulate ? 1 : 0,
                       .fp8 = spec.grain == ScaleGrain::tensor ? Fp8Scales::tensor : Fp8Scales::row};
  run_gemm(key,
           {.a = args.w.codes.data,
            .b = codes.data(),
            .d = args.out.data,
            .bias = args.bias.data,
            .a_scales = args.w.scales.data,
            .b_scales = scale_view.data},
           ctx);
}

}  // namespace

bool fp8_products(const QuantSpec& spec, int device_index) {
  const int capability = device_info(device_index).capability;
  if (spec.format != QuantFormat::fp8_e4m3) return false;
  if (spec.grain == ScaleGrain::tensor) return capability >= 89;
  return spec.grain == ScaleGrain::channel && capability == 90;  // what cuBLASLt has scales of rows for
}

bool quant_gemm_of_codes(const QuantGemmArgs& args, const ExecContext& ctx) {
  if (few_rows_product(args, ctx)) return true;
  if (!takes_fp8(args, ctx)) return false;
  multiply_fp8(args, ctx);
  return true;
}

}  // namespace heddle::cuda
