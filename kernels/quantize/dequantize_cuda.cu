#include "kernels/quantize/chunk.cuh"

namespace heddle::cuda {
namespace {

// The scale of the element at [row, column], where it is a byte for a block.
struct E8M0Scale {
  const std::uint8_t* scales;
  std::int64_t stride;
  __device__ float at(std::int64_t row, std::int64_t column) const { return decode_e8m0(scales[row * stride + column / kMxBlock]); }
};
struct E4M3Scale {
  const std::uint8_t* scales;
  std::int64_t stride;
  const float* global;
  __device__ float at(std::int64_t row, std::int64_t column) const {
    return decode<E4M3>(scales[row * stride + column / kNvBlock]) / *global;
  }
};

// Columns count from the first of the matrix, chunks of `out` from a multiple of kChunk of them: `skipped` before first_column.
template <typename F, typename T, typename Scale>
__global__ void decode_kernel(const Rows<T> out, const std::uint8_t* codes, std::int64_t row_bytes, std::int64_t first_row,
                              std::int64_t first_column, bool is_aligned, const Scale scale_of) {
  constexpr int kBytes = kChunk * F::kBits / 8;
  const int skipped = static_cast<int>(first_column % kChunk);
  const std::int64_t column = my_chunk() * kChunk - skipped;  // of out
  if (column >= out.columns) return;
  for (std::int64_t i = blockIdx.y; i < out.rows; i += gridDim.y) {
    const std::int64_t row = first_row + i;
    const float scale = scale_of.at(row, first_column + column);
    const std::uint8_t* from = codes + row * row_bytes + (first_column + column) * F::kBits / 8;
    T* to = out.data + i * out.stride + column;
    const auto value_of = [&](unsigned byte, int j) {
      const unsigned code = F::kBits == 8 ? byte : byte >> (j % 2 * 4);
      return convert<T>(decode<F>(static_cast<std::uint8_t>(code)) * scale);
    };
    if (is_aligned && column + kChunk <= out.columns) {
      const auto packed = *reinterpret_cast<const Pack<std::uint8_t, kBytes>*>(from);
      constexpr int kStep = kWide<T>;
#pragma unroll
      for (int j = 0; j < kChunk; j += kStep) {
        Pack<T, kStep> values;
#pragma unroll
        for (int k = 0; k < kStep; ++k) values.at[k] = value_of(packed.at[(j + k) * F::kBits / 8], j + k);
        *reinterpret_cast<Pack<T, kStep>*>(to + j) = values;
      }
    } else {
      for (int j = 0; j < kChunk; ++j)
        if (column + j >= 0 && column + j < out.columns) to[j] = value_of(from[j * F::kBits / 8], j);
    }
  }
}

template <typename F, typename T, typename Scale>
void decode_chunks(const DequantizeArgs& args, const Scale& scale, const ExecContext& ctx) {
  const Rows<T> out(args.out);
  const std::int64_t row_bytes = args.w.codes.shape[1], skipped = args.first_column % kChunk;
  const bool is_aligned = out.is_aligned && skipped == 0 && reinterpret_cast<std::uintptr_t>(args.w.codes.data) % 16 == 0 && row_bytes % 16 == 0;
  decode_kernel<F><<<chunk_grid(out.rows, out.columns + skipped, kChunk), kBlock, 0, stream_of(ctx)>>>(
      out, args.w.codes.as<std::uint8_t>(), row_bytes, args.first_row, args.first_column, is_aligned, scale);
}

}  // namespace

void dequantize(const DequantizeArgs& args, const ExecContext& ctx) {
  const QuantView& w = args.w;
  dispatch_stored(args.out.dtype, "dequantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* bytes = static_cast<const std::uint8_t*>(w.scales.data);
    switch (w.spec.format) {
      case QuantFormat::fp8_e4m3: return decode_chunks<E4M3, T>(args, float_scales_of(w), ctx);
      case QuantFormat::fp8_e5m2: return decode_chunks<E5M2, T>(args, float_scales_of(w), ctx);
      case QuantFormat::fp4: return decode_chunks<E2M1, T>(args, float_scales_of(w), ctx);
      case QuantFormat::mxfp4: return decode_chunks<E2M1, T>(args, E8M0Scale{bytes, w.scales.shape[1]}, ctx);
      case QuantFormat::nvfp4: return decode_chunks<E2M1, T>(args, E4M3Scale{bytes, w.scales.shape[1], w.global.as<float>()}, ctx);
    }
  });
  check_launch("dequantize");
}

}  // namespace heddle::cuda
