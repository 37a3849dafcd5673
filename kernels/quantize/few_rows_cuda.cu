#include "kernels/quantize/few_rows.h"

#include "kernels/quantize/code_scales.cuh"
#include "kernels/quantize/half_pairs.cuh"

namespace heddle::cuda {
namespace {

constexpr int kWarps = kBlock / 32;

template <typename T>
struct FewRows {
  int M;
  const T* x;
  std::int64_t x_stride;
  T* out;
  std::int64_t out_stride;
  const T* bias;
  bool accumulates;
  std::int64_t rows, columns;  // of the weight
  const std::uint8_t* codes;
  std::int64_t row_bytes;

  explicit FewRows(const QuantGemmArgs& args)
      : M(static_cast<int>(args.x.shape[0])), x(args.x.as<T>()), x_stride(args.x.strides[0]), out(args.out.as<T>()), out_stride(args.out.strides[0]),
        bias(args.bias.defined() ? args.bias.as<T>() : nullptr), accumulates(args.write == Write::accumulate), rows(args.w.rows),
        columns(args.w.columns), codes(args.w.codes.as<std::uint8_t>()), row_bytes(args.w.codes.shape[1]) {}

  __device__ void store(float sum, int m, std::int64_t row) const {
    T& to = out[m * out_stride + row];
    if (bias != nullptr) sum += convert<float>(bias[row]);
    if (accumulates) sum += convert<float>(to);
    to = convert<T>(sum);
  }
};

// Note: Few rows on the tensor cores
// A warp multiplies two tiles of 16 rows of the weight, 64 columns at a time, with 8 or 16 rows of x; a block's warps share the rows and take turns
// at the columns, and their sums are added at the end. Which 16 of the 64 terms meet in one product is free as long as both operands have the same:
// lane 4 g + t reads 16 columns that lie together, from 16 t on, of each of its four rows of the weight. A block scale is that of a lane's 16
// columns, and codes times block scales are exact in bfloat16, and in float16 where the scales are E4M3. A float32 scale is that of all 64 columns,
// and multiplies the sums.

constexpr int kLaneColumns = 16, kWarpColumns = 4 * kLaneColumns, kStep = kWarps * kWarpColumns;
constexpr int kTile = 16, kTiles = 2, kLaneRows = 2 * kTiles, kBlockRows = kTile * kTiles;
static_assert(kLaneColumns == kNvBlock && kFp8Block % kWarpColumns == 0);

// E2M1 codes in the place of the last exponent bits and the first of the mantissa are as large as their values over kFactor. A block scale in E4M3,
// at most 448, makes up for kScaled of that as long as it stays in the type's range; the rest is left to the sum.
template <typename Half>
struct Fp4Fields;
template <>
struct Fp4Fields<bfloat16> {
  static constexpr int kPlace = 6;
  static constexpr float kFactor = 0x1p126f, kScaled = 0x1p112f;
};
template <>
struct Fp4Fields<float16> {
  static constexpr int kPlace = 9;
  static constexpr float kFactor = 0x1p14f, kScaled = 0x1p6f;
};

// Eight E2M1 codes times `factor`, as pairs of the j-th and the (j + 4)-th, so that all are found by the same shifts.
template <typename Half>
__device__ void decode_pairs(std::uint32_t word, std::uint32_t factor, std::uint32_t (&pairs)[4]) {
  constexpr int kPlace = Fp4Fields<Half>::kPlace;
  constexpr auto moved = [](std::uint32_t word, int left) { return left >= 0 ? word << left : word >> -left; };
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t magnitudes = moved(word, kPlace - 4 * j) & (0x00070007u << kPlace), signs = moved(word, 12 - 4 * j) & 0x80008000u;
    pairs[j] = products(Half{}, magnitudes | signs, factor);
  }
}

// Eight FP8 codes as pairs of neighbours.
template <typename F, typename Half>
__device__ void decode_pairs(const std::uint32_t* words, std::uint32_t (&pairs)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto codes = static_cast<__nv_fp8x2_storage_t>(words[j / 2] >> (j % 2 * 16));
    const __half2 pair(__nv_cvt_fp8x2_to_halfraw2(codes, std::is_same_v<F, E4M3> ? __NV_E4M3 : __NV_E5M2));
    if constexpr (std::is_same_v<Half, float16>) {
      pairs[j] = reinterpret_cast<const std::uint32_t&>(pair);
    } else {
      const float2 both = __half22float2(pair);
      pairs[j] = pair_of(Half{}, both.x, both.y);
    }
  }
}

// Eight of a row of x in the order of decode_pairs().
template <typename F>
__device__ void order_pairs(const uint4& x, std::uint32_t (&pairs)[4]) {
  if constexpr (F::kBits == 4) {
    constexpr unsigned kLows = 0x5410, kHighs = 0x7632;
    pairs[0] = __byte_perm(x.x, x.z, kLows), pairs[1] = __byte_perm(x.x, x.z, kHighs);
    pairs[2] = __byte_perm(x.y, x.w, kLows), pairs[3] = __byte_perm(x.y, x.w, kHighs);
  } else {
    pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
  }
}

