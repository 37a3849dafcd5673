#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// Layer norm and root-mean-square norm of rows, with the residual addition before them. Statistics and sums are float32 (float64
// for float64).

namespace heddle {

enum class NormKind {
  layer,  // xhat = (x - mean) * rstd, rstd = 1 / sqrt(biased variance + eps). Ba, Kiros and Hinton 2016.
  rms,    // xhat = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps). Zhang and Sennrich 2019, equation 4.
};

// out = xhat * weight + bias
//   x, out        [rows, N]  N >= 1, any floating dtype, any strides
//   weight, bias  [N]        dtype of x; each optional
//   mean, rstd    [rows]     dense; float32 (float64 for float64); mean for the layer norm only
//   residual      [rows, N]  dtype of x; optional. With it `sum` [rows, N] = x + residual is written, rounded to the dtype, and
//                            its rows are normalised in place of those of x
struct NormArgs {
  NormKind kind;
  ConstView x;
  ConstView weight;
  ConstView bias;
  double eps;  // > 0
  MutView out;
  MutView mean;
  MutView rstd;
  ConstView residual = {};
  MutView sum = {};
};
void norm(const NormArgs& args, const ExecContext& ctx);

// With g = dout * weight, means over a row:
//   dx      = rstd * (g - mean(g) - xhat * mean(g * xhat))   (rms: without mean(g))
//   dweight = sum over rows of dout * xhat
//   dbias   = sum over rows of dout
// x is what was normalised: the sum, if there was a residual. dsum [rows, N], dtype of x, is optional and is added to dx: the
// gradient that reaches the sum by the other way.
// Every output is optional. dweight and dbias [N] have the dtype of x or float32 and are written as their Write says; the
// order of their additions does not depend on the number of threads.
struct NormBackwardArgs {
  NormKind kind;
  ConstView x;
  ConstView weight;
  ConstView mean;
  ConstView rstd;
  ConstView dout;
  MutView dx;
  MutView dweight;
  Write write_dweight = Write::assign;
  MutView dbias;
  Write write_dbias = Write::assign;
  ConstView dsum = {};
};
void norm_backward(const NormBackwardArgs& args, const ExecContext& ctx);

namespace cpu {
void norm(const NormArgs& args, const ExecContext& ctx);
void norm_backward(const NormBackwardArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void norm(const NormArgs& args, const ExecContext& ctx);
void norm_backward(const NormBackwardArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
