#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

namespace heddle {

// Fused cross entropy: loss = sum over rows of lse - logits[label], divided by the number of valid labels if is_mean;
// rows whose label is ignore_index count for nothing.
//   logits  [rows, V]  V >= 1, any floating dtype, any strides
//   labels  [rows]     int64, dense; a label outside [0, V) other than ignore_index is an error naming it and its position;
//                    on CUDA the loss is NaN and the error, for one such label, comes with the next copy to the host
//   loss    []         float32 (float64 for float64)
//   lse     [rows]     dense, dtype of loss: natural log of the sum of exp(logits), for the backward
//   valid   []         int64: how many labels are not ignored
// No valid label gives loss 0. A label on a -inf logit gives +inf.
struct CrossEntropyArgs {
  ConstView logits;
  ConstView labels;
  std::int64_t ignore_index;
  bool is_mean;
  MutView loss;
  MutView lse;
  MutView valid;
};
void cross_entropy(const CrossEntropyArgs& args, const ExecContext& ctx);

// dlogits = dloss * (exp(logits - lse) - onehot(label)), divided by valid if is_mean; 0 in ignored rows.
struct CrossEntropyBackwardArgs {
  ConstView logits;
  ConstView labels;
  std::int64_t ignore_index;
  bool is_mean;
  ConstView lse;
  ConstView valid;
  ConstView dloss;  // [], dtype of loss
  MutView dlogits;  // shape and dtype of logits, whose memory it may be
};
void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecContext& ctx);

namespace cpu {
void cross_entropy(const CrossEntropyArgs& args, const ExecContext& ctx);
void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void cross_entropy(const CrossEntropyArgs& args, const ExecContext& ctx);
void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
