#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

namespace heddle {

// Matrix product over leading batch dimensions: c = scale a b + bias, or c += scale a b.
//   a     [..., M, K]  any floating dtype
//   b     [..., K, N]  dtype of a
//   c     [..., M, N]  dtype of a, or float32; written as `write` says; one of its last two strides must be 1
//   bias  [N]          dtype of a; optional, only with Write::assign
// Batch dimensions must be equal; a stride of 0 repeats a matrix. A transposed operand is one with transposed strides.
// Sums are float32 (float64 for float64), in an order that does not depend on the number of threads. K = 0 gives bias or
// zero. At most one of these, of c's shape and dtype, only with Write::assign:
//   before_gelu  written with scale a b + bias; c is then gelu_tanh (elementwise.h) of it
//   dgelu_at     c = (scale a b) * gelu_tanh'(dgelu_at), the gradient of what went into a GELU; no bias
struct GemmArgs {
  ConstView a;
  ConstView b;
  MutView c;
  ConstView bias = {};
  Write write = Write::assign;
  MutView before_gelu = {};
  ConstView dgelu_at = {};
  double scale = 1;
};
void gemm(const GemmArgs& args, const ExecContext& ctx);

namespace cpu {
void gemm(const GemmArgs& args, const ExecContext& ctx);
}
namespace cuda {
void gemm(const GemmArgs& args, const ExecContext& ctx);
// Whether gemm takes before_gelu or dgelu_at of such a product; it is never given others.
bool gemm_fuses_gelu(const GemmArgs& args);
}

}  // namespace heddle
