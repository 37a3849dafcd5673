#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

namespace heddle {

// Rotary position embedding in its half-rotation form: at position p the pair (x[i], x[i + D/2]) turns by the angle
// p * theta^(-2i/D). Su et al. 2021. The inverse turns back, which is also the gradient.
//   x, out     [B, S, H, D]  D even; any floating dtype, any strides; out may be the very same view as x
//   positions  [S]           int64, any stride
// Angles are float64; their cosine and sine are rounded to float32 (float64 for float64).
struct RopeArgs {
  ConstView x;
  ConstView positions;
  double theta;  // > 0
  bool is_inverse = false;
  MutView out;
};
void rope(const RopeArgs& args, const ExecContext& ctx);

namespace cpu {
void rope(const RopeArgs& args, const ExecContext& ctx);
}
namespace cuda {
void rope(const RopeArgs& args, const ExecContext& ctx);
}

}  // namespace heddle
