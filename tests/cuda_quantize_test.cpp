// The codecs on the GPU write and read the same bits as those on the CPU.

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "autograd/ops.h"
#include "kernels/quantize/formats.h"
#include "kernels/quantize/quant_gemm.h"
#include "kernels/quantize/recode.h"
#include "kernels/quantize/scales.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/random.h"
#include "quant/quant_linear.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"
#include "tests/support/quantized.h"
#include "tests/support/tensors.h"

namespace heddle::test {
namespace {

using CudaQuantize = NeedsCuda<>;
using Bytes = std::vector<std::uint8_t>;

void expect_same(const Quantized& cpu, const Quantized& gpu, const std::string& what) {
  EXPECT_EQ(cpu.code_bytes(), gpu.code_bytes()) << what;
  EXPECT_EQ(cpu.scales.to_doubles(), gpu.scales.to_doubles()) << what;
  if (cpu.global.defined()) { EXPECT_EQ(cpu.global.item(), gpu.global.item()) << what; }
}

std::string text_of(const NamedSpec& spec, DType dtype, const Shape& shape) { return concat_text(spec.name, ' ', dtype, ' ', shape); }

TEST_F(CudaQuantize, WritesTheBytesOfTheCpu) {
  for (const NamedSpec& named : all_specs())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{5, 16}, Shape{130, 33}, Shape{4, 259}, Shape{256, 512}})
        for (const std::optional<std::uint64_t> seed : {std::optional<std::uint64_t>{}, std::optional<std::uint64_t>{5}}) {
          const Tensor x = random_tensor(shape, dtype, 3);
          expect_same(quantized(x, named.spec, seed), quantized(x.to(kCuda), named.spec, seed), text_of(named, dtype, shape));
        }
}

// Multiples of 1/2 up to 6, where many scales have equal errors, normal numbers, where few have, and both at the ends of what scales can be.
TEST_F(CudaQuantize, SearchesFindTheScalesOfTheCpu) {
  const Tensor normal = random_tensor({256, 1024}, DType::f32, 4);
  const Tensor grid = cast(cast(scale(normal, 3.0), DType::i32), DType::f32);
  for (const Tensor& x : {normal, grid})
    for (const double factor : {1.0, 0x1p-126, 0x1p-90, 0x1p120})
      for (const ScaleSearch search : {ScaleSearch::four_over_six, ScaleSearch::mse})
        for (const ScaleRounding rounding : {ScaleRounding::nearest, ScaleRounding::up}) {
          const QuantSpec spec{.scale_rounding = rounding, .scale_search = search};
          const Tensor scaled = slice(scale(x, factor), 0, 0, factor == 1.0 ? 256 : 32);
          expect_same(quantized(scaled, spec), quantized(scaled.to(kCuda), spec), concat_text(static_cast<int>(search), " factor ", factor));
        }
}

TEST_F(CudaQuantize, WritesTheSameBytesForRowsThatLieApart) {
  const Tensor part = slice(random_tensor({6, 70}, DType::bf16).to(kCuda), 1, 3, 67);
  for (const NamedSpec& named : all_specs()) expect_same(quantized(part.to(kCpu), named.spec), quantized(part, named.spec), named.name);
}

TEST_F(CudaQuantize, ReadsTheValuesOfTheCpu) {
  for (const NamedSpec& named : all_specs())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const Shape& shape : {Shape{3, 7}, Shape{130, 33}, Shape{4, 259}, Shape{256, 512}}) {
        const Tensor x = random_tensor(shape, DType::f32, 3);
        const Quantized cpu = quantized(x, named.spec), gpu = quantized(x.to(kCuda), named.spec);
        EXPECT_EQ(cpu.values(dtype).to_doubles(), gpu.values(dtype).to_doubles()) << text_of(named, dtype, shape);
      }
}

