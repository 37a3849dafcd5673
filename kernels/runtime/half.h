#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace heddle {

// The float to round further to 16 bits: the nearest one, or its neighbour when it is inexact and its last bit is 0. An
// odd last bit keeps the value off every 16-bit midpoint, so the second rounding gives what one rounding would.
// Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const bool exact = static_cast<double>(nearest) == value || value != value;
  if (exact || (bits & 1u) != 0) return nearest;
  const bool rounded_up = std::abs(static_cast<double>(nearest)) > std::abs(value);
  return std::bit_cast<float>(rounded_up ? bits - 1 : bits + 1);
}

// The upper 16 bits of a float. Conversion from float rounds to nearest even; NaN stays NaN (quiet).
struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  explicit bfloat16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<std::uint16_t>(is_nan ? ((u >> 16) | 0x40u) : rounded);
  }
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

// IEEE 754 binary16. Conversion from float rounds to nearest even; overflow gives infinity, NaN stays NaN.
struct float16 {
  std::uint16_t bits = 0;

  float16() = default;
  explicit float16(float value) : bits(encode(value)) {}
  operator float() const { return decode(bits); }

 private:
  static std::uint16_t encode(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    const std::uint32_t magnitude = u & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);
    // 65520 is the midpoint between the largest finite value, 65504, and the next power of two.
    if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {
      // Subnormal result: adding 0.5 aligns the mantissa so that the float adder rounds at bit 2^-24.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u));
    }
    const std::uint32_t rebias = magnitude - 0x38000000u;
    return static_cast<std::uint16_t>(sign | ((rebias + 0xFFFu + ((rebias >> 13) & 1u)) >> 13));
  }
  static float decode(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t exponent = (h >> 10) & 0x1Fu;
    const std::uint32_t mantissa = h & 0x3FFu;
    if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
      return sign != 0 ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
};

}  // namespace heddle
