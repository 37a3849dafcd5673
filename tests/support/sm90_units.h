#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// The instructions under the sm90 attention kernels, each alone in a kernel of one warpgroup.
namespace heddle::test {

// How the kernels hold the operands of a warpgroup product c = a b, c being [64, N] float32 and K the summed dimension:
//   shared     a [64, K] and b [N, K] in shared memory, the summed dimension innermost: scores
//   registers  a [64, K] in registers, b [K, N] in shared memory: weights times values
enum class Operands { shared, registers };

// N is 64 or 128, K a multiple of 64; a and b are dense, bfloat16 or float16, and arrive by TMA.
void warpgroup_product(Operands operands, const ConstView& a, const ConstView& b, const MutView& c, const ExecContext& ctx);

// The bytes that a TMA box of `rows` rows and 64 columns of a [B, S, H, D] view of 16-bit elements leaves in shared memory.
//   out [rows * 128] uint8
struct BoxCorner {
  int column, row, head, batch;
};
void tma_box(const ConstView& view, int rows, const BoxCorner& corner, const MutView& out, const ExecContext& ctx);

// Copies such a box, through shared memory, to the same place of a view of the same shape.
void tma_copy_box(const ConstView& from, const MutView& to, int rows, const BoxCorner& corner, const ExecContext& ctx);

}  // namespace heddle::test
