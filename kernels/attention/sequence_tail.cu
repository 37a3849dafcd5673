#include "kernels/attention/sequence_tail.h"

#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"
#include "kernels/runtime/strided.cuh"

namespace heddle::cuda {
namespace {

// `row` walks over the elements of one row.
template <typename T>
__global__ void fill_tail_kernel(const __grid_constant__ Walk<1> row, T* x, std::int64_t rows, std::int64_t row_stride, const std::int32_t* end, T value) {
  const std::int64_t first = *end, count = (rows - first) * row.count;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < count; i += static_cast<std::int64_t>(gridDim.x) * kBlock) {
    std::int64_t at[1];
    row.locate(i % row.count, at);
    x[(first + i / row.count) * row_stride + at[0]] = value;
  }
}

}  // namespace

void fill_tail(const MutView& x, int dim, const ConstView& cu_seqlens, double value, const ExecContext& ctx) {
  if (x.numel() == 0) return;
  const Walk<1> row(StridedLoop<1>(without_dim(x.shape, dim), {without_dim(x.strides, dim)}));
  const auto* end = cu_seqlens.as<std::int32_t>() + cu_seqlens.shape[0] - 1;
  dispatch_float(x.dtype, "attention", [&](auto tag) {
    using T = typename decltype(tag)::type;
    fill_tail_kernel<T><<<device_info(ctx.device.index).multiprocessors, kBlock, 0, stream_of(ctx)>>>(row, x.as<T>(), x.shape[dim], x.strides[dim], end,
                                                                                                       static_cast<T>(value));
  });
  check_launch("attention");
}

}  // namespace heddle::cuda
