#include "kernels/quantize/few_rows.h"

#include "kernels/quantize/code_scales.cuh"
#include "kernels/quantize/half_pairs.cuh"

namespace heddle::cuda {
namespace {

constexpr int kMostWarps = 16;  // of a block

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
// A warp multiplies a tile of 16 rows of the weight with 8 rows of x, or two tiles with 16 rows, as many columns at a time as four lanes'
// 16 bytes of codes are; a block's warps share the rows and take turns at the columns, and their sums are added at the end. Which 16 terms
// meet in one product is free as long as both operands have the same: lane 4 g + t reads columns that lie together, the t-th of four such
// pieces, of each of its rows of the weight. Of E2M1 lanes 2 and 3 of four take the second half of theirs first, so that less of x is in the
// same banks of the first-level cache. Block scales are those of a lane's columns, and codes times block scales are exact in bfloat16,
// and in float16 where the scales are E4M3. A float32 scale is that of all columns of a step, and multiplies the sums.

constexpr int kTile = 16;

// Columns of a lane and a warp at a time.
template <typename F>
constexpr int kLaneColumns = 128 / F::kBits;
template <typename F>
constexpr int kWarpColumns = 4 * kLaneColumns<F>;
static_assert(kFp8Block % kWarpColumns<E4M3> == 0 && kLaneColumns<E2M1> == kMxBlock && kLaneColumns<E2M1> == 2 * kNvBlock);

// Eight codes as pairs, of E2M1 times `factor`: there the j-th and the (j + 4)-th make one, so that all are found by the same shifts.
template <typename F, typename Half>
__device__ void decode_pairs(const std::uint32_t* words, std::uint32_t factor, std::uint32_t (&pairs)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (F::kBits == 4) pairs[j] = decode_pair<Half>(words[0], j, factor);
    else pairs[j] = decode_pair<F, Half>(words[j / 2] >> (j % 2 * 16));
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

// What a lane has of the weight at a time: 16 bytes of codes, and their scales if those are bytes, of kRows rows that are 8 apart.
template <typename F, int kRows, typename Half, typename Scale>
struct LanePart {
  CodeWords<F, kLaneColumns<F>> codes[kRows] = {};
  std::uint16_t scales[kRows] = {};

  // Eight columns, the piece-th, of the i-th row and the next, as operands of two products.
  __device__ void operands(int i, int piece, std::uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t pairs[4];
      decode_pairs<F, Half>(codes[i + r].at + piece * (F::kBits / 4), factor(i + r, piece), pairs);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kIsE8M0) pairs[j] = products(Half{}, pairs[j], twice(Scale::in_block(static_cast<std::uint8_t>(scales[i + r]))));
        a[j / 2][j % 2 * 2 + r] = pairs[j];
      }
    }
  }

  // Of E2M1.
  __device__ void swap_halves() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      auto& words = codes[i].at;
      const std::uint32_t first = words[0], second = words[1];
      words[0] = words[2], words[1] = words[3], words[2] = first, words[3] = second;
      if constexpr (kIsE4M3) scales[i] = static_cast<std::uint16_t>(scales[i] >> 8 | scales[i] << 8);
    }
  }

  static constexpr bool kIsE4M3 = std::is_same_v<Scale, E4M3Scale>, kIsE8M0 = std::is_same_v<Scale, E8M0Scale>;
  static constexpr float kOfSum = kIsE4M3 ? Fp4Fields<Half>::kFactor / Fp4Fields<Half>::kScaled : 1.0f;

 private:
  static __device__ std::uint32_t twice(float x) { return pair_of(Half{}, x, x); }
  __device__ std::uint32_t factor(int i, int piece) const {
    if constexpr (kIsE4M3) return twice(Scale::in_block(static_cast<std::uint8_t>(scales[i] >> (piece / 2 * 8))) * Fp4Fields<Half>::kScaled);
    else return twice(Fp4Fields<Half>::kFactor);
  }
};

