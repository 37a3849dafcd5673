#include "autograd/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/tensors.h"

namespace heddle {
namespace {

using test::counting;
using test::error_of;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Tensor, CreationFillsShapeAndDtype) {
  EXPECT_EQ(Tensor::full({2, 3}, 1.5, DType::bf16).to_doubles(), std::vector<double>(6, 1.5));
  EXPECT_EQ(Tensor::zeros({2}, DType::i64).to_vector<std::int64_t>(), (std::vector<std::int64_t>{0, 0}));
  EXPECT_EQ(Tensor::full({2}, 7.0, DType::boolean).to_vector<bool>(), (std::vector<bool>{true, true}));
  EXPECT_EQ(Tensor::scalar(2.0).shape(), Shape{});
  EXPECT_EQ(Tensor::empty({2, 3, 4}).strides(), (Shape{12, 4, 1}));
}

TEST(Tensor, FromVectorRoundTripsEveryDtype) {
  EXPECT_EQ(Tensor::from_vector<double>({1, 2}, {2}).to_vector<double>(), (std::vector<double>{1, 2}));
  EXPECT_EQ(Tensor::from_vector<float>({1, 2}, {2}).to_vector<float>(), (std::vector<float>{1, 2}));
  EXPECT_EQ(Tensor::from_vector<std::int64_t>({INT64_MAX, INT64_MIN}, {2}).to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{INT64_MAX, INT64_MIN}));
  EXPECT_EQ(Tensor::from_vector<std::int32_t>({-1, 2}, {2}).to_vector<std::int32_t>(), (std::vector<std::int32_t>{-1, 2}));
  EXPECT_EQ(Tensor::from_vector<std::uint8_t>({255, 0}, {2}).to_vector<std::uint8_t>(), (std::vector<std::uint8_t>{255, 0}));
  EXPECT_EQ(Tensor::from_vector<bool>({true, false}, {2}).to_vector<bool>(), (std::vector<bool>{true, false}));
  EXPECT_EQ(Tensor::from_vector<bfloat16>({bfloat16(2.0f)}, {1}).to_vector<bfloat16>()[0].bits, bfloat16(2.0f).bits);
}

TEST(Tensor, FromVectorRefusesAnotherCount) {
  EXPECT_EQ(error_of([] { Tensor::from_vector<float>({1, 2, 3}, {2}); }), "from_vector: 3 values given for shape [2]");
}

TEST(Tensor, ToVectorRefusesAnotherDtype) {
  EXPECT_EQ(error_of([] { Tensor::zeros({1}).to_vector<double>(); }), "to_vector: tensor is float32, asked for float64");
}

TEST(Tensor, ScalarAndOneElementVectorDiffer) {
  const Tensor scalar = Tensor::scalar(3.0), vector = Tensor::full({1}, 3.0);

  EXPECT_FALSE(scalar.shape() == vector.shape());
  EXPECT_EQ(scalar.item(), vector.item());
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_EQ(sum(Tensor::full({5}, 1.0)).shape(), Shape{});
  EXPECT_EQ(reshape(scalar, {1}).shape(), Shape{1});
  EXPECT_EQ(reshape(vector, {}).shape(), Shape{});
}

TEST(Tensor, ItemNeedsOneValue) {
  EXPECT_EQ(error_of([] { Tensor::zeros({2}).item(); }), "item: needs exactly one value, tensor is [2]");
  EXPECT_EQ(error_of([] { Tensor::zeros({0}).item(); }), "item: needs exactly one value, tensor is [0]");
}

TEST(Tensor, UndefinedTensorIsRefusedByName) {
  EXPECT_EQ(error_of([] { Tensor().shape(); }), "tensor: used before it was given a value");
  EXPECT_EQ(Tensor().describe(), "undefined");
}

