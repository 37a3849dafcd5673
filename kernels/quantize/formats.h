#pragma once

#include <bit>
#include <cstdint>

// Note: Number formats
// Floating-point numbers of 4 and 8 bits, as in "FP8 formats for deep learning" (Micikevicius et al. 2022) and the OCP Microscaling
// specification 1.0. Encoding rounds to nearest even, ties to the even mantissa, and saturates: what lies beyond the largest finite
// value, infinity included, becomes that value. NaN keeps its sign and becomes NaN, or in E2M1, which has none, the largest value; -0
// stays -0. Everything is integer arithmetic and exact or correctly rounded float arithmetic, so every device gives the same bits.
// The functions are constexpr so that they run on all of them.

namespace heddle {

// Of each format: bits of a code and of its mantissa, the exponent's bias, the largest value and its code, the code of NaN, and the bits
// of the float that the code after the largest value's stands for.

// Four bits: 0 0.5 1 1.5 2 3 4 6 and their negatives.
struct E2M1 {
  static constexpr int kBits = 4, kMantissaBits = 1, kBias = 1;
  static constexpr float kLargest = 6.0f;
  static constexpr std::uint32_t kLargestCode = 0x7, kNan = 0x7, kBeyond = 0;
};

// Eight bits, no infinity: 448 is the largest, 2^-9 the smallest.
struct E4M3 {
  static constexpr int kBits = 8, kMantissaBits = 3, kBias = 7;
  static constexpr float kLargest = 448.0f;
  static constexpr std::uint32_t kLargestCode = 0x7E, kNan = 0x7F, kBeyond = 0x7FC00000u;
};

// Eight bits, the upper half of IEEE binary16: 57344 is the largest, 2^-16 the smallest; 0x7C is infinity.
struct E5M2 {
  static constexpr int kBits = 8, kMantissaBits = 2, kBias = 15;
  static constexpr float kLargest = 57344.0f;
  static constexpr std::uint32_t kLargestCode = 0x7B, kNan = 0x7F, kBeyond = 0x7F800000u;
};

constexpr std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
// 2^exponent, in the range of normal numbers.
constexpr float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23); }

// Puts the sign of `value` before a code of magnitude bits, or NaN there.
template <typename F>
constexpr std::uint8_t with_sign(float value, std::uint32_t code) {
  const std::uint32_t sign = (bits_of(value) >> 31) << (F::kBits - 1);
  return static_cast<std::uint8_t>(sign | (value != value ? F::kNan : code));
}

// The code of the nearest value.
template <typename F>
constexpr std::uint8_t encode(float value) {
  constexpr int kDropped = 23 - F::kMantissaBits;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - F::kBias) << 23;
  // The spacing of floats here is that of the subnormals of F: the float adder rounds them.
  constexpr float kAligner = power_of_two(24 - F::kBias - F::kMantissaBits);
  const std::uint32_t given = bits_of(value) & 0x7FFFFFFFu, largest = bits_of(F::kLargest);
  const std::uint32_t magnitude = given < largest ? given : largest;
  const std::uint32_t normal = (magnitude - kRebias + (1u << (kDropped - 1)) - 1u + ((magnitude >> kDropped) & 1u)) >> kDropped;
  const std::uint32_t subnormal = bits_of(std::bit_cast<float>(magnitude) + kAligner) - bits_of(kAligner);
  return with_sign<F>(value, magnitude < bits_of(power_of_two(1 - F::kBias)) ? subnormal : normal);
}

// In E2M1 a code is the least of 2 m, m + 2 and m / 2 + 4 for the magnitude m, rounded; that also rounds ties to the even code. Added to
// a float whose last bit is worth 1, each is rounded by the adder, and such floats are in the order of their bits.
template <>
constexpr std::uint8_t encode<E2M1>(float value) {
  constexpr float kUnit = 0x1.8p23f;
  const float m = std::bit_cast<float>(bits_of(value) & 0x7FFFFFFFu);
  const std::uint32_t low = bits_of(m * 2.0f + kUnit), middle = bits_of(m + (kUnit + 2.0f)), high = bits_of(m * 0.5f + (kUnit + 4.0f));
  const std::uint32_t least = low < middle ? (low < high ? low : high) : (middle < high ? middle : high);
  const std::uint32_t largest = bits_of(kUnit + 7.0f), code = least < largest ? least : largest;
  return static_cast<std::uint8_t>((code & 0x7u) | (bits_of(value) >> 31 << 3));
}

// The code of one of the two neighbours: of the upper one with the probability that makes the expected value `value`, to within
// 2^-31 of their distance. `random` is uniform over 32 bits.
template <typename F>
constexpr std::uint8_t encode_stochastic(float value, std::uint32_t random) {
  const std::uint32_t given = bits_of(value) & 0x7FFFFFFFu, largest = bits_of(F::kLargest);
  const std::uint32_t magnitude = given < largest ? given : largest;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + F::kBias;  // as F stores it, if at least 1
  const std::uint32_t mantissa = (magnitude & 0x7FFFFFu) | (magnitude >= 0x800000u ? 0x800000u : 0u);
  const int stored = exponent > 1 ? exponent : 1;
  // Of the bits below the last one kept, 31 take part in the draw.
  const int dropped = 23 - F::kMantissaBits + stored - exponent;
  const int shift = dropped < 31 ? dropped : 31;
  const std::uint32_t kept = dropped - shift < 24 ? mantissa >> (dropped - shift) : 0u;
  const std::uint32_t rounded = (kept + (random & ((1u << shift) - 1u))) >> shift;
  return with_sign<F>(value, (static_cast<std::uint32_t>(stored - 1) << F::kMantissaBits) + rounded);
}

// The value of a code; bits above the format's are ignored.
template <typename F>
constexpr float decode(std::uint8_t code) {
  constexpr int kDropped = 23 - F::kMantissaBits;
  const std::uint32_t magnitude = code & ((1u << (F::kBits - 1)) - 1u);
  const std::uint32_t sign = static_cast<std::uint32_t>((code >> (F::kBits - 1)) & 1u) << 31;
  // Read as a float the bits are the value times a power of two; a subnormal of F is one of float.
  float value = std::bit_cast<float>(magnitude << kDropped) * power_of_two(127 - F::kBias);
  if (magnitude > F::kLargestCode) value = std::bit_cast<float>(F::kBeyond + ((magnitude - F::kLargestCode - 1u) << kDropped));
  return std::bit_cast<float>(bits_of(value) | sign);
}

// E8M0: a power of two from 2^-127 (code 0) to 2^127 (code 254); code 255 is NaN.
inline constexpr std::uint8_t kE8M0Nan = 255;
constexpr float decode_e8m0(std::uint8_t code) {
  if (code == kE8M0Nan) return std::bit_cast<float>(0x7FC00000u);
  return std::bit_cast<float>(code == 0 ? 0x400000u : static_cast<std::uint32_t>(code) << 23);
}

}  // namespace heddle
