#include "kernels/gemm/plan_cuda.h"
#include "kernels/quantize/code_scales.cuh"
#include "kernels/quantize/quant_gemm.h"
#include "kernels/runtime/allocator.h"

namespace heddle::cuda {
namespace {

// Of x, for the kernel that decodes weights as it reads them: above, decoding once costs less than multiplying in its loop.
constexpr int kMostRowsAtOnce = 16;
constexpr int kWarps = kBlock / 32;

// Eight of x as floats.
__device__ void load_eight(const float* from, float (&out)[kCodeChunk]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}
template <typename Half>
__device__ void load_eight(const Half* from, float (&out)[kCodeChunk]) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const std::uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < kCodeChunk; ++i) {
    Half half;
    half.bits = static_cast<std::uint16_t>(pairs[i / 2] >> (i % 2 * 16));
    out[i] = convert<float>(half);
  }
}

template <typename T>
struct RowProduct {
  const T* x;
  std::int64_t x_stride;
  T* out;
  std::int64_t out_stride;
  const T* bias;
  bool accumulates;
  std::int64_t rows, columns;  // of the weight
  const std::uint8_t* codes;
  std::int64_t row_bytes;
};

// A warp takes one row of the weight: its lanes decode neighbouring chunks, multiply them with kM rows of x, and add up their sums.
template <typename F, int kM, typename T, typename Scale>
__global__ void row_product_kernel(const __grid_constant__ RowProduct<T> p, const Scale scale_of) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  float sums[kM] = {};
  for (std::int64_t column = lane * kCodeChunk; column < p.columns; column += 32 * kCodeChunk) {
    const CodeWords<F> words = load_codes<F>(p.codes + row * p.row_bytes + column * F::kBits / 8);
    const float scale = scale_of.at(row, column);
    float w[kCodeChunk];
#pragma unroll
    for (int i = 0; i < kCodeChunk; ++i) w[i] = words.value(i) * scale;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float x[kCodeChunk];
      load_eight(p.x + m * p.x_stride + column, x);
#pragma unroll
      for (int i = 0; i < kCodeChunk; ++i) sums[m] = fmaf(x[i], w[i], sums[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[m] += __shfl_xor_sync(0xFFFFFFFFu, sums[m], step);
    if (lane != 0) continue;
    T& out = p.out[m * p.out_stride + row];
    if (p.bias != nullptr) sums[m] += convert<float>(p.bias[row]);
    if (p.accumulates) sums[m] += convert<float>(out);
    out = convert<T>(sums[m]);
  }
}

template <typename F, typename T, typename Scale>
void row_products(const QuantGemmArgs& args, const Scale& scale, const ExecContext& ctx) {
  RowProduct<T> p = {.x = args.x.as<T>(),
                     .x_stride = args.x.strides[0],
                     .out = args.out.as<T>(),
                     .out_stride = args.out.strides[0],
                     .bias = args.bias.defined() ? args.bias.as<T>() : nullptr,
                     .accumulates = args.write == Write::accumulate,
                     .rows = args.w.rows,
                     .columns = args.w.columns,
                     .codes = args.w.codes.as<std::uint8_t>(),
                     .row_bytes = args.w.codes.shape[1]};
  const auto blocks = static_cast<unsigned>((p.rows + kWarps - 1) / kWarps);
  std::int64_t left = args.x.shape[0];
  const auto run = [&]<int kM>(std::integral_constant<int, kM>) {
    for (; left >= kM; left -= kM) {
      row_product_kernel<F, kM><<<blocks, kBlock, 0, stream_of(ctx)>>>(p, scale);
      p.x += kM * p.x_stride;
      p.out += kM * p.out_stride;
    }
  };
  run(std::integral_constant<int, 8>{});
  run(std::integral_constant<int, 4>{});
  run(std::integral_constant<int, 1>{});
  check_launch("quant_gemm");
}

bool is_wide(const ConstView& view) {
  const auto bytes = static_cast<std::int64_t>(dtype_size(view.dtype));
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && (view.strides[0] * bytes % 16 == 0 || view.shape[0] == 1);
}

// Whole chunks at aligned addresses.
bool takes_row_products(const QuantGemmArgs& args) {
  const QuantView& w = args.w;
  return !args.of_rows && args.x.shape[0] <= kMostRowsAtOnce && w.columns % kCodeChunk == 0 && is_wide(args.x) && args.x.strides[1] == 1 &&
         args.out.strides[1] == 1 && (!args.bias.defined() || args.bias.is_contiguous()) &&
         reinterpret_cast<std::uintptr_t>(w.codes.data) % 8 == 0 && w.codes.shape[1] % 8 == 0;
}

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
  if (takes_row_products(args)) {
    dispatch_stored(args.x.dtype, "quant_gemm", [&](auto tag) {
      using T = typename decltype(tag)::type;
      with_scales(args.w, [&]<typename F>(F, const auto& scale) { row_products<F, T>(args, scale, ctx); });
    });
    return true;
  }
  if (!takes_fp8(args, ctx)) return false;
  multiply_fp8(args, ctx);
  return true;
}

}  // namespace heddle::cuda
