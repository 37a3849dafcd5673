// The codecs on the GPU write and read the same bits as those on the CPU.

#include <array>

#include "autograd/ops.h"
#include "kernels/quantize/formats.h"
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

}  // namespace
}  // namespace heddle::test