TEST_F(CudaQuantize, ReadsAPartAsTheWholeHasIt) {
  const Tensor x = random_tensor({140, 320}, DType::f32, 8).to(kCuda);
  for (const NamedSpec& named : all_specs())
    for (const std::int64_t first : {122, 128}) {
      const Quantized q = quantized(x, named.spec);
      const Tensor part = Tensor::empty({30, 141}, DType::f32, kCuda);
      dequantize({.w = q.view(), .first_row = 110, .first_column = first, .out = part.mutable_view()}, device_context(kCuda));
      EXPECT_EQ(part.to_doubles(), slice(slice(q.values(), 0, 110, 140), 1, first, first + 141).to_doubles()) << named.name << ' ' << first;
    }
}

TEST_F(CudaQuantize, FindsTheLargestMagnitude) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{700, 1000}, Shape{70000, 3}}) {
      const Tensor x = random_tensor(shape, dtype, 4);
      const Tensor expected = Tensor::zeros({1}), found = Tensor::full({1}, 100.0, DType::f32, kCuda);
      amax({.x = x.view(), .out = expected.mutable_view()}, device_context(kCpu));
      amax({.x = x.to(kCuda).view(), .out = found.mutable_view()}, device_context(kCuda));
      EXPECT_EQ(found.item(), expected.item()) << dtype << ' ' << shape;
    }
  const Tensor found = Tensor::full({1}, 100.0, DType::f32, kCuda), small = Tensor::zeros({2, 2}, DType::f32, kCuda);
  amax({.x = small.view(), .out = found.mutable_view(), .write = Write::accumulate}, device_context(kCuda));
  EXPECT_EQ(found.item(), 100);
}

// Two sums of n terms that are not negative, in two orders: each is off by at most n roundings of double, and by one more where a square is
// rounded before it is added. The rest takes no rounding that depends on the order.
TEST_F(CudaQuantize, FindsTheErrorsThatTheCpuFinds) {
  for (const NamedSpec& named : all_specs())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{130, 33}, Shape{1500, 3000}}) {
        const Tensor x = random_tensor(shape, dtype, 3);
        const Quantized gpu = quantized(x.to(kCuda), named.spec);
        const std::vector<double> expected = error_sums(x, quantized(x, named.spec)), found = error_sums(x.to(kCuda), gpu);
        const double bound = 2 * static_cast<double>(shape.numel() + 1) * 0x1p-53;

        for (const std::size_t i : {0u, 1u}) EXPECT_NEAR(found[i], expected[i], bound * expected[i]) << text_of(named, dtype, shape) << ' ' << i;
        for (const std::size_t i : {2u, 3u, 4u}) EXPECT_EQ(found[i], expected[i]) << text_of(named, dtype, shape) << ' ' << i;
        EXPECT_EQ(error_sums(x.to(kCuda), gpu), found) << text_of(named, dtype, shape);
      }
}

// More than is decoded at a time.
TEST_F(CudaQuantize, FindsTheErrorOfRowsThatLieApart) {
  const Tensor x = slice(random_tensor({3000, 2000}, DType::bf16, 3).to(kCuda), 1, 5, 1998);
  const Quantized gpu = quantized(x, {}), cpu = quantized(x.to(kCpu), {});
  const std::vector<double> expected = error_sums(x.to(kCpu), cpu), found = error_sums(x, gpu);

  EXPECT_NEAR(found[1], expected[1], 2 * static_cast<double>(x.numel() + 1) * 0x1p-53 * expected[1]);
  EXPECT_EQ(found[4], expected[4]);
}

// Floats of random bits with the exponents [lowest, highest], as they are stored.
Tensor random_bits(const Shape& shape, std::uint32_t lowest, std::uint32_t highest) {
  const Tensor out = Tensor::empty(shape);
  float* data = out.mutable_view().as<float>();
  parallel_for((shape.numel() + 3) / 4, 1 << 12, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto words = philox(17, static_cast<std::uint64_t>(i), 0);
      for (std::int64_t j = 0; j < 4 && 4 * i + j < shape.numel(); ++j) {
        const std::uint32_t word = words[static_cast<std::size_t>(j)];
        const std::uint32_t exponent = lowest + (word >> 23 & 0xFFu) % (highest - lowest + 1);
        data[4 * i + j] = std::bit_cast<float>((word & 0x807FFFFFu) | exponent << 23);
      }
    }
  });
  return out;
}

