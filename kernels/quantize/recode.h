#pragma once

#include "kernels/quantize/quantize.h"

// Note: FP4 weights in FP8
// For products in FP8 a row of a weight of 4 bits becomes E4M3 codes and a scale of its own, whatever the scales of its blocks. That is
// 2^(e - 5), over the scale of the tensor if there is one, where 2^e <= the largest block scale of the row < 2^(e + 1): the largest
// element, 6 block scales, is below 12 * 2^5 = 384, and E4M3 ends at 448. Elements are rounded once.
//   fp4    exact: the row's scale is the tensor's, and E4M3 has all values of E2M1.
//   mxfp4  a code times a power of two, exact down to multiples of 2^-9 of the row's scale, so in blocks whose scale is at least 2^-13 of the
//          row's largest; in others an element is off by up to 2^-10 of the row's scale.
//   nvfp4  codes that are powers of two keep the 4 bits of the block scale; 3 times 4 bits has up to 6, and an element is off by up to 1/21
//          of itself (3 * 14 = 42 becomes 40 or 44); and as above by up to 2^-10 of the row's scale where that is more.
// Rows of weights below 2^-117 may become 0: their scales could be subnormal.

namespace heddle::cuda {

// Codes of rows [first_row, first_row + R) of w and the rows' scales.
//   w       fp4, mxfp4 or nvfp4, columns a multiple of 16, codes at a multiple of 8 bytes
//   codes   uint8 [R, columns of w], dense, at a multiple of 16 bytes
//   scales  float32 [R]
void recode_rows(const QuantView& w, std::int64_t first_row, const MutView& codes, const MutView& scales, const ExecContext& ctx);

}  // namespace heddle::cuda
