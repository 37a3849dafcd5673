#pragma once

#include <cassert>

#include "kernels/runtime/device.h"
#include "kernels/runtime/dtype.h"
#include "kernels/runtime/shape.h"

namespace heddle {

// Read-only memory with a shape: what a kernel receives for an input. Strides are in elements; `data` already points
// at element [0, 0, ...]. It owns nothing. An undefined optional input is a default-constructed view.
struct ConstView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  Shape shape;
  Shape strides;

  bool defined() const { return data != nullptr || shape.rank() > 0; }
  std::int64_t numel() const { return shape.numel(); }
  bool is_contiguous() const {
    const Shape dense = contiguous_strides(shape);
    for (int i = 0; i < shape.rank(); ++i)
      if (shape[i] != 1 && strides[i] != dense[i]) return numel() == 0;
    return true;
  }

  template <typename T>
  const T* as() const {
    assert(dtype == dtype_of<T>());
    return static_cast<const T*>(data);
  }
};

// Writable memory with a shape: what a kernel receives for an output.
struct MutView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  Shape shape;
  Shape strides;

  operator ConstView() const { return {data, dtype, device, shape, strides}; }
  bool defined() const { return data != nullptr || shape.rank() > 0; }
  std::int64_t numel() const { return shape.numel(); }
  bool is_contiguous() const { return ConstView(*this).is_contiguous(); }

  template <typename T>
  T* as() const {
    assert(dtype == dtype_of<T>());
    return static_cast<T*>(data);
  }
};

// How a kernel writes a result: overwrite it or add to what is there.
enum class Write { assign, accumulate };

}  // namespace heddle
