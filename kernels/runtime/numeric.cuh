#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/runtime/dtype.h"

namespace heddle::cuda {

// One number type to another, rounded once to nearest even; the half types by the hardware's instructions. A non-zero value
// becomes true, a float becomes an integer by truncation.
template <typename To, typename From>
__device__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) return value;
  else if constexpr (std::is_same_v<From, bfloat16>) return convert<To>(__bfloat162float(__ushort_as_bfloat16(value.bits)));
  else if constexpr (std::is_same_v<From, float16>) return convert<To>(__half2float(__ushort_as_half(value.bits)));
  else if constexpr (std::is_same_v<To, bfloat16>) {
    To half;
    if constexpr (std::is_same_v<From, float>) half.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    else half.bits = __bfloat16_as_ushort(__double2bfloat16(static_cast<double>(value)));
    return half;
  } else if constexpr (std::is_same_v<To, float16>) {
    To half;
    if constexpr (std::is_same_v<From, float>) half.bits = __half_as_ushort(__float2half_rn(value));
    else half.bits = __half_as_ushort(__double2half(static_cast<double>(value)));
    return half;
  } else if constexpr (std::is_same_v<To, bool>) return value != From(0);
  else return static_cast<To>(value);
}

template <typename A>
__device__ constexpr A infinity() {
  if constexpr (std::is_same_v<A, double>) return __builtin_huge_val();
  else return __builtin_huge_valf();
}

// The most negative finite number.
template <typename A>
__device__ constexpr A lowest() {
  if constexpr (std::is_same_v<A, double>) return -1.7976931348623157e308;
  else return -3.402823466e38f;
}

// V neighbouring elements that are moved as one.
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
  T at[V];
};

// Elements of the widest load, 16 bytes.
template <typename T>
inline constexpr int kWide = 16 / sizeof(T);

}  // namespace heddle::cuda
