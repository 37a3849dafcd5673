#include <cuda_fp8.h>

#include "kernels/quantize/chunk.cuh"
#include "kernels/runtime/random.h"

namespace heddle::cuda {
namespace {

constexpr int kChunk = 16;
static_assert(kChunk == kNvBlock && kMxBlock % kChunk == 0 && kFp8Block % kMxBlock == 0);

__device__ void load_wide(const float* from, float* out) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
}
template <typename Half>
__device__ void load_wide(const Half* from, float* out) {
  const uint4 eight = *reinterpret_cast<const uint4*>(from);
  const std::uint32_t words[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Half low, high;
    low.bits = static_cast<std::uint16_t>(words[i]);
    high.bits = static_cast<std::uint16_t>(words[i] >> 16);
    out[2 * i] = convert<float>(low);
    out[2 * i + 1] = convert<float>(high);
  }
}

// N elements from `from` on as floats, at a multiple of 16 bytes if `is_aligned`; those past `count` are 0.
template <int N, typename T>
__device__ void load_floats(const T* from, int count, bool is_aligned, float (&out)[N]) {
  if (is_aligned && count == N) {
#pragma unroll
    for (int i = 0; i < N; i += kWide<T>) load_wide(from + i, out + i);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = i < count ? convert<float>(from[i]) : 0.0f;
  }
}

template <int N>
__device__ std::uint32_t amax_bits(const float (&x)[N]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = max(largest, bits_of(x[i]) & 0x7FFFFFFFu);
  return largest;
}

// The largest of the block's threads.
__device__ std::uint32_t block_max(std::uint32_t value) {
  __shared__ std::uint32_t warps[kBlock / 32];
  value = __reduce_max_sync(0xFFFFFFFFu, value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(0xFFFFFFFFu, threadIdx.x % 32 < kBlock / 32 ? warps[threadIdx.x % 32] : 0u);
}

// What becomes of the largest magnitude of a tile, given as bits.
struct MaxInto {
  unsigned* out;
  __device__ void operator()(std::uint32_t bits, std::int64_t) const { atomicMax(out, bits); }
};
template <typename F>
struct ScaleOfTile {
  float* scales;
  __device__ void operator()(std::uint32_t bits, std::int64_t tile) const {
    scales[tile] = float_scale(std::bit_cast<float>(bits), F::kLargest);
  }
};

// A block of threads takes the tile of height x width elements at (blockIdx.y, blockIdx.x).
template <typename T, typename Result>
__global__ void amax_tiles(const Rows<const T> x, std::int64_t height, std::int64_t width, const Result result) {
  const std::int64_t first = blockIdx.y * height, begin = blockIdx.x * width, end = min(begin + width, x.columns);
  const unsigned chunks = static_cast<unsigned>((end - begin + kChunk - 1) / kChunk);
  const unsigned count = chunks * static_cast<unsigned>(min(height, x.rows - first));
  std::uint32_t largest = 0;
  for (unsigned i = threadIdx.x; i < count; i += kBlock) {
    const std::int64_t column = begin + i % chunks * kChunk;
    float values[kChunk];
    load_floats(x.data + (first + i / chunks) * x.stride + column, at_most<kChunk>(end - column), x.is_aligned, values);
    largest = max(largest, amax_bits(values));
  }
  largest = block_max(largest);
  if (threadIdx.x == 0) result(largest, static_cast<std::int64_t>(blockIdx.y) * gridDim.x + blockIdx.x);
}

template <typename F>
__global__ void tensor_scale_kernel(const float* amax, float* scale) {
  *scale = float_scale(*amax, F::kLargest);
}

__global__ void global_scale_kernel(const float* amax, ScaleSearch search, float* global) { *global = nvfp4_global(*amax, search); }

// Where codes go, and how elements are drawn.
struct Codes {
  std::uint8_t* data;
  std::int64_t row_bytes;
  bool is_aligned;
  bool is_stochastic;
  std::uint64_t seed;
};

// Divides all by one number, correctly rounded as the operator does, in three instructions each: Markstein 1990, "Computation of
// elementary functions on the IBM RISC System/6000 processor", theorem 2. Far from 1 its products could leave the range of float.
template <int N>
__device__ void divide_all(float (&x)[N], float divisor) {
  if (divisor > 0x1p-60f && divisor < 0x1p60f) {
    const float reciprocal = 1.0f / divisor;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float quotient = x[i] * reciprocal;
      x[i] = fmaf(fmaf(-divisor, quotient, x[i]), reciprocal, quotient);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = x[i] / divisor;
  }
}

// The codes of N elements as words. The instruction for FP8 differs from encode() in the sign of NaN alone.
template <typename F, int N>
__device__ void encode_words(const float (&x)[N], std::uint32_t (&words)[N * F::kBits / 32]) {
  constexpr int kPerWord = 32 / F::kBits;
#pragma unroll
  for (int w = 0; w < N / kPerWord; ++w) {
    words[w] = 0;
    if constexpr (F::kBits == 4) {
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) words[w] += static_cast<std::uint32_t>(encode<F>(x[w * kPerWord + i])) << (4 * i);
    } else {
      constexpr __nv_fp8_interpretation_t kKind = std::is_same_v<F, E4M3> ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
      for (int i = 0; i < kPerWord; i += 2) {
        const std::uint32_t pair = __nv_cvt_float2_to_fp8x2({x[w * kPerWord + i], x[w * kPerWord + i + 1]}, __NV_SATFINITE, kKind);
        words[w] |= pair << (8 * i);
      }
    }
  }
}

template <typename F, int N>
__device__ void draw_words(const float (&x)[N], std::int64_t row, std::int64_t column, std::uint64_t seed,
                           std::uint32_t (&words)[N * F::kBits / 32]) {
  constexpr int kPerWord = 32 / F::kBits;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const auto random = philox(seed, static_cast<std::uint64_t>(column + i) / 4, static_cast<std::uint64_t>(row));
    std::uint32_t four = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) four |= static_cast<std::uint32_t>(encode_stochastic<F>(x[i + j], random[j])) << (F::kBits * j);
    if (i % kPerWord == 0) words[i / kPerWord] = four;
    else words[i / kPerWord] |= four << 16;
  }
}