// An amax that makes the scale 1: the element codecs alone, over every exponent of float.
TEST_F(CudaQuantize, HundredMillionRandomFloatsHaveTheCodesOfTheCpu) {
  const Tensor x = random_bits({10000, 10000}, 0, 254), on_gpu = x.to(kCuda);
  struct Case {
    QuantFormat format;
    float largest;
  };
  for (const auto& [format, largest] :
       {Case{QuantFormat::fp8_e4m3, E4M3::kLargest}, Case{QuantFormat::fp8_e5m2, E5M2::kLargest}, Case{QuantFormat::fp4, E2M1::kLargest}}) {
    const QuantSpec spec{.format = format};
    std::array<Bytes, 2> codes;
    for (const Tensor& source : {x, on_gpu}) {
      const Device device = source.device();
      const Tensor amax_one = Tensor::full({1}, largest, DType::f32, device), scale = Tensor::empty({1}, DType::f32, device);
      const Tensor out = Tensor::empty(quant_layout(spec, 10000, 10000).codes, DType::u8, device);
      quantize({.x = source.view(), .spec = spec, .amax = amax_one.view(), .codes = out.mutable_view(), .scales = scale.mutable_view()},
               device_context(device));
      EXPECT_EQ(scale.item(), 1);
      codes[device.is_cuda() ? 1 : 0] = out.to_vector<std::uint8_t>();
    }
    EXPECT_TRUE(codes[0] == codes[1]) << name_of(format);
  }
}

// Block scales and all, over 40 exponents. The search over all scales takes too long on the CPU for as many.
TEST_F(CudaQuantize, HundredMillionRandomFloatsHaveTheBlocksOfTheCpu) {
  const Tensor x = random_bits({10000, 10000}, 107, 147), on_gpu = x.to(kCuda);
  for (const NamedSpec& named : all_specs()) {
    if (named.spec.scale_search == ScaleSearch::mse) continue;
    const Quantized cpu = quantized(x, named.spec), gpu = quantized(on_gpu, named.spec);
    EXPECT_TRUE(cpu.code_bytes() == gpu.code_bytes()) << named.name;
    EXPECT_TRUE(cpu.scales.to_doubles() == gpu.scales.to_doubles()) << named.name;
  }
}

// x w^T + bias in float64 of what x and w read as, and the sums of the magnitudes of its terms.
struct Reference {
  std::vector<double> values, magnitudes;

  Reference(const std::vector<double>& x, const std::vector<double>& w, const std::vector<double>& bias, std::int64_t K) {
    const auto terms = static_cast<std::size_t>(K), rows = x.size() / terms, columns = w.size() / terms;
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < columns; ++j) {
        double sum = bias.empty() ? 0.0 : bias[j], magnitude = std::abs(sum);
        for (std::size_t k = 0; k < terms; ++k) {
          sum += x[i * terms + k] * w[j * terms + k];
          magnitude += std::abs(x[i * terms + k] * w[j * terms + k]);
        }
        values.push_back(sum);
        magnitudes.push_back(magnitude);
      }
  }

  void expect(const Tensor& found, double bound, const std::string& what) const {
    const std::vector<double> y = found.to_doubles();
    ASSERT_EQ(y.size(), values.size()) << what;
    for (std::size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], values[i], bound * magnitudes[i]) << what << ", element " << i;
  }
};

