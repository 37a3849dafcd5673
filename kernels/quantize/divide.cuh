#pragma once

#include "kernels/quantize/scales.h"

namespace heddle::cuda {

// What several numbers are divided by. Quotients are rounded as those of the operator are, in three instructions: Markstein 1990, "Computation of
// elementary functions on the IBM RISC System/6000 processor", theorem 2. Those below 2^-40 of numbers below 2^-100 may be wrong in the last bit.
class Divisor {
 public:
  __device__ explicit Divisor(float value) : value_(value), is_moderate_(value > 0x1p-60f && value < 0x1p60f) {
    // The reciprocal of such a number, correctly rounded.
    float about;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(value));
    reciprocal_ = fmaf(about, fmaf(-value, about, 1.0f), about);
  }

  __device__ float value() const { return value_; }
  __device__ float quotient(float x) const { return is_moderate_ ? corrected(x) : x / value_; }

  // The same of all. Where the products could leave the range of float, they and the divisor are multiplied by a power of two first.
  template <int N>
  __device__ void divide(float (&x)[N]) const {
    Divisor by = *this;
    if (!is_moderate_) {
      const float factor = value_ < 1.0f ? 0x1p100f : 0x1p-80f;
      by = Divisor(value_ * factor);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= factor;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = by.corrected(x[i]);
  }

 private:
  __device__ float corrected(float x) const {
    const float quotient = x * reciprocal_;
    return fmaf(fmaf(-value_, quotient, x), reciprocal_, quotient);
  }

  float value_, reciprocal_;
  bool is_moderate_;
};

}  // namespace heddle::cuda
