#include "kernels/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/quantize/scales.h"
#include "kernels/runtime/parallel.h"
#include "nn/safetensors.h"
#include "tests/support/compare.h"
#include "tests/support/quantized.h"
#include "tests/support/tensors.h"

// Whole matrices on the CPU: layouts, scales and what is read back.

namespace heddle {
namespace {

using test::all_specs;
using test::error_of;
using test::error_sums;
using test::Quantized;
using test::quantized;
using Bytes = std::vector<std::uint8_t>;

constexpr QuantSpec kMxFloor{.format = QuantFormat::mxfp4};
constexpr QuantSpec kMxCeil{.format = QuantFormat::mxfp4, .mx_rounding = MxRounding::ceil};
constexpr QuantSpec kNvNearest{.format = QuantFormat::nvfp4};
constexpr QuantSpec kNvUp{.format = QuantFormat::nvfp4, .scale_rounding = ScaleRounding::up};
constexpr QuantSpec kFp4{.format = QuantFormat::fp4};
constexpr QuantSpec kFp8{.format = QuantFormat::fp8_e4m3};
constexpr QuantSpec kFp8Channel{.format = QuantFormat::fp8_e4m3, .grain = ScaleGrain::channel};
constexpr QuantSpec kFp8BlockSpec{.format = QuantFormat::fp8_e4m3, .grain = ScaleGrain::block};

Tensor row(const std::vector<float>& values) { return Tensor::from_vector(values, {1, static_cast<std::int64_t>(values.size())}); }

// The running example: two blocks of 16.
const std::vector<float> kExample = {0.31f, -0.47f, 0.12f, 0.28f, -0.19f, 0.41f, -0.35f, 0.07f, 0.22f, -0.44f, 0.38f,
                                     -0.11f, 0.16f, 0.29f, -0.25f, 0.44f, -3.54f, -3.14f, 1.33f, 10.10f, -0.07f, 2.71f,
                                     -1.62f, 0.88f, 3.01f, -2.35f, 0.15f, 1.97f, -0.53f, 2.24f, -1.11f, 0.66f};

struct Errors {
  double mse, largest, mse_a, mse_b;
  int zeros_in_a;
};

Errors errors_of(const std::vector<double>& read) {
  Errors out{};
  for (std::size_t i = 0; i < kExample.size(); ++i) {
    const double error = std::abs(read[i] - static_cast<double>(kExample[i]));
    (i < 16 ? out.mse_a : out.mse_b) += error * error / 16;
    out.mse += error * error / 32;
    out.largest = std::max(out.largest, error);
    if (i < 16 && read[i] == 0) ++out.zeros_in_a;
  }
  return out;
}

// Half a unit in the last digit of the worked numbers.
void expect_errors(const std::vector<double>& read, const Errors& expected) {
  const Errors found = errors_of(read);
  EXPECT_NEAR(found.mse, expected.mse, 5e-6);
  EXPECT_NEAR(found.largest, expected.largest, 5e-4);
  EXPECT_NEAR(found.mse_a, expected.mse_a, 5e-6);
  EXPECT_NEAR(found.mse_b, expected.mse_b, 5e-6);
  EXPECT_EQ(found.zeros_in_a, expected.zeros_in_a);
}

template <typename F>
std::vector<double> cast_values() {
  std::vector<double> out;
  for (const float value : kExample) out.push_back(decode<F>(encode<F>(value)));
  return out;
}

TEST(QuantizeByHand, Fp8WithoutScale) {
  expect_errors(cast_values<E4M3>(), {0.00127, 0.110, 0.00001, 0.00252, 0});
  expect_errors(cast_values<E5M2>(), {0.00611, 0.240, 0.00024, 0.01197, 0});
}

TEST(QuantizeByHand, Fp4) {
  const Quantized q = quantized(row(kExample), kFp4);

  EXPECT_NEAR(q.scales.item(), 1.68333, 5e-6);
  expect_errors(q.values().to_doubles(), {0.06735, 0.410, 0.08490, 0.04980, 13});
}

TEST(QuantizeByHand, Mxfp4) {
  const Quantized q = quantized(row(kExample), kMxFloor);

  EXPECT_EQ(q.scale_bytes(), Bytes{128});  // 2^1
  expect_errors(q.values().to_doubles(), {0.19549, 1.900, 0.09411, 0.29688, 16});
}

TEST(QuantizeByHand, Nvfp4RoundedUp) {
  const Quantized q = quantized(row(kExample), kNvUp);
  const float global = q.global.to_vector<float>()[0];

  EXPECT_NEAR(global, 266.1386, 5e-5);
  EXPECT_EQ(q.scale_bytes(), (Bytes{91, 126}));  // 22 and 448
  EXPECT_NEAR(22 / global, 0.082664, 5e-7);
  EXPECT_NEAR(448 / global, 1.683333, 5e-7);
  const std::vector<double> expected = {0.3307, -0.4960, 0.1240, 0.2480, -0.1653, 0.3307, -0.3307, 0.0827, 0.2480, -0.4960, 0.3307,
                                        -0.1240, 0.1653, 0.3307, -0.2480, 0.4960, -3.3667, -3.3667, 1.6833, 10.1000, 0, 2.5250,
                                        -1.6833, 0.8417, 3.3667, -2.5250, 0, 1.6833, -0.8417, 2.5250, -0.8417, 0.8417};
  EXPECT_TRUE(test::all_close(q.values(), expected, 5e-5));
  expect_errors(q.values().to_doubles(), {0.02555, 0.357, 0.00131, 0.04980, 0});
  double signal = 0;
  for (const float value : kExample) signal += static_cast<double>(value) * value / 32;
  EXPECT_NEAR(10 * std::log10(signal / errors_of(q.values().to_doubles()).mse), 23.0, 0.05);
}

TEST(QuantizeByHand, Nvfp4RoundedToNearest) {
  const Quantized q = quantized(row(kExample), kNvNearest);

  EXPECT_EQ(q.scale_bytes(), (Bytes{90, 126}));  // 20 and 448
  EXPECT_NEAR(20 / q.global.item(), 0.0751488, 5e-8);
  expect_errors(q.values().to_doubles(), {0.02529, 0.357, 0.00078, 0.04980, 0});
}

// 4096 x 4096: 4 bits and a float32; 4 and 8 bits for 32; 4 and 8 for 16 and a float32.
TEST(QuantLayout, TakesTheBitsOfItsFormat) {
  const auto bits = [](const QuantSpec& spec) {
    const QuantLayout layout = quant_layout(spec, 4096, 4096);
    const auto scale_bytes = layout.scales.numel() * static_cast<std::int64_t>(dtype_size(layout.scale_dtype));
    return 8.0 * static_cast<double>(layout.codes.numel() + scale_bytes + (layout.has_global ? 4 : 0)) / (4096.0 * 4096.0);
  };

  EXPECT_NEAR(bits(kFp8), 8, 5e-6);
  EXPECT_NEAR(bits(kFp4), 4.000002, 5e-7);
  EXPECT_NEAR(bits(kMxFloor), 4.25, 5e-7);
  EXPECT_NEAR(bits(kNvNearest), 4.500002, 5e-7);
}

TEST(QuantLayout, RoundsRaggedBlocksUp) {
  EXPECT_EQ(quant_layout(kNvNearest, 3, 17).codes, (Shape{3, 9}));
  EXPECT_EQ(quant_layout(kNvNearest, 3, 17).scales, (Shape{3, 2}));
  EXPECT_EQ(quant_layout(kMxFloor, 3, 33).scales, (Shape{3, 2}));
  EXPECT_EQ(quant_layout(kFp8Channel, 3, 5).scales, (Shape{3, 1}));
  EXPECT_EQ(quant_layout(kFp8BlockSpec, 129, 256).scales, (Shape{2, 2}));
}

// Values 0.5, 1, 1.5 and 2 under a scale of 1 are the codes 1 to 4.
TEST(Quantize, PutsTheEvenColumnInTheLowerHalfOfAByte) {
  const Quantized q = quantized(row({0.5f, 1, 1.5f, 2, 6}), kFp4);

  EXPECT_EQ(q.code_bytes(), (Bytes{0x21, 0x43, 0x07}));
}

TEST(Quantize, MxfpScaleIsTheFloorOrTheLeastThatSaturatesNothing) {
  struct Case {
    float amax;
    float floor, ceil;  // scales
  };
  for (const Case& c : {Case{7, 1, 2}, Case{6, 1, 1}, Case{6.5f, 1, 2}, Case{4, 1, 1}, Case{3.9f, 0.5f, 1}, Case{8, 2, 2}}) {
    EXPECT_EQ(decode_e8m0(quantized(row({c.amax, 1}), kMxFloor).scale_bytes()[0]), c.floor) << c.amax;
    EXPECT_EQ(decode_e8m0(quantized(row({c.amax, 1}), kMxCeil).scale_bytes()[0]), c.ceil) << c.amax;
  }
  EXPECT_EQ(quantized(row({7, 0}), kMxFloor).values().to_doubles()[0], 6);
  EXPECT_EQ(quantized(row({7, 0}), kMxCeil).values().to_doubles()[0], 8);  // 3.5 ties to 4
}

TEST(Quantize, ReadsTheSmallestMxfpScale) {
  Quantized q = quantized(row({1, 1}), kMxFloor);
  q.codes.copy_(Tensor::from_vector(Bytes{0x22}, {1, 1}));  // 1.0, 1.0

  for (const std::uint8_t scale : Bytes{0, 1, 254}) {
    q.scales.copy_(Tensor::from_vector(Bytes{scale}, {1, 1}));
    EXPECT_EQ(q.values().to_doubles()[0], std::ldexp(1.0, scale - 127));
  }
}

TEST(Quantize, ZeroBlocksReadAsZeroUnderAScaleThatCanBeDividedBy) {
  for (const auto& [name, spec] : all_specs()) {
    std::vector<float> values(4 * 33, 0.0f);
    for (const bool is_partly : {false, true}) {
      if (is_partly) values[0] = 1;  // the rows after it stay zero
      const Quantized q = quantized(Tensor::from_vector(values, {4, 33}), spec);

      std::vector<double> expected(values.begin(), values.end());
      EXPECT_TRUE(test::all_close(q.values(), expected, 1e-6)) << name;  // the largest element is within rounding of itself
      const Bytes codes = q.code_bytes();
      EXPECT_TRUE(std::all_of(codes.begin() + (is_partly ? 1 : 0), codes.end(), [](std::uint8_t code) { return code == 0; })) << name;
      for (const double scale : q.scales.to_doubles()) {
        EXPECT_TRUE(std::isfinite(scale)) << name;
        // As a code of E8M0 0 is 2^-127.
        if (spec.format != QuantFormat::mxfp4) { EXPECT_GT(scale, 0) << name; }
        if (spec.format == QuantFormat::nvfp4) { EXPECT_LT(scale, E4M3::kNan) << name; }
      }
    }
  }
}

// The largest distance from x to what is read, in units of the scale: half the widest gap of the format. A scale that rounds down
// saturates: MXFP4 elements up to 8 become 6; an E4M3 scale is at most 2^-4 off, so 6 * 17/16 becomes 6.
double worst_error(const QuantSpec& spec) {
  if (spec.format == QuantFormat::fp8_e4m3) return 16;
  if (spec.format == QuantFormat::fp8_e5m2) return 4096;
  return spec.format == QuantFormat::mxfp4 && spec.mx_rounding == MxRounding::floor ? 2 : 1;
}

double largest_scale(const Quantized& q) {
  double out = 0;
  for (const double scale : q.scales.to_doubles()) {
    const auto code = static_cast<std::uint8_t>(scale);
    if (q.spec.format == QuantFormat::mxfp4) out = std::max<double>(out, decode_e8m0(code));
    else if (q.spec.format == QuantFormat::nvfp4) out = std::max<double>(out, decode<E4M3>(code) / q.global.item());
    else out = std::max(out, scale);
  }
  return out;
}

TEST(Quantize, StaysWithinItsGapsOnRaggedMatricesOfEveryDtype) {
  for (const auto& [name, spec] : all_specs())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{2, 64}, Shape{130, 33}, Shape{5, 259}}) {
        const Tensor x = test::random_tensor(shape, dtype, 3);
        const Quantized q = quantized(x, spec);

        const double bound = worst_error(spec) * largest_scale(q) * (1 + 0x1p-22);
        EXPECT_TRUE(test::all_close(q.values(), x.to_doubles(), bound)) << name << ' ' << dtype << ' ' << shape;
      }
}