// Few rows go through the kernels that decode as they read, if the columns are a multiple of their pieces, others through decoded parts. A
// bound of 3 roundings: of the weight, of the result, and of the sum, whose 2080 terms at 2^-24 each are less than one rounding to bfloat16
// or float16.
TEST_F(CudaQuantize, ProductsAreThoseOfTheDecodedWeight) {
  for (const NamedSpec& named : all_specs())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const std::int64_t K : {200, 2080})
        for (const std::int64_t M : {1, 3, 5, 9, 16, 17}) {
          const Tensor x = random_tensor({M, K}, dtype, 5), bias = random_tensor({90}, dtype, 6);
          const Quantized w = quantized(random_tensor({90, K}, DType::f32, 7).to(kCuda), named.spec);
          const Tensor y = Tensor::empty({M, 90}, dtype, kCuda);
          quant_gemm({.x = x.to(kCuda).view(), .w = w.view(), .out = y.mutable_view(), .bias = bias.to(kCuda).view()}, device_context(kCuda));

          const double unit = dtype == DType::f32 ? static_cast<double>(K) * 0x1p-24 : unit_roundoff(dtype);
          Reference(x.to_doubles(), w.values().to_doubles(), bias.to_doubles(), K).expect(y, 3 * unit, text_of(named, dtype, {M, K}));
        }
}

// Enough rows of the weight that blocks have fewer warps.
TEST_F(CudaQuantize, ProductsOfFewRowsAreThoseOfALargeWeight) {
  using enum QuantFormat;
  constexpr std::int64_t kN = 12700, kK = 1056;
  for (const QuantSpec& spec : {QuantSpec{.format = fp8_e4m3, .grain = ScaleGrain::block}, QuantSpec{.format = mxfp4}, QuantSpec{.format = nvfp4}}) {
    const Quantized w = quantized(random_tensor({kN, kK}, DType::bf16, 7).to(kCuda), spec);
    for (const std::int64_t M : {2, 9}) {
      const Tensor x = random_tensor({M, kK}, DType::bf16, 5), y = Tensor::empty({M, kN}, DType::bf16, kCuda);
      quant_gemm({.x = x.to(kCuda).view(), .w = w.view(), .out = y.mutable_view()}, device_context(kCuda));
      Reference(x.to_doubles(), w.values().to_doubles(), {}, kK).expect(y, 3 * unit_roundoff(DType::bf16), concat_text(name_of(spec.format), ' ', M));
    }
  }
}

TEST_F(CudaQuantize, FewRowsAreAddedToWhatIsThere) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor x = random_tensor({3, 64}, dtype, 5);
    const Quantized w = quantized(random_tensor({40, 64}, DType::f32, 7).to(kCuda), {});
    const Tensor y = Tensor::full({3, 40}, 2.0, dtype, kCuda), two = Tensor::full({40}, 2.0);
    quant_gemm({.x = x.to(kCuda).view(), .w = w.view(), .out = y.mutable_view(), .write = Write::accumulate}, device_context(kCuda));

    const double unit = dtype == DType::f32 ? 64 * 0x1p-24 : unit_roundoff(dtype);
    Reference(x.to_doubles(), w.values().to_doubles(), two.to_doubles(), 64).expect(y, 3 * unit, concat_text(dtype));
  }
}

// A NaN in a weight is one in all that is multiplied with its row.
TEST_F(CudaQuantize, FewRowsKeepNanOfFp8Weights) {
  for (const QuantFormat format : {QuantFormat::fp8_e4m3, QuantFormat::fp8_e5m2}) {
    Quantized w = quantized(random_tensor({40, 64}, DType::f32, 7), {.format = format});
    w.codes.mutable_view().as<std::uint8_t>()[5 * 64 + 9] = 0x7F;
    w.codes = w.codes.to(kCuda), w.scales = w.scales.to(kCuda);
    const Tensor y = Tensor::empty({2, 40}, DType::bf16, kCuda);
    quant_gemm({.x = random_tensor({2, 64}, DType::bf16, 5).to(kCuda).view(), .w = w.view(), .out = y.mutable_view()}, device_context(kCuda));

    const std::vector<double> values = y.to_doubles();
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(std::isnan(values[i]), i % 40 == 5) << name_of(format) << ' ' << i;
  }
}

