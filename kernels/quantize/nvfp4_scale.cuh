#pragma once

#include "kernels/quantize/code_scales.cuh"

// The scales that nvfp4_scale() gives, in fewer instructions.

namespace heddle::cuda {

// The scales there are with one for the tensor, by their E4M3 codes.
class Nvfp4Scales {
 public:
  __device__ Nvfp4Scales(float global, ScaleRounding rounding) : global_(global), rounding_(rounding) {}

  // That of a block.
  template <ScaleSearch search>
  __device__ ByteScale of_block(const float (&x)[kNvBlock], float amax) const;

  __device__ float value(int code) const { return global_.quotient(decode_e4m3(code)); }

  // That of nvfp4_rounded().
  __device__ int rounded(float wanted) const {
    const float scaled = global_.value() * wanted;
    int code = __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
    if (rounding_ == ScaleRounding::up && decode_e4m3(code) < scaled && code < static_cast<int>(E4M3::kLargestCode)) ++code;
    return max(code, 1);
  }

 private:
  Divisor global_;
  ScaleRounding rounding_;
};

// Below this, quotients and errors would be rounded to multiples of the least float.
inline constexpr float kLeastAmax = 0x1p-100f;

// As a Divisor divides what is no less than kLeastAmax, but with a reciprocal known beforehand.
__device__ inline float sixth_of(float x) {
  constexpr float kSixth = 1.0f / 6.0f;
  const float quotient = x * kSixth;
  return fmaf(fmaf(-6.0f, quotient, x), kSixth, quotient);
}

// The E2M1 number nearest to one that is not negative, to the even one of two: adding 3/4 of the first float whose last bit is worth the
// distance of the numbers there rounds to them.
__device__ inline float nearest_e2m1(float x) {
  const float clamped = fminf(x, E2M1::kLargest);
  const float binade = __uint_as_float(__float_as_uint(fmaxf(clamped, 1.0f)) & 0x7F800000u);
  return fmaf(binade, -0x1.8p22f, fmaf(binade, 0x1.8p22f, clamped));
}

// The errors of a block under each scale, elements taken times a power of two that makes the largest 1 to 4.
class Nvfp4Errors {
 public:
  __device__ Nvfp4Errors(const float (&x)[kNvBlock], float amax, const Nvfp4Scales& scales) : scales_(scales) {
    const int exponent = static_cast<int>(__float_as_uint(amax) >> 23);
    unit_ = __uint_as_float(static_cast<std::uint32_t>(max(254 - exponent, 1)) << 23);
    amax_ = amax * unit_;
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) magnitudes_[i] = fabsf(x[i]) * unit_;
  }

  // Their squares' sum, right to within 2^-17 of it if it is not negligible: errors are rounded once, and a quotient next to the middle of two
  // numbers, where the wrong one may be taken, is about as far from either.
  __device__ float about(int code) const {
    const float scale = scales_.value(code) * unit_, reciprocal = __frcp_rn(scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) {
      const float error = fmaf(nearest_e2m1(magnitudes_[i] * reciprocal), scale, -magnitudes_[i]);
      sum = fmaf(error, error, sum);
    }
    return sum;
  }

  // That of squared_error(), whose difference of a product and an element is exact before it is rounded to float32.
  __device__ double exactly(int code) const {
    const float scale = scales_.value(code) * unit_;
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) {
      const double error = fmaf(nearest_e2m1(magnitudes_[i] / scale), scale, -magnitudes_[i]);
      sum = fma(error, error, sum);
    }
    return sum;
  }

  // Whether one element alone, the largest, gives more than `sum`.
  __device__ bool is_too_small(int code, float sum) const {
    const float error = fmaf(-E2M1::kLargest, scales_.value(code) * unit_, amax_);
    return error > 0.0f && error * error > limit(sum);
  }

  // Sums above this are not the least one if about `sum` is.
  static __device__ float limit(float sum) { return sum * (1.0f + 0x1p-15f) + 0x1p-60f; }

 private:
  const Nvfp4Scales& scales_;
  float unit_, amax_;
  float magnitudes_[kNvBlock];
};

// Of the codes from `first` to `last`, `step` apart, and where `descends` from there down to those that are too small, the one with the least
// error: of equals `first`, then the smallest.
__device__ inline int least_error(const Nvfp4Errors& errors, int first, int last, int step, bool descends) {
  int best = first, low = first;
  float least = errors.about(first), second = infinity<float>();
  const auto offer = [&](int code) {
    const float sum = errors.about(code);
    second = fminf(second, fmaxf(sum, least));
    if (sum < least) best = code;
    least = fminf(least, sum);
  };
#pragma unroll 1
  for (int code = first + step; code <= last; code += step) offer(code);
#pragma unroll 1
  for (; descends && low > 1 && !errors.is_too_small(low - 1, least); --low) offer(low - 1);
  if (second > Nvfp4Errors::limit(least)) return best;
  double least_exactly = infinity<double>();
#pragma unroll 1
  for (int code = low; code <= last; code += step) {
    if (errors.about(code) > Nvfp4Errors::limit(least)) continue;
    const double sum = errors.exactly(code);
    if (sum < least_exactly || (sum == least_exactly && code == first)) {
      least_exactly = sum;
      best = code;
    }
  }
  return best;
}

template <ScaleSearch search>
__device__ ByteScale Nvfp4Scales::of_block(const float (&x)[kNvBlock], float amax) const {
  if (amax < kLeastAmax) {
    float copy[kNvBlock];  // for which alone there is memory
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) copy[i] = x[i];
    return nvfp4_scale(copy, amax, global_.value(), rounding_, search);
  }
  const float sixth = sixth_of(amax);
  int code = rounded(sixth);
  if constexpr (search == ScaleSearch::four_over_six) {
    const int four = rounded(amax / 4.0f);
    if (four > code) code = least_error(Nvfp4Errors(x, amax, *this), code, four, four - code, /*descends=*/false);
  } else if constexpr (search == ScaleSearch::mse) {
    // With a scale of 4 amax or more all elements become 0, which is no less an error than the first one's. 27 / 6 of amax, rounded to
    // E4M3, one up, is more than that.
    const int last = min(rounded(27.0f * sixth) + 1, static_cast<int>(E4M3::kLargestCode));
    code = least_error(Nvfp4Errors(x, amax, *this), code, last, /*step=*/1, /*descends=*/true);
  }
  return {static_cast<std::uint8_t>(code), value(code)};
}

}  // namespace heddle::cuda
