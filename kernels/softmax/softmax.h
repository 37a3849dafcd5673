#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// Softmax along one dimension of size >= 1; any floating dtype, any strides, computed in float32 (float64 for float64).

namespace heddle {

enum class SoftmaxKind { softmax, log_softmax };

// softmax:      out = exp(x - max) / sum(exp(x - max)); a slice that is -inf throughout gives 0
// log_softmax:  out = x - max - log(sum(exp(x - max))); a slice that is -inf throughout gives -inf
struct SoftmaxArgs {
  SoftmaxKind kind;
  ConstView x;
  int dim;      // in [0, rank)
  MutView out;  // shape and dtype of x, other memory
};
void softmax(const SoftmaxArgs& args, const ExecContext& ctx);

// softmax:      dx = y (dout - sum(dout y))
// log_softmax:  dx = dout - exp(y) sum(dout)
struct SoftmaxBackwardArgs {
  SoftmaxKind kind;
  ConstView y;  // the output of the forward
  ConstView dout;
  int dim;
  MutView dx;
};
void softmax_backward(const SoftmaxBackwardArgs& args, const ExecContext& ctx);

namespace cpu {
void softmax(const SoftmaxArgs& args, const ExecContext& ctx);
void softmax_backward(const SoftmaxBackwardArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void softmax(const SoftmaxArgs& args, const ExecContext& ctx);
void softmax_backward(const SoftmaxBackwardArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