TEST_F(CudaQuantize, InputGradientsAreThoseOfTheDecodedWeight) {
  for (const NamedSpec& named : all_specs()) {
    const Tensor dy = random_tensor({20, 96}, DType::bf16, 5);
    const Quantized w = quantized(random_tensor({96, 200}, DType::f32, 7).to(kCuda), named.spec);
    const Tensor dx = Tensor::empty({20, 200}, DType::bf16, kCuda);
    quant_gemm({.x = dy.to(kCuda).view(), .w = w.view(), .out = dx.mutable_view(), .of_rows = true}, device_context(kCuda));

    const std::vector<double> turned = transpose(w.values().to(kCpu), 0, 1).clone().to_doubles();
    Reference(dy.to_doubles(), turned, {}, 96).expect(dx, 3 * unit_roundoff(DType::bf16), named.name);
  }
}

// What x reads as after rounding to FP8 with the scales that products with such a weight want. Rows of x beyond a multiple of 8 are not rounded
// where these are scales of blocks.
std::vector<double> rounded(const Tensor& x, const QuantSpec& weight) {
  using enum ScaleGrain;
  const QuantSpec spec{.format = QuantFormat::fp8_e4m3, .grain = weight.is_fp8() && weight.grain == tensor ? tensor : channel};
  if (!weight.is_fp8() || weight.grain != block) return quantized(x, spec).values().to_doubles();
  std::vector<Tensor> parts;
  for (std::int64_t first = 0; first < x.size(1); first += 128)
    parts.push_back(quantized(slice(x, 1, first, std::min(first + 128, x.size(1))).clone(), spec).values());
  const std::int64_t whole = x.size(0) / 8 * 8;
  return concat({slice(concat(parts, 1), 0, 0, whole), slice(cast(x, DType::f32), 0, whole, x.size(0))}, 0).to_doubles();
}

// The sums of the tensor cores keep at least 13 bits of the largest term, one rounding for each 32 terms at most; the result is rounded once.
double fp8_bound(std::int64_t terms) { return unit_roundoff(DType::bf16) + std::ceil(static_cast<double>(terms) / 32) * 0x1p-13; }

// Rows and columns of different sizes, small enough for sums in float16.
Tensor uneven(const Shape& shape, DType dtype, std::uint64_t seed = 5) {
  const Tensor x = random_tensor(shape, DType::f32, seed);
  const auto ramp = [](const Shape& of, double step) { return add_scalar(scale(cast(counting(of), DType::f32), step), 1.0); };
  return cast(scale(mul(mul(x, ramp({shape[0], 1}, 0.3)), ramp({1, shape[1]}, 0.05)), 0x1p-7), dtype);
}

// 208 columns are no whole number of blocks, and their rows of block scales no multiple of 16 bytes.
TEST_F(CudaQuantize, Fp8ProductsAreThoseOfTheRoundedOperands) {
  constexpr std::int64_t kM = 50, kN = 144;
  for (const NamedSpec& named : all_specs())
    for (const std::int64_t K : {208, 512})
      for (const DType dtype : {DType::bf16, DType::f16}) {
        const Quantized w = quantized(uneven({kN, K}, DType::f32, 7).to(kCuda), named.spec);
        if (!named.spec.is_fp8() || !fp8_products(w.view(), dtype)) continue;
        const Tensor x = uneven({kM, K}, dtype), bias = random_tensor({kN}, dtype, 6), y = Tensor::empty({kM, kN}, dtype, kCuda);
        quant_gemm({.x = x.to(kCuda).view(), .w = w.view(), .out = y.mutable_view(), .bias = bias.to(kCuda).view(), .compute = QuantCompute::fp8},
                   device_context(kCuda));

        Reference(rounded(x, named.spec), w.values().to_doubles(), bias.to_doubles(), K).expect(y, fp8_bound(K), text_of(named, dtype, {kM, K}));
      }
}