TEST(Quantize, TakesRowsThatLieApart) {
  const Tensor wide = test::random_tensor({6, 50}, DType::f32);
  const Tensor part = slice(wide, 1, 3, 40);
  for (const auto& [name, spec] : all_specs()) {
    const Quantized apart = quantized(part, spec), dense = quantized(part.clone(), spec);
    EXPECT_EQ(apart.code_bytes(), dense.code_bytes()) << name;
    EXPECT_EQ(apart.scales.to_doubles(), dense.scales.to_doubles()) << name;
  }
}

TEST(Quantize, HugeAndTinyMatricesKeepTheirSignal) {
  for (const auto& [name, spec] : all_specs())
    for (const double size : {1e30, 8e37, 1e-30, 1e-37}) {
      const Tensor x = scale(test::random_tensor({4, 48}, DType::f32, 5), size / 4);
      const std::vector<double> given = x.to_doubles(), read = quantized(x, spec).values().to_doubles();
      double signal = 0, noise = 0;
      for (std::size_t i = 0; i < given.size(); ++i) {
        ASSERT_TRUE(std::isfinite(read[i])) << name << ' ' << size;
        signal += std::pow(given[i] / size, 2);
        noise += std::pow((given[i] - read[i]) / size, 2);
      }
      EXPECT_LT(noise, 0.05 * signal) << name << ' ' << size;
    }
}

