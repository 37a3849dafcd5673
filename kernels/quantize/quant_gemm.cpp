#include "kernels/quantize/quant_gemm.h"

#include <algorithm>

#include "kernels/gemm/gemm.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

// Decoded weights at a time. On the CPU they stay in the second-level cache; on a GPU a whole layer of 5792 x 5792 in bfloat16 fits.
constexpr std::int64_t kCpuTileBytes = std::int64_t{1} << 19, kCudaTileBytes = std::int64_t{64} << 20;
// Tiles are whole multiples of this many rows or columns, which every block size divides.
constexpr std::int64_t kTileStep = 128;

std::byte* address(const ConstView& view, std::int64_t offset) {
  return static_cast<std::byte*>(const_cast<void*>(view.data)) + offset * static_cast<std::int64_t>(dtype_size(view.dtype));
}

MutView columns_of(const MutView& view, std::int64_t first, std::int64_t count) {
  return {address(view, first * view.strides[1]), view.dtype, view.device, {view.shape[0], count}, view.strides};
}

ConstView transposed(const ConstView& view) {
  return {view.data, view.dtype, view.device, {view.shape[1], view.shape[0]}, {view.strides[1], view.strides[0]}};
}

void check_product(const QuantGemmArgs& args) {
  const auto& [x, w, out, bias, of_rows, write, compute] = args;
  const std::int64_t terms = of_rows ? w.rows : w.columns, results = of_rows ? w.columns : w.rows;
  HEDDLE_CHECK(x.shape.rank() == 2 && x.shape[1] == terms && out.shape == (Shape{x.shape[0], results}) && out.dtype == x.dtype,
               "quant_gemm: x ", x.dtype, " ", x.shape, " and a weight [", w.rows, ", ", w.columns, "] do not give ", out.dtype, " ", out.shape);
  HEDDLE_CHECK(!bias.defined() || (bias.shape == Shape{w.rows} && bias.dtype == x.dtype && !of_rows && write == Write::assign),
               "quant_gemm: bias must be ", x.dtype, " [", w.rows, "] of an assigned x w^T, got ", bias.dtype, " ", bias.shape);
}

}  // namespace

bool fp8_products([[maybe_unused]] const QuantSpec& spec, [[maybe_unused]] Device device) {
#if HEDDLE_WITH_CUDA
  return device.is_cuda() && cuda::fp8_products(spec, device.index);
#else
  return false;
#endif
}

void quant_gemm(const QuantGemmArgs& args, const ExecContext& ctx) {
  check_product(args);
  if (args.out.numel() == 0) return;
#if HEDDLE_WITH_CUDA
  make_current(ctx);
  if (ctx.device.is_cuda() && cuda::quant_gemm_of_codes(args, ctx)) return;
#endif
  const auto& [x, w, out, bias, of_rows, write, compute] = args;
  const std::int64_t results = out.shape[1], terms = x.shape[1];
  const auto element_bytes = static_cast<std::int64_t>(dtype_size(x.dtype));
  const std::int64_t fitting = (ctx.device.is_cuda() ? kCudaTileBytes : kCpuTileBytes) / (std::max<std::int64_t>(terms, 1) * element_bytes);
  const std::int64_t width = std::min(results, std::max(fitting / kTileStep, std::int64_t{1}) * kTileStep);
  const Buffer memory(width * terms * element_bytes, ctx.device);
  for (std::int64_t first = 0; first < results; first += width) {
    const std::int64_t count = std::min(width, results - first);
    const Shape shape = of_rows ? Shape{terms, count} : Shape{count, terms};
    const MutView tile = {memory.data(), x.dtype, ctx.device, shape, contiguous_strides(shape)};
    dequantize({.w = w, .first_row = of_rows ? 0 : first, .first_column = of_rows ? first : 0, .out = tile}, ctx);
    GemmArgs product = {.a = x, .b = of_rows ? ConstView(tile) : transposed(tile), .c = columns_of(out, first, count), .write = write};
    if (bias.defined()) product.bias = {address(bias, first * bias.strides[0]), bias.dtype, bias.device, {count}, bias.strides};
    gemm(product, ctx);
  }
}

}  // namespace heddle