TEST(Tensor, PrintsDescriptionAndValues) {
  EXPECT_EQ(counting({2, 2}, DType::f32).to_string(), "float32 [2, 2] on cpu {0, 1, 2, 3}");
  EXPECT_EQ(Tensor::from_vector<std::int64_t>({1234567890}, {1}).to_string(), "int64 [1] on cpu {1234567890}");
  EXPECT_EQ(transpose(counting({2, 2}, DType::i32), 0, 1).to_string(), "int32 [2, 2] on cpu {0, 2, 1, 3}");
  EXPECT_EQ(Tensor::zeros({0, 3}).to_string(), "float32 [0, 3] on cpu {}");
  EXPECT_EQ(Tensor::scalar(-0.5, DType::f16).to_string(), "float16 [] on cpu {-0.5}");
  EXPECT_TRUE(Tensor::zeros({65}, DType::u8).to_string().ends_with(" 0, 0, ... (65 values)}"));
}

TEST(Tensor, SizesBeyond64BitsAreRefused) {
  const std::int64_t huge = std::int64_t{1} << 40;

  EXPECT_EQ(error_of([&] { Tensor::empty({huge, huge}); }),
            "tensor: shape [1099511627776, 1099511627776] has more elements than 64 bits can count in bytes");
  EXPECT_NE(error_of([&] { Tensor::empty({0, huge, huge}); }), "no error");  // its strides would overflow
  EXPECT_NE(error_of([&] { expand(Tensor::scalar(1.0), {huge, huge}); }), "no error");
  EXPECT_NE(error_of([&] { reshape(Tensor::zeros({0}), {std::int64_t{1} << 32, std::int64_t{1} << 32}); }), "no error");
  EXPECT_EQ(error_of([] { Tensor::empty({2, -1}); }), "tensor: sizes must be >= 0, got [2, -1]");
  EXPECT_EQ(error_of([] { expand(Tensor::zeros({1}), {-1}); }), "expand: sizes must be >= 0, got [-1]");
}

TEST(Tensor, RankIsLimited) {
  EXPECT_EQ(error_of([] { Tensor::empty({1, 1, 1, 1, 1, 1, 1}); }), "shape: rank is limited to 6");
}

// --- Views ---

TEST(View, SharesStorageAndVersion) {
  const Tensor x = counting({2, 3, 4});
  const std::vector<Tensor> views = {transpose(x, 0, 2), permute(x, {1, 0, 2}), slice(x, 1, 1, 3),       select_index(x, 0, 1),
                                     reshape(x, {4, 6}), unsqueeze(x, 1),       expand(x, {5, 2, 3, 4}), x.detach(),
                                     split(x, {1, 2}, 1)[1]};

  for (const Tensor& view : views) EXPECT_EQ(view.storage(), x.storage());
  x.fill_(7.0);
  for (const Tensor& view : views) {
    EXPECT_EQ(view.version(), x.version());
    EXPECT_EQ(view.to_doubles(), std::vector<double>(static_cast<std::size_t>(view.numel()), 7.0));
  }
}

TEST(View, WriteThroughASliceReachesTheBase) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f64);

  slice(x, 1, 1, 2).fill_(5.0);

  EXPECT_EQ(x.to_doubles(), (std::vector<double>{0, 5, 0, 0, 5, 0}));
}

TEST(View, PermuteMovesStrides) {
  const Tensor x = permute(counting({2, 3, 4}), {2, 0, -2});  // [4, 2, 3]

  EXPECT_EQ(x.shape(), (Shape{4, 2, 3}));
  EXPECT_EQ(x.strides(), (Shape{1, 12, 4}));
  EXPECT_EQ(select_index(x, 0, 1).to_doubles(), (std::vector<double>{1, 5, 9, 13, 17, 21}));
}

