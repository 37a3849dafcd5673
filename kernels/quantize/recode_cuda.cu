#include "kernels/quantize/recode.h"

#include "kernels/quantize/code_scales.cuh"
#include "kernels/quantize/half_pairs.cuh"

namespace heddle::cuda {
namespace {

constexpr int kLanes = 32, kTurns = 4;
constexpr int kChunk = 16;  // codes that share a scale in every format

struct Recoding {
  const std::uint8_t* from;
  std::int64_t first_row;
  std::uint8_t* codes;
  float* scales;
  std::int64_t rows, columns;
};

// Eight codes times `factor`. Products of fewer than 11 bits are exact in float16; those below its numbers are far below half the least of E4M3.
__device__ uint2 recode_eight(std::uint32_t word, std::uint32_t factor) {
  constexpr float kFactor = Fp4Fields<float16>::kFactor;
  std::uint32_t pairs[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t pair = products(float16{}, decode_pair<float16>(word, j, pair_of(float16{}, kFactor, kFactor)), factor);
    pairs[j] = __nv_cvt_halfraw2_to_fp8x2(reinterpret_cast<const __half2_raw&>(pair), __NV_SATFINITE, __NV_E4M3);
  }
  const std::uint32_t even = pairs[0] | pairs[1] << 16, odd = pairs[2] | pairs[3] << 16;  // codes 0 4 1 5 and 2 6 3 7
  return {__byte_perm(even, odd, 0x6420), __byte_perm(even, odd, 0x7531)};
}

// A warp takes a row. The next codes are loaded before what is there is recoded, the first ones before the row's largest scale is known.
template <typename Scale>
__global__ void __launch_bounds__(kBlock) recode_kernel(const Recoding p, const Scale scale) {
  constexpr int kStep = kLanes * kChunk;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * (kBlock / kLanes) + threadIdx.x / kLanes, row = p.first_row + i;
  const int lane = threadIdx.x % kLanes;
  if (i >= p.rows) return;
  const std::uint8_t* from = p.from + row * (p.columns / 2);
  std::uint8_t* to = p.codes + i * p.columns;
  const auto load = [&](std::int64_t column) { return column < p.columns ? *reinterpret_cast<const uint2*>(from + column / 2) : uint2{}; };
  uint2 next[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) next[turn] = load(lane * kChunk + turn * kStep);
  float power = 1.0f, of_row;  // power: 2^(5 - e)
  if constexpr (Scale::kIsByte) {
    const std::uint8_t* bytes = scale.address(row, 0);
    std::uint32_t largest = 0;  // scales are in the order of their bytes
    for (std::int64_t block = lane; block * Scale::kSize < p.columns; block += kLanes) largest = max(largest, static_cast<std::uint32_t>(bytes[block]));
    const float most = Scale::in_block(static_cast<std::uint8_t>(__reduce_max_sync(0xFFFFFFFFu, largest)));
    power = __uint_as_float(((127u + 127u + 5u) << 23) - (bits_of(fmaxf(most, power_of_two(-121))) & 0x7F800000u));
    of_row = scale.of_sum(1.0f / power);
  } else {
    of_row = scale.stored(row, 0);
  }
  if (lane == 0) p.scales[i] = of_row;
  for (std::int64_t column = lane * kChunk; column < p.columns; column += kTurns * kStep) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const std::int64_t at = column + turn * kStep;
      const uint2 words = next[turn];
      next[turn] = load(at + kTurns * kStep);
      if (at >= p.columns) continue;
      float factor = 1.0f;
      if constexpr (Scale::kIsByte) factor = Scale::in_block(*scale.address(row, at)) * power;
      const std::uint32_t both = pair_of(float16{}, factor, factor);
      const uint2 low = recode_eight(words.x, both), high = recode_eight(words.y, both);
      *reinterpret_cast<uint4*>(to + at) = {low.x, low.y, high.x, high.y};
    }
  }
}

}  // namespace

void recode_rows(const QuantView& w, std::int64_t first_row, const MutView& codes, const MutView& scales, const ExecContext& ctx) {
  const Recoding p = {w.codes.as<std::uint8_t>(), first_row, codes.as<std::uint8_t>(), scales.as<float>(), codes.shape[0], w.columns};
  constexpr std::int64_t kRows = kBlock / kLanes;
  with_scales(w, [&]<typename F>(F, const auto& scale) {
    if constexpr (F::kBits == 4)
      recode_kernel<<<static_cast<unsigned>((p.rows + kRows - 1) / kRows), kBlock, 0, stream_of(ctx)>>>(p, scale);
  });
  check_launch("quant_gemm");
}

}  // namespace heddle::cuda
