#pragma once

#include "kernels/quantize/quantize.h"

namespace heddle {

// What a product with quantised weights is computed in. `wide` decodes the weights; `fp8` also rounds x to E4M3, with a scale a row or,
// if the weights have one scale, one for x, where fp8_products() says that it can be done, and is `wide` elsewhere.
enum class QuantCompute { wide, fp8 };

// Whether products x w^T of weights in this form run in FP8 on a device: E4M3 with one scale or a scale a row (the latter on compute
// capability 9.0 alone), for x in bfloat16 or float16 and sizes that are multiples of 16.
bool fp8_products(const QuantSpec& spec, Device device);

// A product with a quantised weight, which is decoded a part at a time into memory of bounded size, or as it is read.
//   x     [M, columns of w], or [M, rows of w] with `of_rows`; rows dense; float32, bfloat16, float16 or, on the CPU, float64
//   out   [M, rows of w]: x w^T + bias; or with `of_rows` [M, columns of w]: x w, the gradient of x from that of the result. dtype of x
//   bias  [rows of w], dtype of x; optional, only without `of_rows` and with Write::assign
// Decoded weights are rounded to x's dtype, but not where a GPU kernel takes up to 16 rows of x at once; sums are those of gemm
// (kernels/gemm/gemm.h). With `of_rows` weights are always decoded.
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

namespace cuda {
// The products that need no decoded copy: few rows of x, and FP8. Returns whether it was one of them.
bool quant_gemm_of_codes(const QuantGemmArgs& args, const ExecContext& ctx);
bool fp8_products(const QuantSpec& spec, int device_index);
}  // namespace cuda

}  // namespace heddle
