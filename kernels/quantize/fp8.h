#pragma once

#include "kernels/quantize/quantize.h"

// Note: FP8 training
// The three products of a linear layer in 8 bits: y = x w^T, dx = dy w and dw = dy^T x. The tensor cores of compute capability 8.9 and
// 9.0 multiply such operands only if both lie densely along the terms of the sum, so x, w and dy are each quantised once, into the
// codes and those of the transpose, and every product is one of rows with rows: x by w, dy by w^T, dy^T by x^T. Values are E4M3,
// gradients E5M2, with one scale a matrix (Micikevicius et al. 2022). There is no version for the CPU.

namespace heddle {

// Whether a device multiplies in FP8.
DeviceSupport fp8_support(Device device);

// Writes a matrix as FP8 codes and those of its transpose, in one pass over it. Both follow fp8_e4m3 and fp8_e5m2 of one scale in
// quantize.h, but NaN and infinity become NaN, so that what is computed of them is not finite either.
//   x         [R, C] bfloat16, rows dense and a multiple of 16 bytes apart, C a multiple of 16
//   expected  float32 [1]: the largest |x| to be expected, which gives the scale; elements beyond it saturate
//   fallback  float32 [1], optional: takes the place of an `expected` that is 0
//   codes     uint8 [R, C], rows dense
//   turned    uint8 [C, fp8_padded(R)], rows dense; 0 from column R on
//   scale     float32 [1]
//   seen      float32 [1], optional: becomes the larger of what is there and the largest |x|; NaN if there is one
struct Fp8QuantizeArgs {
  ConstView x;
  QuantFormat format = QuantFormat::fp8_e4m3;
  ConstView expected;
  ConstView fallback = {};
  MutView codes;
  MutView turned;
  MutView scale;
  MutView seen = {};
};
void fp8_quantize(const Fp8QuantizeArgs& args, const ExecContext& ctx);

// Rows of codes are multiples of 16 bytes.
constexpr std::int64_t fp8_padded(std::int64_t size) { return (size + 15) / 16 * 16; }

// Note: Delayed scaling
// A row [1 + H] of float32 holds what is expected of a matrix that comes anew in every step: its largest magnitude, and those seen in the
// last H steps, of this one first. A new step expects the largest of them; what was 0 or not finite does not count, and if nothing
// is left the expectation stays as it was. A new row is kNewHistory and zeros: its first step expects 0, for which the matrix's own
// magnitude is to be the fallback, and from the second on, until something is seen, 1.
inline constexpr float kNewHistory = -1;
// Begins a step in every row of `history`, float32 [rows, 1 + H], dense, H >= 1.
struct AmaxHistoryArgs {
  MutView history;
};
void advance_amax_history(const AmaxHistoryArgs& args, const ExecContext& ctx);

// A matrix of codes, rows dense and a multiple of 16 bytes apart, and its scale, float32 [1].
struct Fp8View {
  QuantFormat format;
  ConstView codes;
  ConstView scale;
};

// out = a b^T + bias, or out += a b^T.
//   a     [M, K], b [N, K]; K and N multiples of 16; not both E5M2
//   out   [M, N], bfloat16 or float32; rows dense, written as `write` says
//   bias  [N] bfloat16, dense; optional, only for bfloat16 and with Write::assign
// Sums are the tensor cores', of at least 13 bits below the largest term; with `is_precise` they are added up in float32 every few terms.
struct Fp8GemmArgs {
  Fp8View a;
  Fp8View b;
  MutView out;
  ConstView bias = {};
  Write write = Write::assign;
  bool is_precise = false;
};
void fp8_gemm(const Fp8GemmArgs& args, const ExecContext& ctx);

namespace cuda {
int fp8_capability(int device_index);  // 10 * major + minor
void fp8_quantize(const Fp8QuantizeArgs& args, const ExecContext& ctx);
void advance_amax_history(const AmaxHistoryArgs& args, const ExecContext& ctx);
void fp8_gemm(const Fp8GemmArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
