#include <algorithm>
#include <cstddef>

#include "kernels/gemm/plan_cuda.h"
#include "kernels/quantize/few_rows.h"
#include "kernels/quantize/quant_gemm.h"
#include "kernels/quantize/recode.h"
#include "kernels/quantize/row_blocks.h"
#include "kernels/quantize/scales.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/device_cuda.h"
#include "kernels/runtime/launch.cuh"

namespace heddle::cuda {
namespace {

MutView dense(void* data, DType dtype, Device device, const Shape& shape) { return {data, dtype, device, shape, contiguous_strides(shape)}; }

std::int64_t blocks_of(std::int64_t size) { return (size + kFp8Block - 1) / kFp8Block; }

// How x and a weight are scaled.
Fp8Scales scales_for(const QuantSpec& weight) {
  if (!weight.is_fp8() || weight.grain == ScaleGrain::channel) return Fp8Scales::row;
  return weight.grain == ScaleGrain::tensor ? Fp8Scales::tensor : Fp8Scales::block;
}

// An x of several products in E4M3, rounded as the first weight wants it, and anew for one that wants it otherwise.
class RoundedX {
 public:
  void round(const ConstView& x, Fp8Scales kind, const ExecContext& ctx) {
    if (kind_ == kind) return;
    kind_ = kind;
    const std::int64_t M = x.shape[0], K = x.shape[1], count = kind == Fp8Scales::tensor ? 1 : kind == Fp8Scales::row ? M : blocks_of(K) * M;
    codes_ = Buffer(M * K, ctx.device);
    scales_ = Buffer((count + 1) * static_cast<std::int64_t>(sizeof(float)), ctx.device);
    const MutView codes = dense(codes_.data(), DType::u8, ctx.device, {M, K}), scales = dense(scales_.data(), DType::f32, ctx.device, {count});
    if (kind == Fp8Scales::block) return quantize_row_blocks(x, codes, scales, ctx);
    const QuantSpec spec = {.format = QuantFormat::fp8_e4m3, .grain = kind == Fp8Scales::tensor ? ScaleGrain::tensor : ScaleGrain::channel};
    const MutView largest = dense(scales.as<float>() + count, DType::f32, ctx.device, {1});
    if (spec.needs_amax()) heddle::amax({.x = x, .out = largest}, ctx);
    const Shape shape = quant_layout(spec, M, K).scales;
    heddle::quantize({.x = x, .spec = spec, .amax = largest, .codes = codes, .scales = dense(scales_.data(), DType::f32, ctx.device, shape)}, ctx);
  }
  const void* codes() const { return codes_.data(); }
  const void* scales() const { return scales_.data(); }

