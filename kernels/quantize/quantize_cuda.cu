#include "kernels/quantize/encode_codes.cuh"
#include "kernels/quantize/nvfp4_scale.cuh"
#include "kernels/quantize/row_blocks.h"

namespace heddle::cuda {
namespace {

// The largest of the block's threads; of values that are not negative.
__device__ float block_max(float value) {
  __shared__ std::uint32_t warps[kBlock / 32];
  const std::uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, bits_of(value));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, threadIdx.x % 32 < kBlock / 32 ? warps[threadIdx.x % 32] : 0u));
}

// Bits of non-negative floats are in the order of the floats, NaN above all.
__device__ std::uint32_t amax_bits(const float (&x)[kChunk]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) largest = max(largest, bits_of(x[i]) & 0x7FFFFFFFu);
  return largest;
}

// A block of threads takes `height` rows, kAmaxColumns wide.
constexpr std::int64_t kAmaxColumns = 8 * kChunk * kBlock;
template <typename T>
__global__ void amax_kernel(const Rows<const T> x, std::int64_t height, unsigned* out) {
  const std::int64_t last = min(static_cast<std::int64_t>(blockIdx.y + 1) * height, x.rows);
  const std::int64_t begin = blockIdx.x * kAmaxColumns, end = min(begin + kAmaxColumns, x.columns);
  std::uint32_t largest = 0;
  for (std::int64_t row = blockIdx.y * height; row < last; ++row)
    for (std::int64_t column = begin + threadIdx.x * kChunk; column < end; column += kBlock * kChunk) {
      Chunk<T> chunk;
      chunk.load(x.data + row * x.stride + column, at_most<kChunk>(end - column), x.is_aligned);
      float values[kChunk];
      chunk.unpack(values);
      largest = max(largest, amax_bits(values));
    }
  largest = bits_of(block_max(__uint_as_float(largest)));
  if (threadIdx.x == 0) atomicMax(out, largest);
}

template <typename F>
__global__ void tensor_scale_kernel(const float* amax, float* scale) {
  *scale = float_scale(*amax, F::kLargest);
}

__global__ void global_scale_kernel(const float* amax, ScaleSearch search, float* global) { *global = nvfp4_global(*amax, search); }

template <typename F, typename T>
__global__ void __launch_bounds__(kBlock, 4) encode_kernel(const Rows<const T> x, const float* scale, const Codes codes) {
  const float divisor = *scale;
  for_chunks(x, [&](const Chunk<T>& chunk, int count, std::int64_t row, std::int64_t column) {
    if (count <= 0) return;
    float values[kChunk];
    chunk.unpack(values);
    store_codes<F>(values, divisor, count, row, column, codes);
  });
}

// A block of threads takes a row, with a scale of its own; what it reads twice is in the first-level cache the second time.
template <typename F, typename T>
__global__ void encode_rows_kernel(const Rows<const T> x, float* scales, const Codes codes) {
  const std::int64_t row = blockIdx.x;
  const T* from = x.data + row * x.stride;
  Chunk<T> chunk;
  float largest = 0.0f, values[kChunk];
  for (std::int64_t column = threadIdx.x * kChunk; column < x.columns; column += kTurn) {
    chunk.load(from + column, at_most<kChunk>(x.columns - column), x.is_aligned);
    largest = fmaxf(largest, chunk.largest());
  }
  const float scale = float_scale(block_max(largest), F::kLargest);
  if (threadIdx.x == 0) scales[row] = scale;
  for (std::int64_t column = threadIdx.x * kChunk; column < x.columns; column += kTurn) {
    const int count = at_most<kChunk>(x.columns - column);
    chunk.load(from + column, count, x.is_aligned);
    chunk.unpack(values);
    store_codes<F>(values, scale, count, row, column, codes);
  }
}

// The threads of a block of kFp8Block columns are neighbours.
template <typename T>
__global__ void __launch_bounds__(kBlock, 4) encode_row_blocks_kernel(const Rows<const T> x, float* scales, const Codes codes) {
  for_chunks(x, [&](const Chunk<T>& chunk, int count, std::int64_t row, std::int64_t column) {
    float amax = chunk.largest();
#pragma unroll
    for (int step = 1; step < kFp8Block / kChunk; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    if (count <= 0) return;
    const float scale = float_scale(amax, E4M3::kLargest);
    float values[kChunk];
    chunk.unpack(values);
    if (column % kFp8Block == 0) scales[column / kFp8Block * x.rows + row] = scale;
    store_codes<E4M3>(values, scale, count, row, column, codes);
  });
}

// A block of threads takes a tile of kFp8Block rows and columns, whose scale is at [blockIdx.y, blockIdx.x], and keeps it as it is stored, 64
// elements a thread. Without the bound the compiler keeps floats of 16-bit ones, in 132 registers.
template <typename F, typename T>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 2 ? 3 : 2) encode_tiles_kernel(const Rows<const T> x, float* scales, const Codes codes) {
  constexpr int kAcross = kFp8Block / kChunk, kStep = kBlock / kAcross, kChunks = kFp8Block / kStep;
  const std::int64_t column = blockIdx.x * kFp8Block + threadIdx.x % kAcross * kChunk;
  const std::int64_t first = blockIdx.y * kFp8Block + threadIdx.x / kAcross;
  const int count = at_most<kChunk>(x.columns - column);
  Chunk<T> chunks[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const std::int64_t row = first + i * kStep;
    chunks[i].load(x.data + row * x.stride + column, row < x.rows ? count : 0, x.is_aligned);
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) largest = fmaxf(largest, chunks[i].largest());
  const float scale = float_scale(block_max(largest), F::kLargest);
  if (threadIdx.x == 0) scales[static_cast<std::int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = scale;
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const std::int64_t row = first + i * kStep;
    if (row >= x.rows || count <= 0) continue;
    chunks[i].unpack(values);
    store_codes<F>(values, scale, count, row, column, codes);
  }
}

