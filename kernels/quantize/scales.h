#pragma once

#include <cstdint>

#include "kernels/quantize/formats.h"
#include "kernels/quantize/quantize.h"

// The scale of a block from its largest magnitude, the same on every device (Note: Number formats).

namespace heddle {

inline constexpr int kNvBlock = 16, kMxBlock = 32;
inline constexpr std::int64_t kFp8Block = 128;

// FP8 and FP4 with one scale: the largest element becomes the largest code. Below that a scale could not be divided by.
constexpr float float_scale(float amax, float largest) {
  constexpr float kSmallestNormal = power_of_two(-126);
  const float scale = amax / largest;
  return amax == 0.0f ? 1.0f : (scale > kSmallestNormal ? scale : kSmallestNormal);
}

// A scale as it is stored, and as elements are divided and multiplied by it.
struct ByteScale {
  std::uint8_t code;
  float value;
};

constexpr ByteScale mxfp4_scale(float amax, MxRounding rounding) {
  constexpr int kLargestExponent = 2;  // of E2M1: 6 is 1.5 * 2^2
  const std::uint32_t bits = bits_of(amax);
  const bool saturates = (bits & 0x7FFFFFu) > 0x400000u;  // amax > 1.5 * 2^k
  const int code = static_cast<int>(bits >> 23) - kLargestExponent + (rounding == MxRounding::ceil && saturates ? 1 : 0);
  const auto stored = static_cast<std::uint8_t>(code > 0 ? code : 0);
  return {stored, decode_e8m0(stored)};
}

// What block scales are multiplied by before they become E4M3, so that the largest is 448, or 256 where one half as large again may
// be chosen.
constexpr float nvfp4_global(float amax, ScaleSearch search) {
  constexpr float kMost = 0x1.fffffep127f;
  const float largest = search == ScaleSearch::four_over_six ? 256.0f : E4M3::kLargest;
  const float global = largest * E2M1::kLargest / amax;
  return amax == 0.0f ? 1.0f : (global < kMost ? global : kMost);
}

// `wanted` as E4M3, to nearest or up, but never 0.
constexpr ByteScale nvfp4_rounded(float wanted, float global, ScaleRounding rounding) {
  std::uint8_t code = encode<E4M3>(wanted);
  if (rounding == ScaleRounding::up && decode<E4M3>(code) < wanted && code < E4M3::kLargestCode) ++code;
  if (code == 0) code = 1;
  return {code, decode<E4M3>(code) / global};
}

// The sum of squared errors that a block's elements have under `scale`. Products of floats are exact in double, so a compiler that fuses
// them into the sum changes nothing.
constexpr double squared_error(const float (&x)[kNvBlock], float scale) {
  double sum = 0.0;
  for (const float value : x) {
    const double read = static_cast<double>(decode<E2M1>(encode<E2M1>(value / scale))) * static_cast<double>(scale);
    const double error = static_cast<float>(read - static_cast<double>(value));
    sum += error * error;
  }
  return sum;
}

// The scale of the block x, whose largest magnitude is amax; a short block is filled up with zeros.
constexpr ByteScale nvfp4_scale(const float (&x)[kNvBlock], float amax, float global, ScaleRounding rounding, ScaleSearch search) {
  constexpr std::uint8_t kOfZeros = 0x20;  // 0.125, as compressed-tensors writes it
  if (amax == 0.0f) return {kOfZeros, decode<E4M3>(kOfZeros) / global};
  ByteScale best = nvfp4_rounded(global * (amax / 6.0f), global, rounding);
  if (search == ScaleSearch::none) return best;
  const int four = nvfp4_rounded(global * (amax / 4.0f), global, rounding).code;
  const int first = search == ScaleSearch::mse ? 1 : four;
  const int last = search == ScaleSearch::mse ? static_cast<int>(E4M3::kLargestCode) : four;
  double least = squared_error(x, best.value);
  for (int code = first; code <= last; ++code) {
    const ByteScale other = {static_cast<std::uint8_t>(code), decode<E4M3>(static_cast<std::uint8_t>(code)) / global};
    const double error = squared_error(x, other.value);
    if (error < least) {
      least = error;
      best = other;
    }
  }
  return best;
}

}  // namespace heddle
