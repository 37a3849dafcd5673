#include "kernels/quantize/code_scales.cuh"

namespace heddle::cuda {
namespace {

__device__ void store_eight(float* to, const float (&x)[kCodeChunk]) {
  reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
  reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
}

// Two numbers as one word of 16-bit ones.
__device__ std::uint32_t pair_of(bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ std::uint32_t pair_of(float16, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

template <typename Half>
__device__ void store_eight(Half* to, const float (&x)[kCodeChunk]) {
  constexpr Half kKind{};
  *reinterpret_cast<uint4*>(to) = {pair_of(kKind, x[0], x[1]), pair_of(kKind, x[2], x[3]), pair_of(kKind, x[4], x[5]), pair_of(kKind, x[6], x[7])};
}

// Chunks start at multiples of kCodeChunk columns of the matrix, so that all of one share a scale; the first may begin before first_column.
template <typename F, typename T, typename Scale>
__global__ void decode_kernel(const Rows<T> out, const std::uint8_t* codes, std::int64_t row_bytes, std::int64_t first_row,
                              std::int64_t first_column, bool is_aligned, const Scale scale_of) {
  const std::int64_t i = my_row(), column = my_chunk() * kCodeChunk - first_column % kCodeChunk;  // of out
  if (column >= out.columns || i >= out.rows) return;
  const int count = at_most<kCodeChunk>(out.columns - column);
  const std::int64_t row = first_row + i;
  const std::uint8_t* from = codes + row * row_bytes + (first_column + column) * F::kBits / 8;
  CodeWords<F> words = {};
  if (is_aligned && count == kCodeChunk) {
    words = load_codes<F>(from);
  } else {
#pragma unroll
    for (int j = 0; j < 4 * CodeWords<F>::kCount; ++j)
      if (j * 8 < count * F::kBits) words.at[j / 4] |= static_cast<std::uint32_t>(from[j]) << (j % 4 * 8);
  }
  const float scale = scale_of.at(row, first_column + column);
  float values[kCodeChunk];
#pragma unroll
  for (int j = 0; j < kCodeChunk; ++j) values[j] = words.value(j) * scale;
  T* to = out.data + i * out.stride + column;
  if (is_aligned && count == kCodeChunk) {
    store_eight(to, values);
  } else {
    const int skipped = column < 0 ? static_cast<int>(-column) : 0;
#pragma unroll
    for (int j = 0; j < kCodeChunk; ++j)
      if (j >= skipped && j < count) to[j] = convert<T>(values[j]);
  }
}

template <typename F, typename T, typename Scale>
void decode_chunks(const DequantizeArgs& args, const Scale& scale, const ExecContext& ctx) {
  const Rows<T> out(args.out);
  const std::int64_t row_bytes = args.w.codes.shape[1], skipped = args.first_column % kCodeChunk;
  const bool is_aligned = out.is_aligned && skipped == 0 && reinterpret_cast<std::uintptr_t>(args.w.codes.data) % 8 == 0 && row_bytes % 8 == 0;
  decode_kernel<F><<<chunk_grid(out.rows, out.columns + skipped, kCodeChunk), kBlock, 0, stream_of(ctx)>>>(
      out, args.w.codes.as<std::uint8_t>(), row_bytes, args.first_row, args.first_column, is_aligned, scale);
}

}  // namespace

void dequantize(const DequantizeArgs& args, const ExecContext& ctx) {
  dispatch_stored(args.out.dtype, "dequantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_scales(args.w, [&]<typename F>(F, const auto& scale) { decode_chunks<F, T>(args, scale, ctx); });
  });
  check_launch("dequantize");
}

}  // namespace heddle::cuda
