#pragma once

#include <cstdint>
#include <vector>

#include "kernels/quantize/quantize.h"

namespace heddle {

// What a product with quantised weights is computed in. `wide` decodes the weights; `fp8` multiplies in FP8, x rounded to E4M3 with scales
// as the weights have them: one, one a row, or one for 128 columns of a row. Weights of 4 bits are decoded to E4M3 (Note: FP4 weights in
// FP8, recode.h).
enum class QuantCompute { wide, fp8 };

// A product with a quantised weight, which is decoded a part at a time into memory of bounded size, or as it is read.
//   x     [M, columns of w], or [M, rows of w] with `of_rows`; rows dense; float32, bfloat16, float16 or, on the CPU, float64
//   out   [M, rows of w]: x w^T + bias; or with `of_rows` [M, columns of w]: x w, the gradient of x from that of the result. dtype of x
//   bias  [rows of w], dtype of x; optional, only without `of_rows` and with Write::assign
// Decoded weights are rounded to x's dtype, but not where a GPU kernel takes up to 16 rows of x at once; sums are those of gemm
// (kernels/gemm/gemm.h). With `of_rows`, for such few rows, and for rows of x beyond a multiple of 8 where weights have block scales,
// weights are decoded whatever `compute` says.
// Throws heddle::Error for `fp8` where fp8_products() says no.
struct QuantGemmArgs {
  ConstView x;
  QuantView w;
  MutView out;
  ConstView bias = {};
  bool of_rows = false;
  Write write = Write::assign;
  QuantCompute compute = QuantCompute::wide;
};
void quant_gemm(const QuantGemmArgs& args, const ExecContext& ctx);

// Several such products, or none, of one x, which is rounded to FP8 once for all of them. Throws heddle::Error if they differ in x.
void quant_gemms(const std::vector<QuantGemmArgs>& products, const ExecContext& ctx);

// Whether products x w^T with this weight, x of that dtype, run in FP8 on the weight's device: on GPUs of compute capability 9.0, and of
// FP8 weights with one scale from 8.9 on; in bfloat16 and float16; for sizes that are multiples of 16.
bool fp8_products(const QuantView& w, DType x);

namespace cuda {
// Computes the products that need no copy decoded to the dtype of x, those of few rows of x and in FP8, and returns the others.
std::vector<QuantGemmArgs> quant_gemms_of_codes(const std::vector<QuantGemmArgs>& products, const ExecContext& ctx);
bool fp8_products(const QuantSpec& spec, int device_index);
}  // namespace cuda

// Of `results` rows or columns, how many are decoded at a time: parts of one size, of whole blocks, that fit into a bounded memory at `nbytes` each.
std::int64_t decoded_at_once(std::int64_t results, std::int64_t nbytes, Device device);

}  // namespace heddle
