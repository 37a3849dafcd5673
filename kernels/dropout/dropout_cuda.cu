#include <cmath>

#include "kernels/dropout/dropout.h"
#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"
#include "kernels/runtime/random.h"
#include "kernels/runtime/strided.cuh"

namespace heddle::cuda {
namespace {

// A thread the four elements that share a Philox block.
template <typename T>
__global__ void dropout_kernel(const __grid_constant__ Walk<2> walk, std::uint64_t seed, std::uint64_t offset, std::uint64_t dropped_below,
                               accumulate_t<T> factor, const T* x, T* out) {
  using A = accumulate_t<T>;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t block = first; block * 4 < walk.count; block += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const auto words = philox(seed, offset + static_cast<std::uint64_t>(block), 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (block * 4 + i >= walk.count) break;
      std::int64_t at[2];
      walk.locate(block * 4 + i, at);
      out[at[1]] = convert<T>(words[i] < dropped_below ? A(0) : convert<A>(x[at[0]]) * factor);
    }
  }
}

}  // namespace

void dropout(const DropoutArgs& args, const ExecContext& ctx) {
  if (args.x.numel() == 0) return;
  const Walk<2> walk(StridedLoop<2>(args.x.shape, {args.x.strides, args.out.strides}));
  const auto dropped_below = static_cast<std::uint64_t>(std::llround(std::ldexp(args.p, 32)));
  dispatch_float(args.x.dtype, "dropout", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto factor = static_cast<accumulate_t<T>>(1.0 / (1.0 - args.p));
    dropout_kernel<<<grid_for(walk.count, 4 * kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(walk, args.seed, args.offset, dropped_below, factor,
                                                                                         args.x.as<T>(), args.out.as<T>());
  });
  check_launch("dropout");
}

}  // namespace heddle::cuda