TEST(View, ErrorsNameTheOp) {
  const Tensor x = Tensor::zeros({2, 3});

  EXPECT_EQ(error_of([&] { permute(x, {0}); }), "permute: 1 dimensions given for [2, 3]");
  EXPECT_EQ(error_of([&] { permute(x, {0, -2}); }), "permute: dimension -2 given twice");
  EXPECT_EQ(error_of([&] { transpose(x, 0, 2); }), "transpose: dimension 2 is out of range for rank 2");
  EXPECT_EQ(error_of([&] { slice(x, 1, 2, 4); }), "slice: [2, 4) is outside dimension 1 of [2, 3]");
  EXPECT_EQ(error_of([&] { select_index(x, 0, 2); }), "select_index: index 2 is outside dimension 0 of [2, 3]");
  EXPECT_EQ(error_of([&] { expand(x, {4, 3}); }),
            "expand: shapes [2, 3] and [4, 3] do not broadcast; sizes must be equal or 1, aligned on the right");
  EXPECT_EQ(error_of([&] { expand(x, {3}); }), "expand: [2, 3] does not expand to [3]");
  EXPECT_EQ(error_of([&] { squeeze(x, 0); }), "squeeze: dimension 0 of [2, 3] is not 1");
  EXPECT_EQ(error_of([&] { split(x, {1, 1}, 1); }), "split: sizes add up to 2, dimension 1 of [2, 3] is 3");
  EXPECT_EQ(error_of([&] { concat({x, Tensor::zeros({2, 2})}, 0); }),
            "concat: float32 [2, 2] on cpu does not join float32 [2, 3] on cpu along dimension 0");
  EXPECT_EQ(error_of([&] { reshape(x, {4, -1}); }), "reshape: [2, 3] with 6 elements does not fit [4, -1]");
  EXPECT_EQ(error_of([&] { reshape(x, {-1, -1}); }), "reshape: sizes must be >= 0, one may be -1, got [-1, -1]");
  EXPECT_EQ(error_of([&] { reshape(Tensor::zeros({0}), {0, -1}); }), "reshape: [0] with 0 elements does not fit [0, -1]");
}

// Whether a reshape of these strides can be a view, and that its values are right either way.
struct ReshapeCase {
  const char* name;
  Tensor x;
  Shape target;
  bool is_view;
};

std::vector<ReshapeCase> reshape_cases() {
  const Tensor x = counting({4, 6, 5});
  return {
      {"dense merge", x, {24, 5}, true},
      {"dense split", x, {2, 2, 6, 5}, true},
      {"dense across", x, {8, 15}, true},
      {"inferred size", x, {4, -1}, true},
      {"permuted, whole dimensions kept", permute(x, {2, 0, 1}), {5, 24}, true},
      {"permuted, dimension split", permute(x, {2, 0, 1}), {5, 2, 2, 6}, true},
      {"permuted, dimensions mixed", permute(x, {2, 0, 1}), {20, 6}, false},
      {"transposed to flat", transpose(x, 0, 2), {120}, false},
      {"column slice, rows kept", slice(x, 2, 1, 4), {24, 3}, true},
      {"column slice to flat", slice(x, 2, 1, 4), {72}, false},
      {"row slice", slice(x, 0, 1, 3), {60}, true},
      {"size 1 added and dropped", slice(x, 1, 2, 3), {1, 4, 5, 1}, true},
      {"size 1 with any stride", transpose(slice(x, 0, 1, 2), 0, 2), {5, 6}, true},
      {"expanded, repeats kept", expand(unsqueeze(x, 1), {4, 3, 6, 5}), {4, 3, 30}, true},
      {"expanded, repeats split", expand(counting({1}), {6}), {2, 3}, true},
      {"expanded, repeats merged with data", expand(unsqueeze(x, 1), {4, 3, 6, 5}), {12, 30}, false},
      {"scalar", Tensor::scalar(0.0, DType::f64), {1, 1}, true},
      {"zero size", slice(x, 0, 2, 2), {5, 0, 3}, true},
  };
}

TEST(View, ReshapeIsAViewExactlyWhereStridesAllow) {
  for (const ReshapeCase& test : reshape_cases()) {
    SCOPED_TRACE(test.name);
    const Tensor y = reshape(test.x, test.target);

    EXPECT_EQ(y.storage() == test.x.storage(), test.is_view);
    EXPECT_EQ(y.to_doubles(), test.x.to_doubles());
    EXPECT_EQ(y.numel(), test.x.numel());
  }
}

