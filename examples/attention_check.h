#pragma once

#include <string>

#include "autograd/tensor.h"
#include "kernels/attention/attention.h"

namespace heddle::examples {

// The tensors of one attention problem with as many keys as queries, as attention.h describes them.
struct AttentionTensors {
  Tensor q, k, v, out, lse, dout, dq, dk, dv;
  bool is_causal = false;
  double scale = 1;

  AttentionForwardArgs forward_args() const;
  AttentionBackwardArgs backward_args() const;
};

// Compares the results of a pass with the CPU variant: in the first and the last batch entry and group of heads, three blocks of
// 64 rows of queries (out, lse, dq) and of keys (dk, dv). Returns "" or what is wrong.
//
// Bound, for random normal inputs: the relative error of a block in the Euclidean norm is at most 4 u + 2^-17, u being one
// rounding of the dtype. A kernel rounds probabilities (or their gradients), and the result: terms of random sign, each off by a
// relative u, have a sum whose error is a relative u. 2^-17 is what float32 scores up to 32 do to a probability; lse, which is
// float32, has that alone.
std::string attention_fault(const AttentionTensors& tensors, AttentionPass pass);

}  // namespace heddle::examples
