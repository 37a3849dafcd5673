#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "kernels/quantize/formats.h"
#include "kernels/runtime/half.h"
#include "kernels/runtime/random.h"
#include "nn/safetensors.h"
#include "tests/support/compare.h"

// Single numbers of the 4 and 8 bit formats.

namespace heddle {
namespace {

constexpr float kNanValue = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinite = std::numeric_limits<float>::infinity();

template <typename F>
constexpr int kCodes = 1 << F::kBits;
template <typename F>
constexpr std::uint8_t kSignBit = 1 << (F::kBits - 1);

// The code by its definition: of the non-negative finite values, which ascend with their codes, the nearest one, of two equally near
// the even one.
template <typename F>
std::uint8_t nearest_code(float value) {
  const double magnitude = std::min<double>(std::abs(value), F::kLargest);  // gaps beyond it would round to equals
  std::uint8_t best = 0;
  for (std::uint8_t code = 0; code <= F::kLargestCode; ++code) {
    const double gap = std::abs(magnitude - decode<F>(code)), least = std::abs(magnitude - decode<F>(best));
    if (gap < least || (gap == least && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? kSignBit<F> : 0));
}

template <typename F>
class SmallFloat : public ::testing::Test {};
using Formats = ::testing::Types<E2M1, E4M3, E5M2>;
TYPED_TEST_SUITE(SmallFloat, Formats);

TYPED_TEST(SmallFloat, EveryCodeThatIsANumberComesBack) {
  for (int code = 0; code < kCodes<TypeParam>; ++code) {
    const float value = decode<TypeParam>(static_cast<std::uint8_t>(code));
    if (!std::isfinite(value)) continue;
    EXPECT_EQ(encode<TypeParam>(value), code) << value;
  }
}

TYPED_TEST(SmallFloat, TiesAndTheFloatsBesideThemRoundToTheNearest) {
  for (std::uint8_t code = 0; code < TypeParam::kLargestCode; ++code) {
    const float middle = (decode<TypeParam>(code) + decode<TypeParam>(static_cast<std::uint8_t>(code + 1))) / 2;
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInfinite)}) {
      EXPECT_EQ(encode<TypeParam>(value), nearest_code<TypeParam>(value)) << value;
      EXPECT_EQ(encode<TypeParam>(-value), nearest_code<TypeParam>(-value)) << -value;
    }
  }
}

TYPED_TEST(SmallFloat, EveryExponentOfFloatAndTheFloatsBesideItRoundToTheNearest) {
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent)
    for (const std::uint32_t bits : {exponent << 23, (exponent << 23) + 1, (exponent << 23) + 0x7FFFFFu, (exponent << 23) + 0x400000u}) {
      const float value = std::bit_cast<float>(bits);
      EXPECT_EQ(encode<TypeParam>(value), nearest_code<TypeParam>(value)) << value;
    }
}

TYPED_TEST(SmallFloat, EveryBfloat16RoundsToTheNearest) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = std::bit_cast<float>(bits << 16);
    if (std::isnan(value)) continue;
    ASSERT_EQ(encode<TypeParam>(value), nearest_code<TypeParam>(value)) << value;
  }
}

TYPED_TEST(SmallFloat, SaturatesAndKeepsTheSignOfZeroAndNan) {
  EXPECT_EQ(encode<TypeParam>(kInfinite), TypeParam::kLargestCode);
  EXPECT_EQ(encode<TypeParam>(-1e30f), TypeParam::kLargestCode | kSignBit<TypeParam>);
  EXPECT_EQ(encode<TypeParam>(-0.0f), kSignBit<TypeParam>);
  EXPECT_EQ(encode<TypeParam>(kNanValue), TypeParam::kNan);
  EXPECT_EQ(encode<TypeParam>(-kNanValue), TypeParam::kNan | kSignBit<TypeParam>);
}

// With a quarter of the distance to the next value, one in four draws goes up: 1000 of 4000, with a standard deviation of 27.
TYPED_TEST(SmallFloat, StochasticRoundingGoesUpAsOftenAsTheDistanceSays) {
  for (const std::uint8_t code : {std::uint8_t{0}, std::uint8_t{1}, std::uint8_t{4}, std::uint8_t{TypeParam::kLargestCode - 1}}) {
    const float low = decode<TypeParam>(code), high = decode<TypeParam>(static_cast<std::uint8_t>(code + 1));
    const float value = low + (high - low) / 4;
    int up = 0;
    for (std::uint64_t i = 0; i < 1000; ++i)
      for (const std::uint32_t random : philox(7, i, 0)) {
        const std::uint8_t drawn = encode_stochastic<TypeParam>(value, random);
        ASSERT_TRUE(drawn == code || drawn == code + 1);
        up += drawn == code + 1 ? 1 : 0;
      }
    EXPECT_NEAR(up, 1000, 5 * 27) << value;
  }
}

TYPED_TEST(SmallFloat, StochasticRoundingLeavesExactValuesAlone) {
  for (int code = 0; code < kCodes<TypeParam>; ++code) {
    const float value = decode<TypeParam>(static_cast<std::uint8_t>(code));
    if (!std::isfinite(value)) continue;
    for (const std::uint32_t random : {0u, 0x12345678u, ~0u}) EXPECT_EQ(encode_stochastic<TypeParam>(value, random), code) << value;
  }
  EXPECT_EQ(encode_stochastic<TypeParam>(1e30f, ~0u), TypeParam::kLargestCode);
}

