#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

namespace heddle {

// out[i] = weight[ids[i]].
//   weight  [V, C]  any floating dtype, any strides
//   ids     [n]     int64 or int32, dense
//   out     [n, C]  dtype of weight
// An id outside [0, V) is an error that names it and its position. On CUDA its row is NaN and the error, for one such id, comes
// with the next copy to the host.
struct EmbeddingArgs {
  ConstView weight;
  ConstView ids;
  MutView out;
};
void embedding(const EmbeddingArgs& args, const ExecContext& ctx);

// dweight[v] = or += the sum of dout[i] over ids[i] == v, in a fixed order, in float32 (float64 for float64), rounded once.
//   ids      [n]     as checked by the forward
//   dout     [n, C]
//   dweight  [V, C]  dtype of dout, or float32
// Row padding_idx receives nothing; -1 for none.
struct EmbeddingBackwardArgs {
  ConstView ids;
  ConstView dout;
  MutView dweight;
  Write write = Write::assign;
  std::int64_t padding_idx = -1;
};
void embedding_backward(const EmbeddingBackwardArgs& args, const ExecContext& ctx);

namespace cpu {
void embedding(const EmbeddingArgs& args, const ExecContext& ctx);
void embedding_backward(const EmbeddingBackwardArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void embedding(const EmbeddingArgs& args, const ExecContext& ctx);
void embedding_backward(const EmbeddingBackwardArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