// The smallest positive float has no scale that fits it; what is read is finite and no larger than it is.
TEST(Quantize, SubnormalsAreFinite) {
  for (const auto& [name, spec] : all_specs())
    for (const double value : quantized(row({1e-45f, -1e-45f, 0, 1e-42f}), spec).values().to_doubles()) EXPECT_LE(std::abs(value), 1e-41) << name;
}

TEST(Quantize, AnOutlierCostsItsBlockAlone) {
  std::vector<float> values(32, 1.0f);
  values[3] = 1e30f;
  const std::vector<double> read = quantized(row(values), kNvNearest).values().to_doubles();

  EXPECT_NEAR(read[3] / 1e30, 1, 1e-6);
  EXPECT_EQ(read[4], 0);
  // The other block's scale would be 2688 / 6e30, far below 2^-9: it has the smallest scale there is, and reads as 0.
  EXPECT_EQ(read[20], 0);
  std::vector<float> mild(32, 1.0f);
  mild[3] = 1000;
  EXPECT_NEAR(quantized(row(mild), kNvNearest).values().to_doubles()[20], 1, 0.1);
}

double squared_distance(const Tensor& x, const QuantSpec& spec) {
  const std::vector<double> given = x.to_doubles(), read = quantized(x, spec).values().to_doubles();
  double sum = 0;
  for (std::size_t i = 0; i < given.size(); ++i) sum += (given[i] - read[i]) * (given[i] - read[i]);
  return sum;
}