// Writes the codes of the chunk at [row, column], `count` of whose elements are there; the others are 0.
template <typename F, int N>
__device__ void store_codes(float (&x)[N], float scale, int count, std::int64_t row, std::int64_t column, const Codes& codes) {
  divide_all(x, scale);
  std::uint32_t words[N * F::kBits / 32];
  if (codes.is_stochastic) draw_words<F>(x, row, column, codes.seed, words);
  else encode_words<F>(x, words);
  std::uint8_t* out = codes.data + row * codes.row_bytes + column * F::kBits / 8;
  if (codes.is_aligned && count == N) {
    if constexpr (N * F::kBits == 64) *reinterpret_cast<uint2*>(out) = {words[0], words[1]};
    else *reinterpret_cast<uint4*>(out) = {words[0], words[1], words[2], words[3]};
  } else {
    const int bytes = (count * F::kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < N * F::kBits / 8; ++i)
      if (i < bytes) out[i] = static_cast<std::uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

template <typename F, typename T>
__global__ void encode_kernel(const Rows<const T> x, const FloatScales scales, const Codes codes) {
  const std::int64_t row = my_row(), column = my_chunk() * kChunk;
  if (column >= x.columns || row >= x.rows) return;
  float values[kChunk];
  const int count = at_most<kChunk>(x.columns - column);
  load_floats(x.data + row * x.stride + column, count, x.is_aligned, values);
  store_codes<F>(values, scales.at(row, column), count, row, column, codes);
}

// A block of threads takes a row, with a scale of its own; what it reads twice is in the first-level cache the second time.
template <typename F, typename T>
__global__ void encode_rows_kernel(const Rows<const T> x, float* scales, const Codes codes) {
  const std::int64_t row = blockIdx.x;
  const T* from = x.data + row * x.stride;
  std::uint32_t largest = 0;
  float values[kChunk];
  for (std::int64_t column = threadIdx.x * kChunk; column < x.columns; column += kBlock * kChunk) {
    load_floats(from + column, at_most<kChunk>(x.columns - column), x.is_aligned, values);
    largest = max(largest, amax_bits(values));
  }
  const float scale = float_scale(std::bit_cast<float>(block_max(largest)), F::kLargest);
  if (threadIdx.x == 0) scales[row] = scale;
  for (std::int64_t column = threadIdx.x * kChunk; column < x.columns; column += kBlock * kChunk) {
    const int count = at_most<kChunk>(x.columns - column);
    load_floats(from + column, count, x.is_aligned, values);
    store_codes<F>(values, scale, count, row, column, codes);
  }
}

struct MxScale {
  static constexpr int kSize = kMxBlock;
  MxRounding rounding;
  __device__ ByteScale operator()(const float (&)[kSize], float amax) const { return mxfp4_scale(amax, rounding); }
};

template <ScaleSearch search>
struct NvScale {
  static constexpr int kSize = kNvBlock;
  const float* global;
  ScaleRounding rounding;
  __device__ ByteScale operator()(const float (&x)[kSize], float amax) const { return nvfp4_scale(x, amax, *global, rounding, search); }
};

template <typename T, typename Scale>
__global__ void encode_blocks_kernel(const Rows<const T> x, const Scale scale_of, std::uint8_t* scales, std::int64_t scale_stride,
                                     const Codes codes) {
  constexpr int kSize = Scale::kSize;
  const std::int64_t row = my_row(), block = my_chunk(), column = block * kSize;
  if (column >= x.columns || row >= x.rows) return;
  float values[kSize];
  const int count = at_most<kSize>(x.columns - column);
  load_floats(x.data + row * x.stride + column, count, x.is_aligned, values);
  const ByteScale scale = scale_of(values, std::bit_cast<float>(amax_bits(values)));
  scales[row * scale_stride + block] = scale.code;
  store_codes<E2M1>(values, scale.value, count, row, column, codes);
}

Codes codes_of(const QuantizeArgs& args) {
  const std::int64_t row_bytes = args.codes.shape[1];
  return {.data = args.codes.as<std::uint8_t>(),
          .row_bytes = row_bytes,
          .is_aligned = reinterpret_cast<std::uintptr_t>(args.codes.data) % 16 == 0 && row_bytes % 16 == 0,
          .is_stochastic = args.seed.has_value(),
          .seed = args.seed.value_or(0)};
}

template <typename F, typename T>
void quantize_float_scales(const QuantizeArgs& args, const ExecContext& ctx) {
  const Rows<const T> x(args.x);
  float* scales = args.scales.as<float>();
  const Codes codes = codes_of(args);
  if (args.spec.is_fp8() && args.spec.grain == ScaleGrain::channel) {
    encode_rows_kernel<F><<<static_cast<unsigned>(x.rows), kBlock, 0, stream_of(ctx)>>>(x, scales, codes);
    return;
  }
  if (args.spec.needs_amax()) {
    tensor_scale_kernel<F><<<1, 1, 0, stream_of(ctx)>>>(args.amax.as<float>(), scales);
  } else {
    HEDDLE_CHECK(args.scales.shape[0] <= kMostRows, "quantize: at most ", kMostRows, " rows of blocks, got ", args.scales.shape[0]);
    const dim3 tiles(static_cast<unsigned>(args.scales.shape[1]), static_cast<unsigned>(args.scales.shape[0]));
    amax_tiles<<<tiles, kBlock, 0, stream_of(ctx)>>>(x, kFp8Block, kFp8Block, ScaleOfTile<F>{scales});
  }
  check_launch("quantize");
  const bool is_flat = args.spec.needs_amax() && !args.seed;  // draws go by row and column
  const Rows<const T> chunks = is_flat ? x.flat(2 * kChunk) : x;
  encode_kernel<F><<<chunk_grid(chunks.rows, chunks.columns, kChunk), kBlock, 0, stream_of(ctx)>>>(
      chunks, float_scales_of(args.spec, args.scales), codes);
}

template <typename T, typename Scale>
void quantize_blocks(const QuantizeArgs& args, const Scale& scale, const ExecContext& ctx) {
  const Rows<const T> rows(args.x), x = args.seed ? rows : rows.flat(kMxBlock);
  encode_blocks_kernel<<<chunk_grid(x.rows, x.columns, Scale::kSize), kBlock, 0, stream_of(ctx)>>>(
      x, scale, args.scales.as<std::uint8_t>(), args.scales.shape[1], codes_of(args));
}

template <typename T>
void quantize_nvfp4(const QuantizeArgs& args, const ExecContext& ctx) {
  float* global = args.global.as<float>();
  const ScaleRounding rounding = args.spec.scale_rounding;
  global_scale_kernel<<<1, 1, 0, stream_of(ctx)>>>(args.amax.as<float>(), args.spec.scale_search, global);
  check_launch("quantize");
  switch (args.spec.scale_search) {
    case ScaleSearch::none: return quantize_blocks<T>(args, NvScale<ScaleSearch::none>{global, rounding}, ctx);
    case ScaleSearch::four_over_six: return quantize_blocks<T>(args, NvScale<ScaleSearch::four_over_six>{global, rounding}, ctx);
    case ScaleSearch::mse: return quantize_blocks<T>(args, NvScale<ScaleSearch::mse>{global, rounding}, ctx);
  }
}

}  // namespace

void amax(const AmaxArgs& args, const ExecContext& ctx) {
  auto* out = reinterpret_cast<unsigned*>(args.out.as<float>());
  if (args.write == Write::assign) HEDDLE_CUDA_CHECK(cudaMemsetAsync(out, 0, sizeof(float), stream_of(ctx)));
  if (args.x.numel() == 0) return;
  dispatch_stored(args.x.dtype, "amax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Rows<const T> x = Rows<const T>(args.x).flat(1);
    constexpr std::int64_t kWidth = 8 * kChunk * kBlock;
    const std::int64_t height = (x.rows + kMostRows - 1) / kMostRows;
    const dim3 tiles(static_cast<unsigned>((x.columns + kWidth - 1) / kWidth), static_cast<unsigned>((x.rows + height - 1) / height));
    amax_tiles<<<tiles, kBlock, 0, stream_of(ctx)>>>(x, height, kWidth, MaxInto{out});
  });
  check_launch("amax");
}

void quantize(const QuantizeArgs& args, const ExecContext& ctx) {
  if (args.x.numel() == 0) return;
  dispatch_stored(args.x.dtype, "quantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (args.spec.format) {
      case QuantFormat::fp8_e4m3: return quantize_float_scales<E4M3, T>(args, ctx);
      case QuantFormat::fp8_e5m2: return quantize_float_scales<E5M2, T>(args, ctx);
      case QuantFormat::fp4: return quantize_float_scales<E2M1, T>(args, ctx);
      case QuantFormat::mxfp4: return quantize_blocks<T>(args, MxScale{args.spec.mx_rounding}, ctx);
      case QuantFormat::nvfp4: return quantize_nvfp4<T>(args, ctx);
    }
  });
  check_launch("quantize");
}

}  // namespace heddle::cuda