TEST(View, ContiguousCopiesOnlyWhenNeeded) {
  const Tensor x = counting({2, 3});

  EXPECT_EQ(contiguous(x).storage(), x.storage());
  EXPECT_EQ(contiguous(slice(x, 0, 1, 2)).storage(), x.storage());
  EXPECT_EQ(contiguous(transpose(x, 0, 1)).to_doubles(), (std::vector<double>{0, 3, 1, 4, 2, 5}));
  EXPECT_NE(contiguous(transpose(x, 0, 1)).storage(), x.storage());
}

TEST(View, ZeroSizesPassThroughEveryView) {
  const Tensor x = Tensor::zeros({2, 0, 3});

  EXPECT_EQ(transpose(x, 0, 1).shape(), (Shape{0, 2, 3}));
  EXPECT_EQ(slice(x, 1, 0, 0).numel(), 0);
  EXPECT_EQ(expand(unsqueeze(x, 0), {4, 2, 0, 3}).numel(), 0);
  EXPECT_EQ(split(x, {1, 1}, 0)[1].shape(), (Shape{1, 0, 3}));
  EXPECT_EQ(concat({x, x}, 2).shape(), (Shape{2, 0, 6}));
  EXPECT_EQ(concat({x, Tensor::zeros({2, 1, 3})}, 1).to_doubles(), std::vector<double>(6, 0.0));
}

TEST(View, ConcatUndoesSplit) {
  const Tensor x = counting({2, 5, 3});

  EXPECT_EQ(concat(split(x, {2, 0, 3}, 1), 1).to_doubles(), x.to_doubles());
  EXPECT_EQ(concat(split(x, {1, 2}, -1), -1).to_doubles(), x.to_doubles());
}

// --- In-place copies ---

TEST(Copy, BroadcastsAndConverts) {
  const Tensor x = Tensor::zeros({2, 3}, DType::i32);

  x.copy_(Tensor::from_vector<double>({1.9, -1.9, 0.5}, {3}));

  EXPECT_EQ(x.to_vector<std::int32_t>(), (std::vector<std::int32_t>{1, -1, 0, 1, -1, 0}));
}

TEST(Copy, OntoOverlappingMemoryReadsTheOldValues) {
  const Tensor square = counting({3, 3});
  square.copy_(transpose(square, 0, 1));
  EXPECT_EQ(square.to_doubles(), (std::vector<double>{0, 3, 6, 1, 4, 7, 2, 5, 8}));

  const Tensor line = counting({6});
  slice(line, 0, 1, 6).copy_(slice(line, 0, 0, 5));
  EXPECT_EQ(line.to_doubles(), (std::vector<double>{0, 0, 1, 2, 3, 4}));

  const Tensor doubled = counting({4});
  doubled.add_(doubled);
  EXPECT_EQ(doubled.to_doubles(), (std::vector<double>{0, 2, 4, 6}));
}

TEST(Copy, IntoRepeatedElementsIsRefused) {
  const Tensor x = expand(Tensor::zeros({1, 3}), {2, 3});

  EXPECT_EQ(error_of([&] { x.fill_(1.0); }),
            "fill_: the target [2, 3] repeats its elements along dimension 0; clone it before the write");
}

// --- 16-bit floats ---

TEST(Half, EveryBfloat16CodeSurvivesARoundTripThroughFloat) {
  for (int code = 0; code < 65536; ++code) {
    bfloat16 value;
    value.bits = static_cast<std::uint16_t>(code);
    const bool is_nan = (code & 0x7FFF) > 0x7F80;
    const std::uint16_t expected = is_nan ? static_cast<std::uint16_t>(code | 0x40) : value.bits;  // quieted
    ASSERT_EQ(bfloat16(static_cast<float>(value)).bits, expected) << code;
  }
}