TEST(Quantize, SearchingScalesOnlyHelps) {
  const Tensor x = test::random_tensor({16, 256}, DType::f32, 9);
  const double none = squared_distance(x, kNvNearest);
  const double four = squared_distance(x, {.format = QuantFormat::nvfp4, .scale_search = ScaleSearch::four_over_six});
  const double mse = squared_distance(x, {.format = QuantFormat::nvfp4, .scale_search = ScaleSearch::mse});

  EXPECT_LT(four, none);
  EXPECT_LT(mse, four);
}

TEST(Quantize, FourOverSixTakesFourWhereThatIsExact) {
  // Under amax / 6 the elements 3 of 4 would be 4.5; under amax / 4 all are on the grid.
  const QuantSpec spec{.format = QuantFormat::nvfp4, .scale_search = ScaleSearch::four_over_six};
  std::vector<float> values(16, 3.0f);
  values[0] = 4;
  const Quantized q = quantized(row(values), spec);

  EXPECT_EQ(q.scale_bytes(), Bytes{encode<E4M3>(384)});  // 256 * 6 / 4
  EXPECT_EQ(q.code_bytes()[0], 0x56);                    // 3, 4
}

// The tensor scale is that of the larger of two matrices for both of them; 4 in the smaller one has its own block scale.
TEST(Quantize, MatricesThatShareAmaxShareTheirTensorScale) {
  const Tensor small = row({1, 2, 3, 4}), large = row({8, 2, 3, 4}), amax_of_both = Tensor::zeros({1});
  for (const Tensor& x : {large, small}) amax({.x = x.view(), .out = amax_of_both.mutable_view(), .write = Write::accumulate}, device_context(kCpu));
  ASSERT_EQ(amax_of_both.item(), 8);
  const auto shared = test::quantized(small, kNvNearest, {}, amax_of_both);

  EXPECT_EQ(shared.global.item(), quantized(large, kNvNearest).global.item());
  EXPECT_EQ(shared.scale_bytes(), Bytes{encode<E4M3>(224)});
  EXPECT_EQ(shared.values().to_doubles()[3], 4);
}