// What a lane has of the weight at a time: codes, and scales that are bytes, of rows that are 8 apart.
template <typename F, typename Half, typename Scale>
struct LanePart {
  CodeWords<F, kLaneColumns> codes[kLaneRows] = {};
  std::uint8_t scales[kLaneRows] = {};

  // Eight columns of the i-th row and the next, as operands of two products.
  __device__ void operands(int i, int half, std::uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t pairs[4];
      const std::uint32_t* words = codes[i + r].at + half * (F::kBits / 4);
      if constexpr (F::kBits == 8) decode_pairs<F, Half>(words, pairs);
      else decode_pairs<Half>(*words, factor(i + r), pairs);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (Scale::kIsByte && !kIsE4M3) pairs[j] = products(Half{}, pairs[j], twice(Scale::in_block(scales[i + r])));
        a[j / 2][j % 2 * 2 + r] = pairs[j];
      }
    }
  }

  static constexpr bool kIsE4M3 = std::is_same_v<Scale, E4M3Scale>;
  static constexpr float kOfSum = kIsE4M3 ? Fp4Fields<Half>::kFactor / Fp4Fields<Half>::kScaled : 1.0f;

 private:
  static __device__ std::uint32_t twice(float x) { return pair_of(Half{}, x, x); }
  __device__ std::uint32_t factor(int i) const {
    if constexpr (kIsE4M3) return twice(Scale::in_block(scales[i]) * Fp4Fields<Half>::kScaled);
    else return twice(Fp4Fields<Half>::kFactor);
  }
};

// Where the parts are, kStep columns apart.
template <typename F, typename Half, typename Scale>
class LaneParts {
 public:
  __device__ LaneParts(const FewRows<Half>& p, const Scale& scale_of, const std::int64_t (&rows)[kLaneRows], std::int64_t column) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      codes_[i] = p.codes + rows[i] * p.row_bytes + column * F::kBits / 8;
      if constexpr (Scale::kIsByte) scales_[i] = scale_of.address(rows[i], column);
    }
  }

  __device__ LanePart<F, Half, Scale> take(bool is_there) {
    LanePart<F, Half, Scale> part;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (is_there) part.codes[i] = load_codes<F, kLaneColumns>(codes_[i]);
      codes_[i] += kStep * F::kBits / 8;
      if constexpr (Scale::kIsByte) {
        if (is_there) part.scales[i] = *scales_[i];
        scales_[i] += kStep / Scale::kSize;
      }
    }
    return part;
  }

 private:
  const std::uint8_t* codes_[kLaneRows];
  const std::uint8_t* scales_[kLaneRows];
};

// kGroups of 8 rows of x.
template <typename F, int kGroups, typename Half, typename Scale>
__global__ void __launch_bounds__(kBlock, 2) few_rows_kernel(const __grid_constant__ FewRows<Half> p, const Scale scale_of) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kBlockRows;
  std::int64_t rows[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) rows[i] = min(first + g + 8 * i, p.rows - 1);
  int column = warp * kWarpColumns + t * kLaneColumns;
  const int columns = static_cast<int>(p.columns);
  LaneParts<F, Half, Scale> parts_of(p, scale_of, rows, column);
  const Half* x_rows = p.x + g * p.x_stride + column;
  float sums[kTiles][kGroups][4] = {};
  auto part = parts_of.take(column < columns);
  for (int begin = warp * kWarpColumns; begin < columns; begin += kStep) {
    const auto next = parts_of.take(column + kStep < columns);
    uint4 x[kGroups][2] = {};
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
      if (g + 8 * n < p.M && column < columns) {
        x[n][0] = *reinterpret_cast<const uint4*>(x_rows + 8 * n * p.x_stride);
        x[n][1] = *reinterpret_cast<const uint4*>(x_rows + 8 * n * p.x_stride + 8);
      }
    float unscaled[kTiles][kGroups][4] = {};
    auto& into = Scale::kIsByte ? sums : unscaled;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t b[kGroups][4];
#pragma unroll
      for (int n = 0; n < kGroups; ++n) order_pairs<F>(x[n][half], b[n]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        std::uint32_t a[2][4];
        part.operands(2 * i, half, a);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          multiply_add(Half{}, a[0], {b[n][0], b[n][1]}, into[i][n]);
          multiply_add(Half{}, a[1], {b[n][2], b[n][3]}, into[i][n]);
        }
      }
    }
    if constexpr (!Scale::kIsByte) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float scale = scale_of.at(rows[2 * i + r], begin);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) {
            sums[i][n][2 * r] = fmaf(scale, unscaled[i][n][2 * r], sums[i][n][2 * r]);
            sums[i][n][2 * r + 1] = fmaf(scale, unscaled[i][n][2 * r + 1], sums[i][n][2 * r + 1]);
          }
        }
    }
    part = next;
    column += kStep;
    x_rows += kStep;
  }

  __shared__ float parts[kWarps][8 * kGroups][kBlockRows + 1];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) parts[warp][8 * n + 2 * t + c % 2][kTile * i + g + c / 2 * 8] = sums[i][n][c];
  __syncthreads();
  for (int e = threadIdx.x; e < p.M * kBlockRows; e += kBlock) {
    const int m = e / kBlockRows, r = e % kBlockRows;
    if (first + r >= p.rows) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w][m][r];
    p.store(scale_of.of_sum(sum * LanePart<F, Half, Scale>::kOfSum), m, first + r);
  }
}

