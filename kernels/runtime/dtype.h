#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>
#include <type_traits>

#include "kernels/runtime/check.h"
#include "kernels/runtime/half.h"

namespace heddle {

enum class DType : std::uint8_t { f64, f32, bf16, f16, i64, i32, u8, boolean };

std::size_t dtype_size(DType dtype);            // bytes an element
std::string_view dtype_name(DType dtype);       // "float32", "bfloat16", ...
DType dtype_from_name(std::string_view name);   // the inverse; throws on an unknown name
constexpr bool is_floating(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}
std::ostream& operator<<(std::ostream& out, DType dtype);

// The DType of a C++ element type.
template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, double>) return DType::f64;
  else if constexpr (std::is_same_v<T, float>) return DType::f32;
  else if constexpr (std::is_same_v<T, bfloat16>) return DType::bf16;
  else if constexpr (std::is_same_v<T, float16>) return DType::f16;
  else if constexpr (std::is_same_v<T, std::int64_t>) return DType::i64;
  else if constexpr (std::is_same_v<T, std::int32_t>) return DType::i32;
  else if constexpr (std::is_same_v<T, std::uint8_t>) return DType::u8;
  else {
    static_assert(std::is_same_v<T, bool>, "not an element type of a heddle tensor");
    return DType::boolean;
  }
}

// The type a reduction over T accumulates in: double for double, float for every narrower float.
template <typename T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls fn(std::type_identity<T>{}) with the element type of `dtype`, which must be floating point.
template <typename Fn>
decltype(auto) dispatch_float(DType dtype, std::string_view op, Fn&& fn) {
  switch (dtype) {
    case DType::f64: return fn(std::type_identity<double>{});
    case DType::f32: return fn(std::type_identity<float>{});
    case DType::bf16: return fn(std::type_identity<bfloat16>{});
    case DType::f16: return fn(std::type_identity<float16>{});
    default: throw Error(concat_text(op, ": needs a floating-point dtype, got ", dtype, "; cast it first"));
  }
}

// Calls fn(std::type_identity<T>{}) with the element type of `dtype`.
template <typename Fn>
decltype(auto) dispatch_any(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::f64: return fn(std::type_identity<double>{});
    case DType::f32: return fn(std::type_identity<float>{});
    case DType::bf16: return fn(std::type_identity<bfloat16>{});
    case DType::f16: return fn(std::type_identity<float16>{});
    case DType::i64: return fn(std::type_identity<std::int64_t>{});
    case DType::i32: return fn(std::type_identity<std::int32_t>{});
    case DType::u8: return fn(std::type_identity<std::uint8_t>{});
    case DType::boolean: return fn(std::type_identity<bool>{});
  }
  throw Error("dtype: value outside the enumeration");
}

}  // namespace heddle
