#pragma once

#include "kernels/runtime/view.h"

namespace heddle {

// The r largest singular values of a matrix and their vectors, W ~ U diag(s) V^T. For setting up, not for training: on the host, in
// float64, from the eigenvalues of the smaller of W^T W and W W^T. So s_i has a relative error near 1e-16 (s_0 / s_i)^2.
//   w  [M, N]  dense
//   u  [M, r]  r <= min(M, N); columns of length 1, or 0 where s is 0
//   s  [r]     falling
//   v  [N, r]  as u
// All float64, dense and on the CPU. Throws heddle::Error for other shapes, dtypes or devices, and for values that are not finite.
struct SvdArgs {
  ConstView w;
  MutView u;
  MutView s;
  MutView v;
};
void largest_singular_values(const SvdArgs& args);

}  // namespace heddle