// float32: a warp takes one row of the weight; its lanes decode neighbouring chunks, multiply them with kM rows of x, and add up their sums.
constexpr int kCodeChunk = 8;  // of which all share a scale
static_assert(kNvBlock % kCodeChunk == 0);
template <typename F, int kM, typename Scale>
__global__ void few_float_rows_kernel(const __grid_constant__ FewRows<float> p, const Scale scale_of) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  float sums[kM] = {};
  for (std::int64_t column = lane * kCodeChunk; column < p.columns; column += 32 * kCodeChunk) {
    const auto words = load_codes<F, kCodeChunk>(p.codes + row * p.row_bytes + column * F::kBits / 8);
    const float scale = scale_of.at(row, column);
#pragma unroll
    for (int i = 0; i < kCodeChunk; i += 4)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float4 x = *reinterpret_cast<const float4*>(p.x + m * p.x_stride + column + i);
        sums[m] = fmaf(x.x, words.value(i) * scale, sums[m]);
        sums[m] = fmaf(x.y, words.value(i + 1) * scale, sums[m]);
        sums[m] = fmaf(x.z, words.value(i + 2) * scale, sums[m]);
        sums[m] = fmaf(x.w, words.value(i + 3) * scale, sums[m]);
      }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[m] += __shfl_xor_sync(0xFFFFFFFFu, sums[m], step);
    if (lane == 0) p.store(sums[m], m, row);
  }
}

unsigned blocks_of(std::int64_t rows, int each) { return static_cast<unsigned>((rows + each - 1) / each); }

template <typename F, typename T, typename Scale>
void launch(const QuantGemmArgs& args, const Scale& scale, const ExecContext& ctx) {
  const FewRows<T> p(args);
  if constexpr (std::is_same_v<T, float>) {
    const auto run = [&]<int kM>(std::integral_constant<int, kM>) {
      few_float_rows_kernel<F, kM><<<blocks_of(p.rows, kWarps), kBlock, 0, stream_of(ctx)>>>(p, scale);
    };
    switch (p.M) {
      case 1: return run(std::integral_constant<int, 1>{});
      case 2: return run(std::integral_constant<int, 2>{});
      case 3: return run(std::integral_constant<int, 3>{});
      default: return run(std::integral_constant<int, 4>{});
    }
  } else if (p.M <= 8) {
    few_rows_kernel<F, 1><<<blocks_of(p.rows, kBlockRows), kBlock, 0, stream_of(ctx)>>>(p, scale);
  } else {
    few_rows_kernel<F, 2><<<blocks_of(p.rows, kBlockRows), kBlock, 0, stream_of(ctx)>>>(p, scale);
  }
}

bool is_wide(const ConstView& view) {
  const auto bytes = static_cast<std::int64_t>(dtype_size(view.dtype));
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && (view.strides[0] * bytes % 16 == 0 || view.shape[0] == 1);
}

constexpr std::int64_t kMostColumns = 1 << 30;  // that kernels can count

// Whole pieces at aligned addresses. E8M0 scales are not all numbers of float16.
bool is_taken(const QuantGemmArgs& args) {
  const QuantView& w = args.w;
  const bool is_float = args.x.dtype == DType::f32;
  return !args.of_rows && args.x.shape[0] <= (is_float ? 4 : 16) && w.columns % (is_float ? kCodeChunk : kLaneColumns) == 0 &&
         w.columns <= kMostColumns && is_wide(args.x) &&
         args.x.strides[1] == 1 && args.out.strides[1] == 1 && (!args.bias.defined() || args.bias.is_contiguous()) &&
         reinterpret_cast<std::uintptr_t>(w.codes.data) % 16 == 0 && !(args.x.dtype == DType::f16 && w.spec.format == QuantFormat::mxfp4);
}

}  // namespace

bool few_rows_product(const QuantGemmArgs& args, const ExecContext& ctx) {
  if (!is_taken(args)) return false;
  dispatch_stored(args.x.dtype, "quant_gemm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_scales(args.w, [&]<typename F>(F, const auto& scale) { launch<F, T>(args, scale, ctx); });
  });
  check_launch("quant_gemm");
  return true;
}

}  // namespace heddle::cuda
