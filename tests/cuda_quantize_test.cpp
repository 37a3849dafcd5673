// The codecs on the GPU write and read the same bits as those on the CPU.

#include <array>

#include "autograd/ops.h"
#include "kernels/quantize/formats.h"
#include "kernels/quantize/quant_gemm.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/random.h"
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

// Of x as it reads after rounding to FP8. The sums of the tensor cores keep at least 13 bits of the largest term, one rounding for
// each 32 terms at most.
TEST_F(CudaQuantize, Fp8ProductsAreThoseOfTheRoundedOperands) {
  constexpr std::int64_t kM = 50, kN = 96, kK = 256;
  for (const ScaleGrain grain : {ScaleGrain::tensor, ScaleGrain::channel}) {
    const QuantSpec spec{.format = QuantFormat::fp8_e4m3, .grain = grain};
    if (!fp8_products(spec, kCuda)) continue;
    const Tensor x = mul(random_tensor({kM, kK}, DType::f32, 5), add_scalar(scale(cast(counting({kM, 1}), DType::f32), 0.3), 1.0));
    const Tensor half = cast(x, DType::bf16), bias = random_tensor({kN}, DType::bf16, 6);
    const Quantized w = quantized(random_tensor({kN, kK}, DType::f32, 7).to(kCuda), spec);
    const Tensor y = Tensor::empty({kM, kN}, DType::bf16, kCuda);
    quant_gemm({.x = half.to(kCuda).view(), .w = w.view(), .out = y.mutable_view(), .bias = bias.to(kCuda).view(), .compute = QuantCompute::fp8},
               device_context(kCuda));

    const Reference reference(quantized(half, spec).values().to_doubles(), w.values().to_doubles(), bias.to_doubles(), kK);
    reference.expect(y, unit_roundoff(DType::bf16) + 8 * 0x1p-13, grain == ScaleGrain::tensor ? "tensor" : "channel");
  }
}

}  // namespace
}  // namespace heddle::test
