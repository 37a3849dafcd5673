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
  HEDDLE_CHECK(compute == QuantCompute::wide || fp8_products(w, x.dtype), "quant_gemm: products of ", x.dtype, " with ", name_of(w.spec.format),
               " [", w.rows, ", ", w.columns, "] on ", w.codes.device, " do not run in FP8; compute them wide");
}

void multiply_decoded(const QuantGemmArgs& args, const ExecContext& ctx) {
  const auto& [x, w, out, bias, of_rows, write, compute] = args;
  const std::int64_t results = out.shape[1], terms = x.shape[1];
  const auto element_bytes = static_cast<std::int64_t>(dtype_size(x.dtype));
  const std::int64_t width = decoded_at_once(results, terms * element_bytes, ctx.device);
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

}  // namespace

// Parts of one size, as a smaller last one leaves more multiprocessors idle: the tiles of its product do not fill whole turns of them.
std::int64_t decoded_at_once(std::int64_t results, std::int64_t nbytes, Device device) {
  const std::int64_t memory = device.is_cuda() ? kCudaTileBytes : kCpuTileBytes;
  const std::int64_t steps = (results + kTileStep - 1) / kTileStep;
  const std::int64_t most = std::max(memory / (std::max<std::int64_t>(nbytes, 1) * kTileStep), std::int64_t{1});
  const std::int64_t parts = (steps + most - 1) / most;
  return std::min(results, (steps + parts - 1) / parts * kTileStep);
}

bool fp8_products([[maybe_unused]] const QuantView& w, [[maybe_unused]] DType x) {
#if HEDDLE_WITH_CUDA
  const auto fits = [](std::int64_t size) { return size % 16 == 0 && size > 0; };
  const Device device = w.codes.device;
  return device.is_cuda() && dtype_size(x) == 2 && fits(w.rows) && fits(w.columns) && cuda::fp8_products(w.spec, device.index);
#else
  return false;
#endif
}

void quant_gemms(const std::vector<QuantGemmArgs>& products, const ExecContext& ctx) {
  std::vector<QuantGemmArgs> left;
  for (const QuantGemmArgs& args : products) {
    check_product(args);
    const ConstView& first = products.front().x;
    HEDDLE_CHECK(args.x.data == first.data && args.x.dtype == first.dtype && args.x.shape == first.shape && args.x.strides == first.strides,
                 "quant_gemms: products must have one x");
    if (args.out.numel() > 0) left.push_back(args);
  }
#if HEDDLE_WITH_CUDA
  make_current(ctx);
  if (ctx.device.is_cuda()) left = cuda::quant_gemms_of_codes(left, ctx);
#endif
  for (const QuantGemmArgs& args : left) multiply_decoded(args, ctx);
}

void quant_gemm(const QuantGemmArgs& args, const ExecContext& ctx) { quant_gemms({args}, ctx); }

}  // namespace heddle