 private:
  Fp8Scales kind_ = Fp8Scales::none;
  Buffer codes_, scales_;
};

// Rows of a weight in FP8.
struct Fp8Rows {
  std::int64_t first, count;
  const void* codes;
  const void* scales;
};

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// Columns [first, first + count) of out = x w^T + bias. The layouts are those of Note: Row-major products, gemm_cuda.cpp.
void multiply(const QuantGemmArgs& args, const RoundedX& x, const Fp8Rows& w, const ExecContext& ctx) {
  const std::int64_t M = args.x.shape[0], K = args.w.columns;
  constexpr std::int64_t kAlignment = 16;
  const Fp8Scales scales = scales_for(args.w.spec);
  const auto from_first = [&](const void* data) {
    return data == nullptr ? nullptr : static_cast<std::byte*>(const_cast<void*>(data)) + w.first * static_cast<std::int64_t>(dtype_size(args.x.dtype));
  };
  const GemmKey key = {.a = {.rows = K, .columns = w.count, .leading = K, .is_transposed = 1, .alignment = kAlignment},
                       .b = {.rows = K, .columns = M, .leading = K, .alignment = kAlignment},
                       .d = {.rows = w.count, .columns = M, .leading = M > 1 ? args.out.strides[0] : w.count, .alignment = kAlignment},
                       .in = static_cast<std::int64_t>(args.x.dtype),
                       .out = static_cast<std::int64_t>(args.x.dtype),
                       .has_bias = args.bias.defined() ? 1 : 0,
                       .accumulates = args.write == Write::accumulate ? 1 : 0,
                       .fp8 = scales,
                       .a_type = args.w.spec.format == QuantFormat::fp8_e5m2 ? Fp8Type::e5m2 : Fp8Type::e4m3,
                       .is_precise = scales == Fp8Scales::block ? 1 : 0};
  run_gemm(key,
           {.a = w.codes, .b = x.codes(), .d = from_first(args.out.data), .bias = from_first(args.bias.data), .a_scales = w.scales, .b_scales = x.scales()},
           ctx);
}

// Weights of 4 bits go through E4M3 codes of as many rows as fit into a bounded memory.
void multiply_recoded(const QuantGemmArgs& args, const RoundedX& x, const ExecContext& ctx) {
  const std::int64_t rows = args.w.rows, K = args.w.columns, height = decoded_at_once(rows, K, ctx.device);
  const Buffer codes(height * K, ctx.device), scales(height * static_cast<std::int64_t>(sizeof(float)), ctx.device);
  for (std::int64_t first = 0; first < rows; first += height) {
    const std::int64_t count = std::min(height, rows - first);
    recode_rows(args.w, first, dense(codes.data(), DType::u8, ctx.device, {count, K}), dense(scales.data(), DType::f32, ctx.device, {count}), ctx);
    multiply(args, x, {first, count, codes.data(), scales.data()}, ctx);
  }
}

// Rows of block scales start at multiples of 16 bytes.
void multiply_blocks(const QuantGemmArgs& args, const RoundedX& x, const ExecContext& ctx) {
  const ConstView& scales = args.w.scales;
  const std::int64_t height = scales.shape[0], width = scales.shape[1], padded = (width + 3) / 4 * 4;
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(float));
  const Buffer copy(padded == width ? 0 : height * padded * kBytes, ctx.device);
  if (padded != width)
    HEDDLE_CUDA_CHECK(cudaMemcpy2DAsync(copy.data(), static_cast<std::size_t>(padded * kBytes), scales.data, static_cast<std::size_t>(width * kBytes),
                                        static_cast<std::size_t>(width * kBytes), static_cast<std::size_t>(height), cudaMemcpyDeviceToDevice, stream_of(ctx)));
  multiply(args, x, {0, args.w.rows, args.w.codes.data, padded == width ? scales.data : copy.data()}, ctx);
}

QuantGemmArgs rows_of(QuantGemmArgs args, std::int64_t first, std::int64_t count) {
  const auto moved = [first](const auto& view) {
    return static_cast<std::byte*>(const_cast<void*>(view.data)) + first * view.strides[0] * static_cast<std::int64_t>(dtype_size(view.dtype));
  };
  args.x.data = moved(args.x);
  args.out.data = moved(args.out);
  args.x.shape[0] = args.out.shape[0] = count;
  return args;
}

void multiply_in_fp8(const QuantGemmArgs& args, RoundedX& x, const ExecContext& ctx) {
  const auto& [rows, w, out, bias, of_rows, write, compute] = args;
  HEDDLE_CHECK(out.strides[1] == 1 && (out.strides[0] % 8 == 0 || out.shape[0] == 1) && is_aligned(out.data) && is_aligned(w.codes.data) &&
                   is_aligned(w.scales.data) && (!bias.defined() || (bias.is_contiguous() && is_aligned(bias.data))),
               "quant_gemm: for products in FP8 rows of out, codes, scales and bias must be dense and at multiples of 16 bytes");
  const Fp8Scales scales = scales_for(w.spec);
  x.round(rows, scales, ctx);
  if (!w.spec.is_fp8()) multiply_recoded(args, x, ctx);
  else if (scales == Fp8Scales::block) multiply_blocks(args, x, ctx);
  else multiply(args, x, {0, w.rows, w.codes.data, w.scales.data}, ctx);
}

}  // namespace

// cuBLASLt has scales of rows and of blocks for compute capability 9.0 alone.
bool fp8_products(const QuantSpec& spec, int device_index) {
  const int capability = device_info(device_index).capability;
  return scales_for(spec) == Fp8Scales::tensor ? capability >= 89 : capability == 90;
}

// With scales of blocks cuBLASLt takes a multiple of 8 rows of x; those beyond are few rows, or decoded.
std::vector<QuantGemmArgs> quant_gemms_of_codes(const std::vector<QuantGemmArgs>& products, const ExecContext& ctx) {
  constexpr std::int64_t kBlockRows = 8;
  std::vector<QuantGemmArgs> left;
  RoundedX x;
  for (const QuantGemmArgs& args : products) {
    if (few_rows_product(args, ctx)) continue;
    if (args.compute == QuantCompute::wide || args.of_rows) {
      left.push_back(args);
      continue;
    }
    const std::int64_t M = args.x.shape[0], rest = scales_for(args.w.spec) == Fp8Scales::block ? M % kBlockRows : 0;
    if (M > rest) multiply_in_fp8(rows_of(args, 0, M - rest), x, ctx);
    if (rest == 0) continue;
    if (const QuantGemmArgs last = rows_of(args, M - rest, rest); !few_rows_product(last, ctx)) left.push_back(last);
  }
  return left;
}

}  // namespace heddle::cuda