// Far below the smallest value s a draw still has its chance: 2^-12 s goes up for one in 4096 of the words.
TYPED_TEST(SmallFloat, StochasticRoundingOfTinyValuesIsRareButNotNever) {
  const float tiny = std::ldexp(decode<TypeParam>(1), -12);

  EXPECT_EQ(encode_stochastic<TypeParam>(tiny, 0u), 0);
  EXPECT_EQ(encode_stochastic<TypeParam>(tiny, ~0u), 1);
  EXPECT_EQ(encode_stochastic<TypeParam>(0.0f, ~0u), 0);
}

template <typename F>
std::set<float> finite_values() {
  std::set<float> values;
  for (int code = 0; code < kCodes<F>; ++code)
    if (const float value = decode<F>(static_cast<std::uint8_t>(code)); std::isfinite(value)) values.insert(value);
  return values;
}

TEST(E2M1, HasItsFifteenValues) {
  EXPECT_EQ(finite_values<E2M1>(), (std::set<float>{-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6}));
}

TEST(E2M1, TiesGoToTheEvenMantissa) {
  const std::pair<float, float> ties[] = {{.25f, 0}, {.75f, 1}, {1.25f, 1}, {1.75f, 2}, {2.5f, 2}, {3.5f, 4}, {5, 4}};
  for (const auto& [value, rounded] : ties) EXPECT_EQ(decode<E2M1>(encode<E2M1>(value)), rounded) << value;
}

TEST(E4M3, HasTheRangeOfItsDefinition) {
  const std::set<float> values = finite_values<E4M3>();

  EXPECT_EQ(values.size(), 253u);
  EXPECT_EQ(*values.rbegin(), 448.0f);
  EXPECT_EQ(*values.upper_bound(0.0f), 0x1p-9f);
  EXPECT_EQ(encode<E4M3>(20), 90);
  EXPECT_EQ(encode<E4M3>(22), 91);
  EXPECT_EQ(encode<E4M3>(448), 126);
}

TEST(E5M2, HasTheRangeOfItsDefinition) {
  const std::set<float> values = finite_values<E5M2>();

  EXPECT_EQ(values.size(), 247u);
  EXPECT_EQ(*values.rbegin(), 57344.0f);
  EXPECT_EQ(*values.upper_bound(0.0f), 0x1p-16f);
  EXPECT_EQ(decode<E5M2>(0x7C), kInfinite);
  EXPECT_EQ(decode<E5M2>(0xFC), -kInfinite);
}

// 61440 is half way to the power of two that would be infinity.
TEST(E5M2, SaturatesOnBothSidesOfTheOverflow) {
  for (const float value : {57344.0f, 58000.0f, 61439.0f, 61440.0f, 65536.0f}) EXPECT_EQ(encode<E5M2>(value), 0x7B) << value;
}

TEST(SmallFloats, RoundTheExamplesWorkedByHand) {
  const auto e4m3 = [](float value) { return decode<E4M3>(encode<E4M3>(value)); };
  const auto e5m2 = [](float value) { return decode<E5M2>(encode<E5M2>(value)); };

  EXPECT_NEAR(e4m3(1e-3f), 0.00195, 5e-6);
  EXPECT_NEAR(e5m2(1e-3f), 0.00098, 5e-6);
  EXPECT_EQ(e4m3(1e-5f), 0.0f);
  EXPECT_NEAR(e5m2(1e-5f), 0.0000153, 5e-8);
  EXPECT_EQ(e4m3(10.10f), 10.0f);
  EXPECT_EQ(e4m3(-3.54f), -3.5f);
  EXPECT_EQ(e4m3(0.07f), 0.0703125f);
  EXPECT_EQ(e4m3(0.31f), 0.3125f);
  EXPECT_EQ(e4m3(2.71f), 2.75f);
}

TEST(E8M0, EveryCodeIsItsPowerOfTwo) {
  for (int code = 0; code < 255; ++code) EXPECT_EQ(decode_e8m0(static_cast<std::uint8_t>(code)), std::ldexp(1.0f, code - 127)) << code;
  EXPECT_TRUE(std::isnan(decode_e8m0(kE8M0Nan)));
}

class PyTorchCasts : public ::testing::Test {
 protected:
  nn::SafetensorsFile file_{HEDDLE_SOURCE_DIR "/tests/data/quant.safetensors"};

  template <typename F>
  void expect_equal(const std::string& name) {
    const std::vector<float> values = file_.read(name + "/values").to_vector<float>();
    for (int code = 0; code < kCodes<F>; ++code) {
      const float value = decode<F>(static_cast<std::uint8_t>(code)), expected = values[static_cast<std::size_t>(code)];
      EXPECT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected))) << code << ": " << value << ", " << expected;
    }
    const std::vector<float> x = file_.read(name + "/x").to_vector<float>();
    const std::vector<std::uint8_t> codes = file_.read(name + "/codes").to_vector<std::uint8_t>();
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(encode<F>(x[i]), codes[i]) << x[i];
  }
};

TEST_F(PyTorchCasts, EqualE4M3) { expect_equal<E4M3>("e4m3"); }
TEST_F(PyTorchCasts, EqualE5M2) { expect_equal<E5M2>("e5m2"); }

TEST_F(PyTorchCasts, EqualE8M0) {
  const std::vector<float> values = file_.read("e8m0/values").to_vector<float>();
  for (int code = 0; code < 255; ++code) EXPECT_EQ(decode_e8m0(static_cast<std::uint8_t>(code)), values[static_cast<std::size_t>(code)]);
}

}  // namespace
}  // namespace heddle
