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

__device__ inline float sixth_of(float amax) { return amax > 0x1p-100f ? Divisor(6.0f).quotient(amax) : amax / 6.0f; }

// The E2M1 number nearest to one that is not negative, to the even one of two: adding 3/4 of the first float whose last bit is worth the distance
// of the numbers there rounds to them.
__device__ inline float nearest_e2m1(float x) {
  const float clamped = fminf(x, E2M1::kLargest);
  const float binade = __uint_as_float(__float_as_uint(fmaxf(clamped, 1.0f)) & 0x7F800000u);
  return fmaf(binade, -0x1.8p22f, fmaf(binade, 0x1.8p22f, clamped));
}

// Candidates for the scale of a block, compared by their squared errors in float32. These are right to within 2^-16 of them: errors themselves
// are rounded once, and a quotient next to the middle of two numbers, where the wrong one may be taken, is about as far from either.
// Below 2^-100 nothing is said about sums of squares of what is less than 4.
class Nvfp4Search {
 public:
  __device__ Nvfp4Search(const float (&x)[kNvBlock], float amax, const Nvfp4Scales& scales) : scales_(scales) {
    // Times a power of two that makes amax, if it is a normal number, 1 to 4.
    const int exponent = static_cast<int>(__float_as_uint(amax) >> 23);
    unit_ = __uint_as_float(static_cast<std::uint32_t>(max(254 - exponent, 1)) << 23);
    amax_ = amax * unit_;
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) magnitudes_[i] = fabsf(x[i]) * unit_;
  }

  __device__ int best() const { return best_; }
  __device__ bool is_certain() const { return second_ > least_ * (1.0f + 0x1p-14f) + 0x1p-90f; }

  __device__ void offer(int code) {
    const float scale = scales_.value(code) * unit_, reciprocal = __frcp_rn(scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) {
      const float error = fmaf(nearest_e2m1(magnitudes_[i] * reciprocal), scale, -magnitudes_[i]);
      sum = fmaf(error, error, sum);
    }
    second_ = fminf(second_, fmaxf(sum, least_));
    if (sum < least_) best_ = code;
    least_ = fminf(least_, sum);
  }

  // Whether the error of the largest element alone is more than the least sum.
  __device__ bool is_too_small(int code) const {
    const float error = fmaf(-E2M1::kLargest, scales_.value(code) * unit_, amax_);
    return error > 0.0f && error * error > least_ * (1.0f + 0x1p-10f) + 0x1p-90f;
  }

 private:
  const Nvfp4Scales& scales_;
  float unit_, amax_;
  float magnitudes_[kNvBlock];
  int best_ = 0;
  float least_ = infinity<float>(), second_ = infinity<float>();
};

template <ScaleSearch search>
__device__ ByteScale Nvfp4Scales::of_block(const float (&x)[kNvBlock], float amax) const {
  if (amax == 0.0f) return nvfp4_scale(x, 0.0f, global_.value(), rounding_, search);
  int code = rounded(sixth_of(amax));
  if constexpr (search != ScaleSearch::none) {
    Nvfp4Search candidates(x, amax, *this);
    candidates.offer(code);
    if constexpr (search == ScaleSearch::four_over_six) {
      const int four = rounded(amax / 4.0f);
      if (four != code) candidates.offer(four);
    } else {
      // With a scale of 4 amax or more all elements become 0, which is no less an error than the first one's. 27 / 6 of amax, rounded to E4M3, one up,
      // is more than that.
      const int last = min(rounded(27.0f * sixth_of(amax)) + 1, static_cast<int>(E4M3::kLargestCode));
      for (int other = code + 1; other <= last; ++other) candidates.offer(other);
      for (int other = code - 1; other > 0 && !candidates.is_too_small(other); --other) candidates.offer(other);
    }
    if (!candidates.is_certain()) return nvfp4_scale(x, amax, global_.value(), rounding_, search);
    code = candidates.best();
  }
  return {static_cast<std::uint8_t>(code), value(code)};
}

}  // namespace heddle::cuda