// Where the parts are, `step` columns apart.
template <typename F, int kRows, typename Half, typename Scale>
class LaneParts {
 public:
  __device__ LaneParts(const FewRows<Half>& p, const Scale& scale_of, const std::int64_t (&rows)[kRows], std::int64_t column) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      codes_[i] = p.codes + rows[i] * p.row_bytes + column * F::kBits / 8;
      if constexpr (Scale::kIsByte) scales_[i] = scale_of.address(rows[i], column);
    }
  }

  __device__ LanePart<F, kRows, Half, Scale> take(bool is_there, int step) {
    LanePart<F, kRows, Half, Scale> part;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (is_there) part.codes[i] = load_codes<F, kLaneColumns<F>>(codes_[i]);
      codes_[i] += step / (8 / F::kBits);
      if constexpr (Scale::kIsByte) {
        if (is_there) part.scales[i] = Scale::kSize == kNvBlock ? *reinterpret_cast<const std::uint16_t*>(scales_[i]) : *scales_[i];
        scales_[i] += step / Scale::kSize;
      }
    }
    return part;
  }

 private:
  const std::uint8_t* codes_[kRows];
  const std::uint8_t* scales_[kRows];
};

// kTiles of the weight and of x. A multiprocessor has registers for 32 / kTiles such warps.
template <typename F, int kTiles, typename Half, typename Scale>
__global__ void __launch_bounds__(32 * kMostWarps, 32 / kMostWarps / kTiles)
few_rows_kernel(const __grid_constant__ FewRows<Half> p, const Scale scale_of) {
  constexpr int kRows = 2 * kTiles;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kTile * kTiles);
  std::int64_t rows[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = min(first + g + 8 * i, p.rows - 1);
  const int columns = static_cast<int>(p.columns), warps = static_cast<int>(blockDim.x) / 32, step = warps * kWarpColumns<F>;
  int column = warp * kWarpColumns<F> + t * kLaneColumns<F>;
  LaneParts<F, kRows, Half, Scale> parts_of(p, scale_of, rows, column);
  const bool is_swapped = F::kBits == 4 && t >= 2;
  const Half* x_row = p.x + g * p.x_stride + column;
  float sums[kTiles][kTiles][4] = {};
  auto part = parts_of.take(column < columns, step);
  for (int begin = warp * kWarpColumns<F>; begin < columns; begin += step) {
    const auto next = parts_of.take(column + step < columns, step);
    if constexpr (F::kBits == 4)
      if (is_swapped) part.swap_halves();
    const Half *x_first = x_row + (is_swapped ? 16 : 0), *x_second = x_row - (is_swapped ? 16 : 0);
    float unscaled[kTiles][kTiles][4] = {};
    auto& into = Scale::kIsByte ? sums : unscaled;
#pragma unroll
    for (int piece = 0; piece < kLaneColumns<F> / 8; ++piece) {
      std::uint32_t b[kTiles][4];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const Half* from = (piece < 2 ? x_first : x_second) + 8 * n * p.x_stride + 8 * piece;
        uint4 x = {};
        if (g + 8 * n < p.M && column < columns) x = *reinterpret_cast<const uint4*>(from);
        order_pairs<F>(x, b[n]);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        std::uint32_t a[2][4];
        part.operands(2 * i, piece, a);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          multiply_add(Half{}, a[0], {b[n][0], b[n][1]}, into[i][n]);
          multiply_add(Half{}, a[1], {b[n][2], b[n][3]}, into[i][n]);
        }
      }
    }
    if constexpr (!Scale::kIsByte) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float scale = scale_of.stored(rows[i], begin);
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& sum = sums[i / 2][n][i % 2 * 2 + c];
            sum = fmaf(scale, unscaled[i / 2][n][i % 2 * 2 + c], sum);
          }
      }
    }
    part = next;
    column += step;
    x_row += step;
  }

  __shared__ float parts[kMostWarps][8 * kTiles][kTile * kTiles + 1];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) parts[warp][8 * n + 2 * t + c % 2][kTile * i + g + c / 2 * 8] = sums[i][n][c];
  __syncthreads();
  for (int e = threadIdx.x; e < p.M * kTile * kTiles; e += static_cast<int>(blockDim.x)) {
    const int m = e / (kTile * kTiles), r = e % (kTile * kTiles);
    if (first + r >= p.rows) continue;
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += parts[w][m][r];
    p.store(scale_of.of_sum(sum * LanePart<F, kRows, Half, Scale>::kOfSum), m, first + r);
  }
}