TEST(Amax, ShowsNanAndInfinity) {
  const auto amax_of = [](const std::vector<float>& values) {
    const Tensor out = Tensor::empty({1});
    amax({.x = row(values).view(), .out = out.mutable_view()}, device_context(kCpu));
    return out.item();
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();

  EXPECT_EQ(amax_of({1, -3, 2}), 3);
  EXPECT_TRUE(std::isnan(amax_of({1, -nan, inf})));
  EXPECT_EQ(amax_of({1, -inf}), inf);
  EXPECT_EQ(amax_of({}), 0);
}

TEST(Quantize, IsTheSameOnAnyNumberOfThreadsAndLeavesItsInputAlone) {
  const Tensor x = test::random_tensor({130, 260}, DType::f32, 2);
  const std::vector<double> before = x.to_doubles();
  const int threads = num_threads();
  for (const auto& [name, spec] : all_specs()) {
    const Quantized first = quantized(x, spec, /*seed=*/4);
    set_num_threads(3);
    const Quantized second = quantized(x, spec, /*seed=*/4);
    set_num_threads(threads);
    EXPECT_EQ(first.code_bytes(), second.code_bytes()) << name;
    EXPECT_EQ(first.scales.to_doubles(), second.scales.to_doubles()) << name;
  }
  EXPECT_EQ(x.to_doubles(), before);
}

// 1.25 is half way between 1 and 1.5: to nearest it is always 1, drawn it is 1.25 on average. Of 4096 draws the mean is within
// 5 * 0.25 / 64 = 0.02.
TEST(Quantize, StochasticRoundingHasNoBias) {
  std::vector<float> values(4096, 1.25f);
  values[0] = 6;
  const auto mean_of = [&](std::optional<std::uint64_t> seed) {
    double sum = 0;
    for (const double value : quantized(row(values), kFp4, seed).values().to_doubles()) sum += value;
    return (sum - 6) / 4095;
  };

  EXPECT_EQ(mean_of({}), 1);
  EXPECT_NEAR(mean_of(3), 1.25, 0.02);
  EXPECT_NE(mean_of(3), mean_of(4));
}

TEST(Dequantize, ReadsAPartAsTheWholeHasIt) {
  const Tensor x = test::random_tensor({140, 300}, DType::f32, 8);
  for (const auto& [name, spec] : all_specs()) {
    const Quantized q = quantized(x, spec);
    const Tensor part = Tensor::empty({30, 141});
    dequantize({.w = q.view(), .first_row = 110, .first_column = 122, .out = part.mutable_view()}, device_context(kCpu));
    EXPECT_EQ(part.to_doubles(), slice(slice(q.values(), 0, 110, 140), 1, 122, 263).to_doubles()) << name;
  }
}

TEST(Dequantize, RoundsOnceToTheDtypeWanted) {
  const Tensor x = test::random_tensor({5, 48}, DType::f32, 8);
  for (const auto& [name, spec] : all_specs())
    for (const DType dtype : {DType::bf16, DType::f16, DType::f64})
      EXPECT_EQ(quantized(x, spec).values(dtype).to_doubles(), cast(quantized(x, spec).values(), dtype).to_doubles()) << name;
}

// Block scale 2^-9, tensor scale 1e-37, code 1: 0.5 * 2^-9 * 1e-37 is a subnormal float, not 0.
TEST(Dequantize, MultipliesScalesInFloat32) {
  Quantized q = quantized(row({1, 1}), kNvNearest);
  q.codes.copy_(Tensor::from_vector(Bytes{0x01}, {1, 1}));
  q.scales.copy_(Tensor::from_vector(Bytes{0x01}, {1, 1}));
  q.global.fill_(1e37);

  EXPECT_NEAR(q.values().to_doubles()[0] / (0x1p-10 * 1e-37), 1, 1e-4);
  EXPECT_GT(q.values(DType::bf16).to_doubles()[0], 0);
}

TEST(Quantize, EmptyMatricesHaveNoCodes) {
  for (const auto& [name, spec] : all_specs())
    for (const Shape& shape : {Shape{0, 32}, Shape{4, 0}}) {
      const Quantized q = quantized(Tensor::zeros(shape), spec);
      EXPECT_EQ(q.values().shape(), shape) << name;
      EXPECT_EQ(error_sums(Tensor::zeros(shape), q), std::vector<double>(5, 0.0)) << name;
    }
}

// Two sums of n terms that are not negative, in two orders: each is off by at most n roundings of double, and by one more where a square is
// rounded before it is added.
TEST(QuantError, IsTheDifferenceOfWhatIsReadFromWhatWasThere) {
  for (const auto& [name, spec] : all_specs())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Tensor x = slice(test::random_tensor({37, 300}, dtype, 8), 1, 3, 296);
      const Quantized q = quantized(x, spec);
      const std::vector<double> values = x.clone().to_doubles(), read = q.values().to_doubles(), sums = error_sums(x, q);
      std::vector<double> expected(5, 0.0);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double error = values[i] - read[i];
        expected[0] += values[i] * values[i];
        expected[1] += error * error;
        expected[2] = std::max(expected[2], std::abs(values[i]));
        expected[3] = std::max(expected[3], std::abs(error));
        expected[4] += values[i] != 0 && read[i] == 0 ? 1 : 0;
      }
      const double bound = 2 * static_cast<double>(values.size() + 1) * 0x1p-53;

      EXPECT_NEAR(sums[0], expected[0], bound * expected[0]) << name;
      EXPECT_NEAR(sums[1], expected[1], bound * expected[1]) << name;
      EXPECT_EQ(std::vector(sums.begin() + 2, sums.end()), std::vector(expected.begin() + 2, expected.end())) << name;
    }
}