// The codes and scales of a weight of 4 bits in FP8.
Quantized in_fp8(const Quantized& w) {
  Quantized out{{.format = QuantFormat::fp8_e4m3, .grain = ScaleGrain::channel}, w.rows, w.columns, Tensor::empty({w.rows, w.columns}, DType::u8, kCuda),
                Tensor::empty({w.rows, 1}, DType::f32, kCuda), {}};
  cuda::recode_rows(w.view(), 0, out.codes.mutable_view(), out.scales.mutable_view(), device_context(kCuda));
  return out;
}

// A weight whose row `r` has, for every block scale up to the r-th and under it, a block of all codes.
Quantized all_blocks(QuantFormat format, std::int64_t last_scale) {
  const std::int64_t block = format == QuantFormat::mxfp4 ? kMxBlock : kNvBlock, scales = last_scale + 1;
  Bytes codes(static_cast<std::size_t>(scales * scales * block / 2)), bytes(static_cast<std::size_t>(scales * scales));
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i % 8 * 2 | (i % 8 * 2 + 1) << 4);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::size_t row = i / static_cast<std::size_t>(scales);
    bytes[i] = static_cast<std::uint8_t>(std::min(i % static_cast<std::size_t>(scales), row));
  }
  Quantized out{{.format = format}, scales, scales * block, Tensor::from_vector(codes, {scales, scales * block / 2}).to(kCuda),
                Tensor::from_vector(bytes, {scales, scales}).to(kCuda), {}};
  if (format == QuantFormat::nvfp4) out.global = Tensor::full({1}, 3.0, DType::f32, kCuda);
  return out;
}

// The largest scales of weights that can be read: 2^124 and 448.
constexpr std::int64_t kLastE8M0 = 251, kLastE4M3 = 126;

// Elements times the power of two that the note has, exact in double, rounded once.
TEST_F(CudaQuantize, Fp4WeightsInFp8AreRoundedOnce) {
  for (const Quantized& w : {all_blocks(QuantFormat::mxfp4, kLastE8M0), all_blocks(QuantFormat::nvfp4, kLastE4M3)}) {
    const bool is_mx = w.spec.format == QuantFormat::mxfp4;
    const Quantized found = in_fp8(w);
    const Bytes codes = w.code_bytes(), bytes = w.scale_bytes(), found_codes = found.code_bytes();
    const std::vector<double> scales = found.scales.to_doubles();
    const auto columns = static_cast<std::size_t>(w.columns), blocks = static_cast<std::size_t>(w.scales.size(1));
    const auto value = [&](std::uint8_t byte) { return static_cast<double>(is_mx ? decode_e8m0(byte) : decode<E4M3>(byte)); };
    for (std::size_t row = 0; row < static_cast<std::size_t>(w.rows); ++row) {
      const double largest = std::max(value(bytes[(row + 1) * blocks - 1]), 0x1p-121), unit = std::exp2(std::floor(std::log2(largest)) - 5);
      ASSERT_EQ(scales[row], static_cast<double>(is_mx ? static_cast<float>(unit) : static_cast<float>(unit) / 3.0f)) << row;
      for (std::size_t i = row * columns; i < (row + 1) * columns; ++i) {
        const double code = decode<E2M1>(static_cast<std::uint8_t>(codes[i / 2] >> (i % 2 * 4)));
        const auto exact = static_cast<float>(code * value(bytes[i / (columns / blocks)]) / unit);
        ASSERT_EQ(found_codes[i], encode<E4M3>(exact)) << name_of(w.spec.format) << ' ' << row << ' ' << i % columns;
      }
    }
  }
}

