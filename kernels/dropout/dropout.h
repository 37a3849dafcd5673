#pragma once

#include <cstdint>

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

namespace heddle {

// out = x / (1 - p) where the mask keeps an element, 0 where it drops it; applied to the gradient it is the backward.
// Element i in row-major order is dropped when word i % 4 of philox(seed, offset + i / 4), as a fraction of 2^32, is below
// p: the mask depends on seed, offset and i only, not on strides, threads or device.
struct DropoutArgs {
  ConstView x;  // any floating dtype, any strides
  double p;     // 0 <= p < 1
  std::uint64_t seed;
  std::uint64_t offset;
  MutView out;  // shape and dtype of x; may be the very same view
};
void dropout(const DropoutArgs& args, const ExecContext& ctx);

namespace cpu {
void dropout(const DropoutArgs& args, const ExecContext& ctx);
}
namespace cuda {
void dropout(const DropoutArgs& args, const ExecContext& ctx);
}

}  // namespace heddle
