#include "kernels/rope/rope.h"

#include <cmath>

#include "kernels/runtime/dispatch.h"

namespace heddle {

void rope(const RopeArgs& args, const ExecContext& ctx) {
  const auto& [x, positions, theta, is_inverse, out] = args;
  HEDDLE_CHECK(x.shape.rank() == 4 && x.shape[3] % 2 == 0, "rope: needs x [B, S, H, D] with D even, got ", x.shape);
  HEDDLE_CHECK(positions.dtype == DType::i64 && positions.shape == Shape{x.shape[1]}, "rope: positions must be int64 [",
               x.shape[1], "], got ", positions.dtype, " ", positions.shape);
  HEDDLE_CHECK(out.shape == x.shape && out.dtype == x.dtype, "rope: output is ", out.dtype, " ", out.shape, ", input ", x.dtype,
               " ", x.shape);
  HEDDLE_CHECK(std::isfinite(theta) && theta > 0.0, "rope: theta must be finite and > 0, got ", theta);
  HEDDLE_DISPATCH(ctx, rope, args);
}

}  // namespace heddle