// As the note says how far: by 1/21 of itself, in mxfp4 not at all, or by half the least number of E4M3 times the row's scale. The decoded
// weight and the row's scale are rounded to float32.
TEST_F(CudaQuantize, Fp4WeightsInFp8AreNearThoseDecoded) {
  for (const Quantized& w : {quantized(uneven({64, 320}, DType::f32).to(kCuda), {.format = QuantFormat::fp4}), all_blocks(QuantFormat::mxfp4, kLastE8M0),
                             all_blocks(QuantFormat::nvfp4, kLastE4M3)}) {
    const Quantized found = in_fp8(w);
    const std::vector<double> decoded = w.values().to_doubles(), read = found.values().to_doubles(), scales = found.scales.to_doubles();
    const double relative = w.spec.format == QuantFormat::nvfp4 ? 1.0 / 21 : 0.0, absolute = w.spec.format == QuantFormat::fp4 ? 0.0 : 0x1p-10;
    for (std::size_t i = 0; i < decoded.size(); ++i) {
      const double size = std::abs(decoded[i]), scale = scales[i / static_cast<std::size_t>(w.columns)];
      ASSERT_LE(std::abs(read[i] - decoded[i]), std::max(relative * size, absolute * scale) + 0x1p-22 * size) << name_of(w.spec.format) << ' ' << i;
    }
  }
}

// Of the weight in FP8; of the decoded one what that is off by at most. In the tests' weights nothing is near the least numbers of E4M3.
TEST_F(CudaQuantize, Fp8ProductsOfFp4WeightsAreNearThoseOfTheDecodedWeight) {
  constexpr std::int64_t kM = 50, kN = 144;
  for (const NamedSpec& named : all_specs())
    for (const std::int64_t K : {208, 512}) {
      const Quantized w = quantized(uneven({kN, K}, DType::f32, 7).to(kCuda), named.spec);
      if (named.spec.is_fp8() || !fp8_products(w.view(), DType::bf16)) continue;
      const Tensor x = uneven({kM, K}, DType::bf16), bias = random_tensor({kN}, DType::bf16, 6), y = Tensor::empty({kM, kN}, DType::bf16, kCuda);
      quant_gemm({.x = x.to(kCuda).view(), .w = w.view(), .out = y.mutable_view(), .bias = bias.to(kCuda).view(), .compute = QuantCompute::fp8},
                 device_context(kCuda));

      const std::vector<double> xs = rounded(x, named.spec), biases = bias.to_doubles();
      const double off = named.spec.format == QuantFormat::nvfp4 ? 1.0 / 21 : 0.0;
      Reference(xs, in_fp8(w).values().to_doubles(), biases, K).expect(y, fp8_bound(K), text_of(named, DType::bf16, {kM, K}));
      Reference(xs, w.values().to_doubles(), biases, K).expect(y, off + fp8_bound(K), text_of(named, DType::bf16, {kM, K}) + ", decoded");
    }
}

// 66000 rows of 1024 are decoded in two parts to FP8, and in three to bfloat16. They repeat a thousand.
TEST_F(CudaQuantize, PartsOfAWeightGiveTheirColumns) {
  constexpr std::int64_t kM = 24, kPeriod = 1000, kTimes = 66, kK = 1024;
  const Tensor rows = random_tensor({kPeriod, kK}, DType::bf16, 7), x = random_tensor({kM, kK}, DType::bf16, 5), bias = random_tensor({kPeriod}, DType::bf16, 6);
  const Quantized w = quantized(concat(std::vector<Tensor>(kTimes, rows.to(kCuda)), 0), {});
  const Tensor all_biases = concat(std::vector<Tensor>(kTimes, bias.to(kCuda)), 0);
  for (const QuantCompute compute : {QuantCompute::wide, QuantCompute::fp8}) {
    if (compute == QuantCompute::fp8 && !fp8_products(w.view(), DType::bf16)) continue;
    const Tensor y = Tensor::empty({kM, kPeriod * kTimes}, DType::bf16, kCuda);
    quant_gemm({.x = x.to(kCuda).view(), .w = w.view(), .out = y.mutable_view(), .bias = all_biases.view(), .compute = compute}, device_context(kCuda));

    const bool is_fp8 = compute == QuantCompute::fp8;
    const Quantized once = quantized(rows.to(kCuda), {});
    const Reference reference(is_fp8 ? rounded(x, {}) : x.to_doubles(), (is_fp8 ? in_fp8(once) : once).values().to_doubles(), bias.to_doubles(), kK);
    for (std::int64_t i = 0; i < kTimes; ++i)
      reference.expect(slice(y, 1, i * kPeriod, (i + 1) * kPeriod).clone(),
                       is_fp8 ? fp8_bound(kK) : 3 * unit_roundoff(DType::bf16), concat_text(is_fp8 ? "fp8 " : "wide ", i));
  }
}

