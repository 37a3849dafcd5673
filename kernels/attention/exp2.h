#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace heddle::cpu {

// 2^x. The float version is branch-free so that loops over it vectorise: x = n + r with n integer and |r| <= 1/2, then
// 2^r by a polynomial and 2^n by the exponent bits. Relative error below 1.2e-7 (one unit in the last place), exact at
// integers; results under 2^-126 become 0, over 2^127.5 infinity; NaN stays NaN.
inline double exp2_of(double x) { return std::exp2(x); }
inline float exp2_of(float x) {
  // Adding 1.5 * 2^23 leaves round(x) in the low bits of the sum.
  constexpr float kRound = 0x1.8p23f;
  const float shifted = x + kRound;
  const float r = x - (shifted - kRound);
  // Minimax in relative error on [-1/2, 1/2] with constant term 1; its own error is 2.0e-9.
  float p = 1.535336200e-04f;
  p = p * r + 1.339887445e-03f;
  p = p * r + 9.618437358e-03f;
  p = p * r + 5.550332471e-02f;
  p = p * r + 2.402264791e-01f;
  p = p * r + 6.931472029e-01f;
  p = p * r + 1.0f;
  const float scale = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3F800000u);
  const float y = x < -126.0f ? 0.0f : p * scale;
  return x > 127.5f ? HUGE_VALF : y;
}

}  // namespace heddle::cpu