// The scale of the block that a chunk is a part of, from the chunk, if it is all, and the block's largest magnitude. kBlocks of threads fit into a
// multiprocessor.
struct MxScale {
  static constexpr int kSize = kMxBlock;
  static constexpr bool kIsPower = true;
  static constexpr int kBlocks = 4;
  MxRounding rounding;
  __device__ auto of_tensor() const {
    return [rounding = rounding](const float (&)[kChunk], float amax) { return mxfp4_scale(amax, rounding); };
  }
};

template <ScaleSearch search>
struct NvScale {
  static constexpr int kSize = kNvBlock;
  static constexpr bool kIsPower = false;
  static constexpr int kBlocks = search == ScaleSearch::none ? 4 : 3;
  const float* global;
  ScaleRounding rounding;
  __device__ auto of_tensor() const {
    return [scales = Nvfp4Scales(*global, rounding)](const float (&x)[kChunk], float amax) { return scales.template of_block<search>(x, amax); };
  }
};

// A block is one chunk, or those of two neighbouring threads.
template <typename T, typename Scale>
__global__ void __launch_bounds__(kBlock, Scale::kBlocks) encode_blocks_kernel(const Rows<const T> x, const Scale rule, std::uint8_t* scales,
                                                                               std::int64_t scale_stride, const Codes codes) {
  const auto scale_of = rule.of_tensor();
  for_chunks(x, [&](const Chunk<T>& chunk, int count, std::int64_t row, std::int64_t column) {
    float amax = chunk.largest();
    if constexpr (Scale::kSize == 2 * kChunk) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
    if (count <= 0) return;
    float values[kChunk];
    chunk.unpack(values);
    const ByteScale scale = scale_of(values, amax);
    if (column % Scale::kSize == 0) scales[row * scale_stride + column / Scale::kSize] = scale.code;
    if constexpr (Scale::kIsPower) store_codes<E2M1>(values, PowerOfTwo{scale.code}, count, row, column, codes);
    else store_codes<E2M1>(values, scale.value, count, row, column, codes);
  });
}

Codes codes_of(const MutView& codes, std::optional<std::uint64_t> seed) {
  const std::int64_t row_bytes = codes.shape[1];
  return {.data = codes.as<std::uint8_t>(),
          .row_bytes = row_bytes,
          .is_aligned = reinterpret_cast<std::uintptr_t>(codes.data) % 16 == 0 && row_bytes % 16 == 0,
          .is_stochastic = seed.has_value(),
          .seed = seed.value_or(0)};
}

template <typename F, typename T>
void quantize_float_scales(const QuantizeArgs& args, const ExecContext& ctx) {
  const Rows<const T> x(args.x);
  float* scales = args.scales.as<float>();
  const Codes codes = codes_of(args.codes, args.seed);
  if (args.spec.needs_amax()) {
    tensor_scale_kernel<F><<<1, 1, 0, stream_of(ctx)>>>(args.amax.as<float>(), scales);
    check_launch("quantize");
    const Rows<const T> chunks = args.seed ? x : x.flat(2 * kChunk);  // draws go by row and column
    encode_kernel<F><<<chunk_grid(chunks.rows, chunks.columns, kTurns * kChunk), kBlock, 0, stream_of(ctx)>>>(chunks, scales, codes);
  } else if constexpr (F::kBits == 8) {
    const Shape& shape = args.scales.shape;
    if (args.spec.grain == ScaleGrain::channel) {
      encode_rows_kernel<F><<<static_cast<unsigned>(shape[0]), kBlock, 0, stream_of(ctx)>>>(x, scales, codes);
    } else {
      HEDDLE_CHECK(shape[0] <= kMostRows, "quantize: at most ", kMostRows, " rows of blocks, got ", shape[0]);
      const dim3 tiles(static_cast<unsigned>(shape[1]), static_cast<unsigned>(shape[0]));
      encode_tiles_kernel<F><<<tiles, kBlock, 0, stream_of(ctx)>>>(x, scales, codes);
    }
  }
}

template <typename T, typename Scale>
void quantize_blocks(const QuantizeArgs& args, const Scale& scale, const ExecContext& ctx) {
  const Rows<const T> rows(args.x), x = args.seed ? rows : rows.flat(kMxBlock);
  encode_blocks_kernel<<<chunk_grid(x.rows, x.columns, kTurns * kChunk), kBlock, 0, stream_of(ctx)>>>(
      x, scale, args.scales.as<std::uint8_t>(), args.scales.shape[1], codes_of(args.codes, args.seed));
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
    const std::int64_t height = (x.rows + kMostRows - 1) / kMostRows;
    const dim3 grid(static_cast<unsigned>((x.columns + kAmaxColumns - 1) / kAmaxColumns), static_cast<unsigned>((x.rows + height - 1) / height));
    amax_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(x, height, out);
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

void quantize_row_blocks(const ConstView& x, const MutView& codes, const MutView& scales, const ExecContext& ctx) {
  dispatch_stored(x.dtype, "quantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Rows<const T> rows(x);
    encode_row_blocks_kernel<<<chunk_grid(rows.rows, rows.columns, kTurns * kChunk), kBlock, 0, stream_of(ctx)>>>(rows, scales.as<float>(),
                                                                                                                 codes_of(codes, {}));
  });
  check_launch("quantize");
}

}  // namespace heddle::cuda
