#pragma once

#include "kernels/quantize/chunk.cuh"

// How kernels read quantised weights: eight codes at a time, which share a scale.

namespace heddle::cuda {

inline constexpr int kCodeChunk = 8;
static_assert(kNvBlock % kCodeChunk == 0);

// The scale of the element at [row, column], where it is a byte for a block.
struct E8M0Scale {
  const std::uint8_t* scales;
  std::int64_t stride;
  __device__ float at(std::int64_t row, std::int64_t column) const { return decode_e8m0(scales[row * stride + column / kMxBlock]); }
};
struct E4M3Scale {
  const std::uint8_t* scales;
  std::int64_t stride;
  const float* global;
  __device__ float at(std::int64_t row, std::int64_t column) const {
    return decode<E4M3>(scales[row * stride + column / kNvBlock]) / *global;
  }
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

// The codes of a chunk as words.
template <typename F>
struct CodeWords {
  static constexpr int kCount = kCodeChunk * F::kBits / 32;
  std::uint32_t at[kCount];

  __device__ float value(int i) const { return decode<F>(static_cast<std::uint8_t>(at[i * F::kBits / 32] >> (i * F::kBits % 32))); }
};

// From an address that is a multiple of their size.
template <typename F>
__device__ CodeWords<F> load_codes(const std::uint8_t* from) {
  CodeWords<F> words;
  if constexpr (CodeWords<F>::kCount == 1) {
    words.at[0] = *reinterpret_cast<const std::uint32_t*>(from);
  } else {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    words.at[0] = both.x;
    words.at[1] = both.y;
  }
  return words;
}

}  // namespace heddle::cuda