TEST(QuantError, IsTheSameOnAnyNumberOfThreads) {
  const Tensor x = test::random_tensor({45, 70}, DType::f32, 8);
  const Quantized q = quantized(x, kNvNearest);
  std::vector<std::vector<double>> found;
  const int before = num_threads();
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    found.push_back(error_sums(x, q));
  }
  set_num_threads(before);

  EXPECT_EQ(found[0], found[1]);
}

TEST(Quantize, RefusesWhatDoesNotFit) {
  const Tensor x = Tensor::zeros({2, 32}), codes = Tensor::zeros({2, 15}, DType::u8), scales = Tensor::zeros({2, 2}, DType::u8);
  const Tensor one = Tensor::zeros({1});
  const ExecContext& ctx = device_context(kCpu);

  EXPECT_EQ(error_of([&] {
              quantize({.x = x.view(), .spec = kNvNearest, .amax = one.view(), .codes = codes.mutable_view(), .scales = scales.mutable_view(),
                        .global = one.mutable_view()}, ctx);
            }),
            "quantize: codes must be dense uint8 [2, 16], got uint8 [2, 15]");
  EXPECT_EQ(error_of([&] { amax({.x = transpose(Tensor::zeros({2, 3}), 0, 1).view(), .out = one.mutable_view()}, ctx); }),
            "amax: needs a matrix of floating dtype with dense rows, got float32 [3, 2]; copy it first");
  EXPECT_EQ(error_of([&] { error_sums(Tensor::zeros({2, 31}), quantized(x, kNvNearest)); }),
            "quant_error: the source is [2, 31], the quantised matrix [2, 32]");
  const Quantized q = quantized(x, kNvNearest);
  EXPECT_EQ(error_of([&] { dequantize({.w = q.view(), .first_row = 1, .first_column = 2, .out = x.mutable_view()}, ctx); }),
            "dequantize: [2, 32] from [1, 2] on is not in [2, 32]; the first column must be even");
}