// Forms that round x in every way there is, one after another.
TEST_F(CudaQuantize, ProductsOfOneInputAreThoseOfEach) {
  constexpr std::int64_t kM = 42, kN = 96, kK = 256;
  const Tensor x = uneven({kM, kK}, DType::bf16).to(kCuda);
  std::vector<Quantized> weights;
  std::vector<Tensor> together;
  std::vector<QuantGemmArgs> products;
  for (const NamedSpec& named : all_specs()) weights.push_back(quantized(uneven({kN, kK}, DType::f32, 7).to(kCuda), named.spec));
  const auto product_of = [&](const Quantized& w, const Tensor& y) -> QuantGemmArgs {
    return {.x = x.view(), .w = w.view(), .out = y.mutable_view(), .compute = fp8_products(w.view(), DType::bf16) ? QuantCompute::fp8 : QuantCompute::wide};
  };
  for (const Quantized& w : weights) {
    together.push_back(Tensor::empty({kM, kN}, DType::bf16, kCuda));
    products.push_back(product_of(w, together.back()));
  }
  quant_gemms(products, device_context(kCuda));

  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Tensor alone = Tensor::empty({kM, kN}, DType::bf16, kCuda);
    quant_gemm(product_of(weights[i], alone), device_context(kCuda));
    EXPECT_EQ(together[i].to_doubles(), alone.to_doubles()) << all_specs()[i].name;
  }
}

// FP8 weights are multiplied in FP8 where that can be, others where it is asked for.
TEST_F(CudaQuantize, LayersAreComputedAsTheirFormatIsUnlessAskedOtherwise) {
  for (const NamedSpec& named : all_specs()) {
    const auto layer = [&](std::optional<QuantCompute> asked, std::int64_t in) {
      const auto weight = quant::QuantizedWeight::quantize("w", random_tensor({32, in}, DType::bf16).to(kCuda), named.spec);
      return quant::QuantLinear(weight, Tensor(), DType::bf16, asked).compute();
    };
    const Quantized w = quantized(random_tensor({32, 64}, DType::bf16).to(kCuda), named.spec);
    const bool is_possible = fp8_products(w.view(), DType::bf16);
    EXPECT_EQ(layer({}, 64), named.spec.is_fp8() && is_possible ? QuantCompute::fp8 : QuantCompute::wide) << named.name;
    EXPECT_EQ(layer(QuantCompute::wide, 64), QuantCompute::wide) << named.name;
    if (is_possible) { EXPECT_EQ(layer(QuantCompute::fp8, 64), QuantCompute::fp8) << named.name; }
    EXPECT_EQ(layer({}, 72), QuantCompute::wide) << named.name;
    EXPECT_EQ(error_of([&] { layer(QuantCompute::fp8, 72); }), concat_text("quantize.compute: expected bf16 or null, as bfloat16 is not multiplied in FP8 with ",
                                                                           name_of(named.spec.format), " [32, 72] on cuda:0, got fp8"));
  }
}

}  // namespace
}  // namespace heddle::test