TEST(Half, EveryFloat16CodeDecodesToItsValueAndBack) {
  for (int code = 0; code < 65536; ++code) {
    float16 value;
    value.bits = static_cast<std::uint16_t>(code);
    const int exponent = (code >> 10) & 31, mantissa = code & 1023;
    const float decoded = value;
    if (exponent == 31 && mantissa != 0) {
      ASSERT_TRUE(std::isnan(decoded) && std::isnan(static_cast<float>(float16(decoded)))) << code;
      continue;
    }
    double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) magnitude = kInfinity;
    ASSERT_EQ(decoded, (code & 0x8000) != 0 ? -magnitude : magnitude) << code;
    ASSERT_EQ(float16(decoded).bits, code);
  }
}

// Between two neighbouring codes: the midpoint goes to the even code, a float step to either side to the nearer one.
template <typename Half>
void check_ties(int last_finite) {
  for (int code = 0; code < last_finite; ++code) {
    Half low, high;
    low.bits = static_cast<std::uint16_t>(code);
    high.bits = static_cast<std::uint16_t>(code + 1);
    const float middle = static_cast<float>(low) + (static_cast<float>(high) - static_cast<float>(low)) / 2.0f;
    ASSERT_EQ(Half(middle).bits, code % 2 == 0 ? low.bits : high.bits) << code;
    ASSERT_EQ(Half(std::nextafter(middle, 0.0f)).bits, low.bits) << code;
    ASSERT_EQ(Half(std::nextafter(middle, HUGE_VALF)).bits, high.bits) << code;
    ASSERT_EQ(Half(-middle).bits, Half(middle).bits | 0x8000) << code;
  }
}

TEST(Half, Bfloat16TiesGoToTheEvenCode) { check_ties<bfloat16>(0x7F7F); }
TEST(Half, Float16TiesGoToTheEvenCode) { check_ties<float16>(0x7BFF); }

TEST(Half, OverflowGivesInfinity) {
  EXPECT_EQ(float16(65519.996f).bits, 0x7BFF);  // under the midpoint of 65504 and 65536
  EXPECT_EQ(float16(65520.0f).bits, 0x7C00);
  EXPECT_EQ(float16(-1e10f).bits, 0xFC00);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(bfloat16(-HUGE_VALF).bits, 0xFF80);
}

TEST(Cast, EveryPairOfDtypesKeepsSmallIntegers) {
  const std::vector<DType> dtypes = {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8};
  for (DType from : dtypes)
    for (DType to : dtypes) EXPECT_EQ(cast(counting({5}, from), to).to_doubles(), (std::vector<double>{0, 1, 2, 3, 4}));
}

TEST(Cast, AnyNonZeroValueIsTrue) {
  const Tensor x = Tensor::from_vector<double>({0.0, -0.0, 0.25, -3.0, kInfinity, NAN}, {6});

  EXPECT_EQ(cast(x, DType::boolean).to_vector<bool>(), (std::vector<bool>{false, false, true, true, true, true}));
  EXPECT_EQ(cast(cast(x, DType::boolean), DType::f32).to_doubles(), (std::vector<double>{0, 0, 1, 1, 1, 1}));
}

TEST(Cast, Float64RoundsOnceToSixteenBits) {
  // Just above the midpoint of two bfloat16 values, by less than a float can see: rounding to float first would land on
  // the midpoint and then on the even code below.
  const double above_tie = 1.0 + 0x1p-8 + 0x1p-40;

  EXPECT_EQ(cast(Tensor::scalar(above_tie, DType::f64), DType::bf16).item(), 1.0 + 0x1p-7);
  EXPECT_EQ(cast(Tensor::scalar(1.0 + 0x1p-11 + 0x1p-40, DType::f64), DType::f16).item(), 1.0 + 0x1p-10);
  EXPECT_EQ(cast(Tensor::scalar(-above_tie, DType::f64), DType::bf16).item(), -1.0 - 0x1p-7);
  EXPECT_EQ(cast(Tensor::scalar(1.0 + 3 * 0x1p-8 - 0x1p-40, DType::f64), DType::bf16).item(), 1.0 + 0x1p-7);
}

}  // namespace
}  // namespace heddle