// What the compressed-tensors package and PyTorch make of the same weights.
class QuantizeReference : public ::testing::Test {
 protected:
  nn::SafetensorsFile file_{HEDDLE_SOURCE_DIR "/tests/data/quant.safetensors"};
  Bytes bytes(const std::string& name) { return file_.read(name).to_vector<std::uint8_t>(); }
};

TEST_F(QuantizeReference, Nvfp4IsTheSameByteForByte) {
  const Quantized q = quantized(file_.read("weight"), kNvNearest);

  EXPECT_EQ(q.code_bytes(), bytes("nvfp4/weight_packed"));
  EXPECT_EQ(q.scale_bytes(), bytes("nvfp4/weight_scale"));
  EXPECT_EQ(q.global.to_vector<float>(), file_.read("nvfp4/weight_global_scale").to_vector<float>());
}

TEST_F(QuantizeReference, Mxfp4IsTheSameByteForByte) {
  const Quantized q = quantized(file_.read("weight"), kMxFloor);

  EXPECT_EQ(q.code_bytes(), bytes("mxfp4/weight_packed"));
  EXPECT_EQ(q.scale_bytes(), bytes("mxfp4/weight_scale"));
}

TEST_F(QuantizeReference, Fp8IsTheSameByteForByte) {
  for (const auto& [name, spec] : {std::pair{"fp8_tensor", kFp8}, std::pair{"fp8_channel", kFp8Channel}}) {
    const Quantized q = quantized(file_.read("weight"), spec);
    EXPECT_EQ(q.code_bytes(), bytes(std::string(name) + "/weight")) << name;
    EXPECT_EQ(q.scales.to_vector<float>(), file_.read(std::string(name) + "/weight_scale").to_vector<float>()) << name;
  }
}

}  // namespace
}  // namespace heddle