// float32: a warp takes one row of the weight; its lanes decode neighbouring chunks, multiply them with the rows of x, and add up their sums.
constexpr int kMostFloatRows = 4;
constexpr int kCodeChunk = 8;  // of which all share a scale
static_assert(kNvBlock % kCodeChunk == 0);
template <typename F, typename Scale>
__global__ void few_float_rows_kernel(const __grid_constant__ FewRows<float> p, const Scale scale_of) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kBlock / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const auto& scale_at = scale_of.of_tensor();
  float sums[kMostFloatRows] = {};
  for (std::int64_t column = lane * kCodeChunk; column < p.columns; column += 32 * kCodeChunk) {
    const auto words = load_codes<F, kCodeChunk>(p.codes + row * p.row_bytes + column * F::kBits / 8);
    const float scale = scale_at.value(scale_at.stored(row, column));
    float values[kCodeChunk];
    words.values(values);
#pragma unroll
    for (int i = 0; i < kCodeChunk; i += 4)
#pragma unroll
      for (int m = 0; m < kMostFloatRows; ++m) {
        if (m >= p.M) continue;
        const float4 x = *reinterpret_cast<const float4*>(p.x + m * p.x_stride + column + i);
        sums[m] = fmaf(x.x, values[i] * scale, sums[m]);
        sums[m] = fmaf(x.y, values[i + 1] * scale, sums[m]);
        sums[m] = fmaf(x.z, values[i + 2] * scale, sums[m]);
        sums[m] = fmaf(x.w, values[i + 3] * scale, sums[m]);
      }
  }
#pragma unroll
  for (int m = 0; m < kMostFloatRows; ++m) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[m] += __shfl_xor_sync(0xFFFFFFFFu, sums[m], step);
    if (lane == 0 && m < p.M) p.store(sums[m], m, row);
  }
}

unsigned blocks_of(std::int64_t rows, int each) { return static_cast<unsigned>((rows + each - 1) / each); }

// Where blocks are few, more warps of them have more loads under way.
template <typename F, int kTiles, typename Half, typename Scale>
void launch_tiles(const FewRows<Half>& p, const Scale& scale, const ExecContext& ctx) {
  const unsigned blocks = blocks_of(p.rows, kTile * kTiles), few = 3 * static_cast<unsigned>(device_info(ctx.device.index).multiprocessors);
  few_rows_kernel<F, kTiles><<<blocks, 32 * (blocks < few ? kMostWarps : kMostWarps / 2), 0, stream_of(ctx)>>>(p, scale);
}

template <typename F, typename T, typename Scale>
void launch(const QuantGemmArgs& args, const Scale& scale, const ExecContext& ctx) {
  const FewRows<T> p(args);
  if constexpr (std::is_same_v<T, float>) {
    few_float_rows_kernel<F><<<blocks_of(p.rows, kBlock / 32), kBlock, 0, stream_of(ctx)>>>(p, scale);
  } else if (p.M <= 8) {
    launch_tiles<F, 1>(p, scale, ctx);
  } else {
    launch_tiles<F, 2>(p, scale, ctx);
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
  const int piece = is_float ? kCodeChunk : (w.spec.is_fp8() ? kLaneColumns<E4M3> : kLaneColumns<E2M1>);
  return !args.of_rows && args.x.shape[0] <= (is_float ? kMostFloatRows : kTile) && w.columns % piece == 0 && w.columns <= kMostColumns &&
         is_wide(args.x) && args.x.strides[1] == 1 && args.out.strides[1] == 1 && (!args.bias.defined() || args.bias.is_contiguous()) &&
         reinterpret_cast<std::uintptr_t>(w.codes.data) % 16 == 0 && reinterpret_cast<std::uintptr_t>(w.scales.data) % 2 == 0 &&
         !(args.x.dtype == DType::f16 && w.spec.format == QuantFormat::mxfp4);
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
