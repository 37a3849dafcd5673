#pragma once

#include "kernels/quantize/chunk.cuh"
#include "kernels/quantize/code_pairs.cuh"
#include "kernels/quantize/divide.cuh"

// How kernels read quantised weights: up to 16 codes at a time, which share a scale.

namespace heddle::cuda {

// Of the float32 scales, that of an element is at [row >> row_shift, column >> column_shift].
struct FloatScales {
  static constexpr bool kIsByte = false;
  const float* data;
  std::int64_t stride;
  int row_shift, column_shift;

  __device__ const FloatScales& of_tensor() const { return *this; }
  __device__ float stored(std::int64_t row, std::int64_t column) const { return data[(row >> row_shift) * stride + (column >> column_shift)]; }
  __device__ float value(float scale) const { return scale; }
  __device__ float of_sum(float sum) const { return sum; }
};

inline FloatScales float_scales_of(const QuantSpec& spec, const ConstView& scales) {
  constexpr int kAll = 62, kBlockShift = 7;
  static_assert(kFp8Block == 1 << kBlockShift);
  const ScaleGrain grain = spec.is_fp8() ? spec.grain : ScaleGrain::tensor;
  const bool is_block = grain == ScaleGrain::block;
  return {scales.as<float>(), scales.shape.back(), is_block ? kBlockShift : (grain == ScaleGrain::channel ? 0 : kAll), is_block ? kBlockShift : kAll};
}

__device__ inline float decode_e4m3(int code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}

// Scales that are a byte for a block. What is stored() for the element at [row, column] has a value() by of_tensor(), which knows what all have in
// common. Or elements are multiplied by in_block() of the byte, and of_sum() does the rest to sums of them.
struct E8M0Scale {
  static constexpr bool kIsByte = true;
  static constexpr int kSize = kMxBlock;
  const std::uint8_t* scales;
  std::int64_t stride;

  __device__ const std::uint8_t* address(std::int64_t row, std::int64_t column) const { return scales + row * stride + column / kSize; }
  static __device__ float in_block(std::uint8_t byte) { return decode_e8m0(byte); }
  __device__ float of_sum(float sum) const { return sum; }
  __device__ const E8M0Scale& of_tensor() const { return *this; }
  __device__ std::uint8_t stored(std::int64_t row, std::int64_t column) const { return *address(row, column); }
  __device__ float value(std::uint8_t byte) const { return in_block(byte); }
};
struct E4M3Scale {
  static constexpr bool kIsByte = true;
  static constexpr int kSize = kNvBlock;
  const std::uint8_t* scales;
  std::int64_t stride;
  const float* global;

  struct OfTensor {
    const E4M3Scale& scale;
    Divisor global;
    __device__ std::uint8_t stored(std::int64_t row, std::int64_t column) const { return *scale.address(row, column); }
    __device__ float value(std::uint8_t byte) const { return global.quotient(in_block(byte)); }
  };

  __device__ const std::uint8_t* address(std::int64_t row, std::int64_t column) const { return scales + row * stride + column / kSize; }
  static __device__ float in_block(std::uint8_t byte) { return decode_e4m3(byte); }
  __device__ float of_sum(float sum) const { return sum / *global; }
  __device__ OfTensor of_tensor() const { return {*this, Divisor(*global)}; }
};

// Calls fn(F{}, scales) for the number format of the codes and what finds their scales.
template <typename Fn>
void with_scales(const QuantView& w, const Fn& fn) {
  const auto* bytes = static_cast<const std::uint8_t*>(w.scales.data);
  switch (w.spec.format) {
    case QuantFormat::fp8_e4m3: return fn(E4M3{}, float_scales_of(w.spec, w.scales));
    case QuantFormat::fp8_e5m2: return fn(E5M2{}, float_scales_of(w.spec, w.scales));
    case QuantFormat::fp4: return fn(E2M1{}, float_scales_of(w.spec, w.scales));
    case QuantFormat::mxfp4: return fn(E2M1{}, E8M0Scale{bytes, w.scales.shape[1]});
    case QuantFormat::nvfp4: return fn(E2M1{}, E4M3Scale{bytes, w.scales.shape[1], w.global.as<float>()});
  }
}

// N neighbouring codes as words.
template <typename F, int N>
struct CodeWords {
  static constexpr int kBytes = N * F::kBits / 8;
  std::uint32_t at[(kBytes + 3) / 4];

  // What they stand for, N of 4 or 8.
  __device__ void values(float (&out)[N]) const {
    if constexpr (F::kBits == 8) {
#pragma unroll
      for (int i = 0; i < N; i += 2) put(out[i], out[i + 1], decode_pair<F, float16>(at[i / 4] >> (i % 4 * 8)));
    } else {
      constexpr float kFactor = Fp4Fields<float16>::kFactor;
      const std::uint32_t halves = N == 8 ? at[0] : __byte_perm(at[0], 0, 0x4140);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) put(out[i], out[i + N / 2], decode_pair<float16>(halves, i, pair_of(float16{}, kFactor, kFactor)));
    }
  }

 private:
  static __device__ void put(float& low, float& high, std::uint32_t pair) {
    const float2 both = floats_of(float16{}, pair);
    low = both.x, high = both.y;
  }
};

// From an address that is a multiple of their size.
template <typename F, int N>
__device__ CodeWords<F, N> load_codes(const std::uint8_t* from) {
  CodeWords<F, N> words;
  if constexpr (CodeWords<F, N>::kBytes == 2) {
    words.at[0] = *reinterpret_cast<const std::uint16_t*>(from);
  } else if constexpr (CodeWords<F, N>::kBytes == 4) {
    words.at[0] = *reinterpret_cast<const std::uint32_t*>(from);
  } else if constexpr (CodeWords<F, N>::kBytes == 8) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    words.at[0] = both.x, words.at[1] = both.y;
  } else {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    words.at[0] = all.x, words.at[1] = all.y, words.at[2] = all.z, words.at[3] = all.w;
  }
  return words;
}

}  // namespace heddle::cuda
