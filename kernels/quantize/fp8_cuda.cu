#include <cuda_fp8.h>

#include "kernels/gemm/plan_cuda.h"
#include "kernels/quantize/chunk.cuh"
#include "kernels/quantize/divide.cuh"
#include "kernels/quantize/fp8.h"
#include "kernels/quantize/half_pairs.cuh"

namespace heddle::cuda {
namespace {

// Note: Tiles of codes
// A block of threads takes a tile of kTile x kTile elements, two patches of 4 x 8 a thread. The codes of a patch go to memory as they are,
// and turned into shared memory: a word there is four rows of one column. In row `column` of the shared tile the word of rows 4 i to
// 4 i + 3 is at i ^ (column / 8 * 2), which puts the 32 words that a warp writes at a time in 32 banks, and leaves pairs of words
// together, which is how they are read.
constexpr int kTile = 128, kPatchRows = 4, kPatchColumns = 8;
constexpr int kLanes = 32;  // of a warp
constexpr int kAcross = kTile / kPatchColumns, kWords = kTile / kPatchRows;
static_assert(kAcross * kWords == 2 * kBlock && kWords == kLanes);

struct Fp8Target {
  const float* expected;
  const float* fallback;
  std::uint8_t* codes;
  std::int64_t code_stride;
  std::uint8_t* turned;
  std::int64_t turned_stride, turned_columns;
  float* scale;
  unsigned* seen;
};

// Byte j of words 0 to 3 as one word, for j = 0 to 3.
__device__ void turn_bytes(std::uint32_t (&words)[4]) {
  const std::uint32_t low01 = __byte_perm(words[0], words[1], 0x5140), low23 = __byte_perm(words[2], words[3], 0x5140);
  const std::uint32_t high01 = __byte_perm(words[0], words[1], 0x7362), high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

__device__ void load_eight(const bfloat16* from, float (&out)[8]) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const std::uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = floats_of(bfloat16{}, pairs[i]);
    out[2 * i] = both.x, out[2 * i + 1] = both.y;
  }
}

template <typename F>
__device__ std::uint32_t encode_four(const float* x) {
  constexpr __nv_fp8_interpretation_t kKind = std::is_same_v<F, E4M3> ? __NV_E4M3 : __NV_E5M2;
  const std::uint32_t low = __nv_cvt_float2_to_fp8x2({x[0], x[1]}, __NV_SATFINITE, kKind);
  return low | static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2({x[2], x[3]}, __NV_SATFINITE, kKind)) << 16;
}

// Quantises the patch at [row, column] and returns its largest magnitude as bits.
template <typename F>
__device__ std::uint32_t quantize_patch(const Rows<const bfloat16>& x, const Fp8Target& to, const Divisor& scale, std::int64_t row, std::int64_t column,
                                        std::uint32_t (&words)[kPatchColumns / 4][kPatchRows]) {
  float values[kPatchRows][kPatchColumns] = {};
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r)
    if (row + r < x.rows && column < x.columns) load_eight(x.data + (row + r) * x.stride + column, values[r]);
  std::uint32_t largest = 0;
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
    for (float& value : values[r]) {
      largest = max(largest, bits_of(value) & 0x7FFFFFFFu);  // NaN above all
      value = fmaf(value, 0.0f, value);                      // infinity becomes NaN
    }
    scale.divide(values[r]);
    words[0][r] = encode_four<F>(values[r]);
    words[1][r] = encode_four<F>(values[r] + 4);
    if (row + r < x.rows && column < x.columns)
      *reinterpret_cast<uint2*>(to.codes + (row + r) * to.code_stride + column) = {words[0][r], words[1][r]};
  }
  return largest;
}

template <typename F>
__global__ void __launch_bounds__(kBlock) fp8_quantize_kernel(const Rows<const bfloat16> x, const Fp8Target to) {
  __shared__ __align__(16) std::uint32_t turned[kTile][kWords];
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kTile, first_column = static_cast<std::int64_t>(blockIdx.x) * kTile;
  float expected = *to.expected;
  if (expected == 0 && to.fallback != nullptr) expected = *to.fallback;
  const float scale = float_scale(expected, F::kLargest);
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) *to.scale = scale;

  const Divisor divisor(scale);
  const int across = threadIdx.x % kAcross;
  std::uint32_t largest = 0;
#pragma unroll
  for (int down = threadIdx.x / kAcross; down < kWords; down += kBlock / kAcross) {
    std::uint32_t words[kPatchColumns / 4][kPatchRows];
    largest = max(largest, quantize_patch<F>(x, to, divisor, first_row + down * kPatchRows, first_column + across * kPatchColumns, words));
#pragma unroll
    for (int half = 0; half < kPatchColumns / 4; ++half) {
      turn_bytes(words[half]);
#pragma unroll
      for (int i = 0; i < 4; ++i) turned[across * kPatchColumns + half * 4 + i][down ^ (across * 2)] = words[half][i];
    }
  }
  __syncthreads();
  const int pair = threadIdx.x % kAcross;
  const std::int64_t row = first_row + pair * 2 * kPatchRows;  // a column of the transpose
  for (int i = threadIdx.x / kAcross; i < kTile; i += kBlock / kAcross) {
    if (first_column + i >= x.columns || row >= to.turned_columns) continue;
    const uint2 eight = *reinterpret_cast<const uint2*>(&turned[i][2 * (pair ^ (i / kPatchColumns))]);
    *reinterpret_cast<uint2*>(to.turned + (first_column + i) * to.turned_stride + row) = eight;
  }
  if (to.seen == nullptr) return;
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (threadIdx.x % kLanes == 0 && largest > *to.seen) atomicMax(to.seen, largest);  // it only grows, so few warps queue for it
}

