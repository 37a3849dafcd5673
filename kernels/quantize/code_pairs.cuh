#pragma once

#include <cuda_fp8.h>

#include "kernels/quantize/formats.h"
#include "kernels/quantize/half_pairs.cuh"

// Codes as pairs of 16-bit numbers, which have all their values.

namespace heddle::cuda {

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

// The j-th E2M1 code of each half of a word, times `factor`.
template <typename Half>
__device__ std::uint32_t decode_pair(std::uint32_t word, int j, std::uint32_t factor) {
  constexpr int kPlace = Fp4Fields<Half>::kPlace;
  const auto moved = [word](int left) { return left >= 0 ? word << left : word >> -left; };
  const std::uint32_t magnitudes = moved(kPlace - 4 * j) & (0x00070007u << kPlace), signs = moved(12 - 4 * j) & 0x80008000u;
  return products(Half{}, magnitudes | signs, factor);
}

// Two FP8 codes.
template <typename F, typename Half>
__device__ std::uint32_t decode_pair(std::uint32_t codes) {
  const __half2 pair(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), std::is_same_v<F, E4M3> ? __NV_E4M3 : __NV_E5M2));
  if constexpr (std::is_same_v<Half, float16>) {
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const float2 both = __half22float2(pair);
    return pair_of(Half{}, both.x, both.y);
  }
}

}  // namespace heddle::cuda
