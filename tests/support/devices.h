#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "kernels/runtime/device.h"
#include "kernels/runtime/dtype.h"

namespace heddle::test {

inline constexpr Device kCuda{DeviceType::cuda, 0};

// A test that needs a GPU. Without one it is skipped; HEDDLE_REQUIRE_CUDA=1 in the environment makes that a failure.
template <typename Base = ::testing::Test>
class NeedsCuda : public Base {
 protected:
  void SetUp() override {
    const DeviceSupport support = device_support(kCuda);
    if (support.ok) return;
    const char* required = std::getenv("HEDDLE_REQUIRE_CUDA");
    if (required != nullptr && std::string_view(required) == "1") FAIL() << "HEDDLE_REQUIRE_CUDA=1, but " << support.reason;
    GTEST_SKIP() << support.reason;
  }
};

// The largest relative error of rounding once to the dtype.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::bf16: return 0x1p-8;
    default: return 0x1p-11;
  }
}

}  // namespace heddle::test