// A warp a row; `size` is H. Shifted from the far end, 32 at a time.
__global__ void advance_history_kernel(float* history, int size) {
  float* row = history + static_cast<std::int64_t>(blockIdx.x) * (size + 1);
  float* seen = row + 1;
  float largest = 0;
  for (int first = (size - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
    const int i = first + static_cast<int>(threadIdx.x);
    float value = i < size ? seen[i] : 0.0f;
    if (!(value < infinity<float>())) value = 0;
    largest = fmaxf(largest, value);
    __syncwarp();
    if (i + 1 < size) seen[i + 1] = value;
    __syncwarp();
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  if (threadIdx.x != 0) return;
  seen[0] = 0;
  if (largest > 0) row[0] = largest;
  else if (row[0] <= 0) row[0] += 1;  // from kNewHistory on
}

template <typename F>
void quantize_as(const Fp8QuantizeArgs& args, const ExecContext& ctx) {
  const Rows<const bfloat16> x(args.x);
  const Fp8Target to = {.expected = args.expected.as<float>(),
                        .fallback = args.fallback.defined() ? args.fallback.as<float>() : nullptr,
                        .codes = args.codes.as<std::uint8_t>(),
                        .code_stride = args.codes.strides[0],
                        .turned = args.turned.as<std::uint8_t>(),
                        .turned_stride = args.turned.strides[0],
                        .turned_columns = args.turned.shape[1],
                        .scale = args.scale.as<float>(),
                        .seen = args.seen.defined() ? reinterpret_cast<unsigned*>(args.seen.as<float>()) : nullptr};
  const std::int64_t across = (x.columns + kTile - 1) / kTile, down = (x.rows + kTile - 1) / kTile;
  HEDDLE_CHECK(down <= kMostRows, "fp8_quantize: at most ", kMostRows * kTile, " rows, got ", x.rows);
  const dim3 grid(static_cast<unsigned>(std::max<std::int64_t>(across, 1)), static_cast<unsigned>(std::max<std::int64_t>(down, 1)));
  fp8_quantize_kernel<F><<<grid, kBlock, 0, stream_of(ctx)>>>(x, to);
  check_launch("fp8_quantize");
}

Fp8Type type_of(QuantFormat format) { return format == QuantFormat::fp8_e5m2 ? Fp8Type::e5m2 : Fp8Type::e4m3; }

}  // namespace

int fp8_capability(int device_index) { return device_info(device_index).capability; }

void fp8_quantize(const Fp8QuantizeArgs& args, const ExecContext& ctx) {
  if (args.format == QuantFormat::fp8_e5m2) quantize_as<E5M2>(args, ctx);
  else quantize_as<E4M3>(args, ctx);
}

void advance_amax_history(const AmaxHistoryArgs& args, const ExecContext& ctx) {
  const MutView& history = args.history;
  advance_history_kernel<<<static_cast<unsigned>(history.shape[0]), kLanes, 0, stream_of(ctx)>>>(history.as<float>(),
                                                                                                   static_cast<int>(history.shape[1] - 1));
  check_launch("advance_amax_history");
}

// The layouts are those of Note: Row-major products, gemm_cuda.cpp.
void fp8_gemm(const Fp8GemmArgs& args, const ExecContext& ctx) {
  const auto& [a, b, out, bias, write, is_precise] = args;
  const std::int64_t M = out.shape[0], N = out.shape[1], K = a.codes.shape[1];
  const auto leading = [](const ConstView& view) { return view.shape[0] > 1 ? view.strides[0] : view.shape[1]; };
  constexpr std::int64_t kAlignment = 16;
  const GemmKey key = {.a = {.rows = K, .columns = N, .leading = leading(b.codes), .is_transposed = 1, .alignment = kAlignment},
                       .b = {.rows = K, .columns = M, .leading = leading(a.codes), .alignment = kAlignment},
                       .d = {.rows = N, .columns = M, .leading = leading(out), .alignment = kAlignment},
                       .in = static_cast<std::int64_t>(DType::bf16),
                       .out = static_cast<std::int64_t>(out.dtype),
                       .has_bias = bias.defined() ? 1 : 0,
                       .accumulates = write == Write::accumulate ? 1 : 0,
                       .fp8 = Fp8Scales::tensor,
                       .a_type = type_of(b.format),
                       .b_type = type_of(a.format),
                       .is_precise = is_precise ? 1 : 0};
  run_gemm(key,
           {.a = b.codes.data, .b = a.codes.data, .d = out.data, .bias = bias.data, .a_scales = b.scale.data, .b_scales = a.scale.data}, ctx);
}

}  // namespace heddle::cuda
