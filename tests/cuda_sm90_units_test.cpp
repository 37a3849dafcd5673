// The instructions of the Hopper attention kernels alone: matrix descriptors in every form used, and TMA boxes. Values are small
// integers, so that products are exact; a wrong stride gives other numbers, not a fault.

#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "kernels/attention/attention.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"
#include "tests/support/sm90_units.h"

namespace heddle::test {
namespace {

class Sm90Units : public NeedsCuda<> {
 protected:
  void SetUp() override {
    NeedsCuda<>::SetUp();
    if (IsSkipped()) return;
    const AttentionProblem problem{.B = 1, .Sq = 1, .Sk = 1, .Hq = 1, .Hkv = 1, .D = 64, .dtype = DType::bf16, .device = kCuda};
    for (const AttentionVariant& variant : attention_variants())
      if (variant.name == "sm90" && !variant.supports(problem, AttentionPass::forward).ok)
        GTEST_SKIP() << variant.supports(problem, AttentionPass::forward).reason;
  }
};

// Integers in [-4, 4] that no shift or swap of rows and columns maps onto each other.
Tensor integers(std::int64_t rows, std::int64_t columns, DType dtype, std::int64_t salt) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < rows * columns; ++i) values.push_back(static_cast<double>((i * i * 7 + i * salt + (i >> 6) * 5) % 9 - 4));
  return cast(Tensor::from_vector(values, {rows, columns}), dtype);
}

TEST_F(Sm90Units, ProductsReadEveryOperandForm) {
  for (DType dtype : {DType::bf16, DType::f16})
    for (std::int64_t N : {64, 128})
      for (std::int64_t K : {64, 128})
        for (Operands operands : {Operands::shared, Operands::registers}) {
          const Tensor a = integers(64, K, dtype, 3), b = integers(K, N, dtype, 11);
          const Tensor a_stored = a.to(kCuda);
          const Tensor b_stored = (operands == Operands::shared ? contiguous(transpose(b, 0, 1)) : b).to(kCuda);
          const Tensor c = Tensor::full({64, N}, std::nan(""), DType::f32, kCuda);

          warpgroup_product(operands, a_stored.view(), b_stored.view(), c.mutable_view(), device_context(kCuda));

          EXPECT_TRUE(all_equal(c, matmul(cast(a, DType::f64), cast(b, DType::f64)).to_doubles()))
              << dtype << " N " << N << " K " << K << " form " << static_cast<int>(operands);
        }
}

// Row r's 16 bytes number j lie in place j ^ (r % 8) of its 128; rows past the end are zeros, and so are columns.
TEST_F(Sm90Units, BoxesAreSwizzledStridedAndZeroPastTheEnd) {
  const std::int64_t B = 2, S = 50, H = 3, D = 96;
  Generator generator{.seed = 1};
  const Tensor whole = normal({B, S + 3, H, 2 * D}, 0, 1, generator, DType::bf16);
  const Tensor x = slice(slice(whole, 1, 0, S), 3, D, 2 * D), on_gpu = slice(slice(whole.to(kCuda), 1, 0, S), 3, D, 2 * D);
  for (const BoxCorner& corner : {BoxCorner{0, 0, 0, 0}, {64, 8, 2, 1}, {0, 40, 1, 1}, {64, 60, 0, 0}})
    for (int rows : {8, 64, 128}) {
      const Tensor out = Tensor::empty({rows * 128}, DType::u8, kCuda);

      tma_box(on_gpu.view(), rows, corner, out.mutable_view(), device_context(kCuda));

      const std::vector<std::uint8_t> bytes = out.to_vector<std::uint8_t>();
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < 64; ++c) {
          const int at = r * 128 + ((c / 8) ^ (r % 8)) * 16 + c % 8 * 2;
          bfloat16 got;
          got.bits = static_cast<std::uint16_t>(bytes[at] | bytes[at + 1] << 8);
          const std::int64_t row = corner.row + r, column = corner.column + c;
          const std::int64_t element = corner.batch * x.strides()[0] + row * x.strides()[1] + corner.head * x.strides()[2] + column;
          const float expected = row < S && column < D ? x.view().as<bfloat16>()[element] : bfloat16();
          ASSERT_EQ(static_cast<float>(got), expected) << "row " << r << " column " << c << " of a box of " << rows;
        }
    }
}

TEST_F(Sm90Units, StoredBoxesLeaveWhatIsOutsideAlone) {
  const std::int64_t B = 2, S = 50, H = 3, D = 96;
  Generator generator{.seed = 2};
  const Tensor from = normal({B, S, H, D}, 0, 1, generator, DType::bf16), on_gpu = from.to(kCuda);
  for (const BoxCorner& corner : {BoxCorner{0, 0, 0, 0}, {64, 16, 2, 1}, {0, 40, 1, 1}}) {
    constexpr std::int64_t kRows = 16;
    // Rows and columns past the end of the view are there, and belong to someone else.
    const Tensor whole = Tensor::zeros({B, S + 3, H, 2 * D}, DType::bf16, kCuda);

    tma_copy_box(on_gpu.view(), slice(slice(whole, 1, 0, S), 3, D, 2 * D).mutable_view(), kRows, corner, device_context(kCuda));

    const Tensor expected = Tensor::zeros(whole.shape(), DType::bf16);
    const auto box = [&](const Tensor& x, std::int64_t first_column) {
      const Tensor rows = slice(slice(slice(x, 0, corner.batch, corner.batch + 1), 1, corner.row, std::min(S, corner.row + kRows)), 2,
                                corner.head, corner.head + 1);
      return slice(rows, 3, first_column + corner.column, first_column + std::min(D, corner.column + std::int64_t{64}));
    };
    box(expected, D).copy_(box(from, 0));
    EXPECT_TRUE(all_equal(whole, expected.to_doubles())) << "row " << corner.row << " column " << corner.column;
  }
}

}  // namespace
}  // namespace heddle::test
