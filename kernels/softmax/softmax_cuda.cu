#include "kernels/runtime/group.cuh"
#include "kernels/runtime/strided.cuh"
#include "kernels/softmax/softmax.h"

namespace heddle::cuda {
namespace {

template <int kThreads, typename T>
__global__ void softmax_kernel(const __grid_constant__ Walk<2> slices, SoftmaxKind kind, std::int64_t size, const T* x,
                               std::int64_t x_step, T* out, std::int64_t out_step) {
  using A = accumulate_t<T>;
  const Group<kThreads> group;
  for (std::int64_t slice = group.first; slice < slices.count; slice += group.stride) {
    std::int64_t at[2];
    slices.locate(slice, at);
    const auto value = [&](std::int64_t i) { return convert<A>(x[at[0] + i * x_step]); };
    const MaxAndSum<A> row = max_and_sum<kThreads, A>(size, group.lane, value);
    const bool is_empty = row.sum == A(0);
    const A inverse = A(1) / row.sum, shift = log(row.sum);
    for (std::int64_t i = group.lane; i < size; i += kThreads) {
      A y;
      if (kind == SoftmaxKind::softmax) y = is_empty ? A(0) : exp(value(i) - row.largest) * inverse;
      else y = is_empty ? -infinity<A>() : value(i) - row.largest - shift;
      out[at[1] + i * out_step] = convert<T>(y);
    }
  }
}

template <int kThreads, typename T>
__global__ void softmax_backward_kernel(const __grid_constant__ Walk<3> slices, SoftmaxKind kind, std::int64_t size, const T* y,
                                        std::int64_t y_step, const T* dout, std::int64_t dout_step, T* dx, std::int64_t dx_step) {
  using A = accumulate_t<T>;
  const Group<kThreads> group;
  for (std::int64_t slice = group.first; slice < slices.count; slice += group.stride) {
    std::int64_t at[3];
    slices.locate(slice, at);
    const auto output = [&](std::int64_t i) { return convert<A>(y[at[0] + i * y_step]); };
    const auto gradient = [&](std::int64_t i) { return convert<A>(dout[at[1] + i * dout_step]); };
    A own = 0;
    for (std::int64_t i = group.lane; i < size; i += kThreads)
      own += kind == SoftmaxKind::softmax ? output(i) * gradient(i) : gradient(i);
    const A total = sum_group<kThreads>(own);
    for (std::int64_t i = group.lane; i < size; i += kThreads) {
      const A d = kind == SoftmaxKind::softmax ? output(i) * (gradient(i) - total) : gradient(i) - exp(output(i)) * total;
      dx[at[2] + i * dx_step] = convert<T>(d);
    }
  }
}

}  // namespace

void softmax(const SoftmaxArgs& args, const ExecContext& ctx) {
  if (args.out.numel() == 0) return;
  const int dim = args.dim;
  const std::int64_t size = args.x.shape[dim];
  const Walk<2> slices(StridedLoop<2>(without_dim(args.x.shape, dim), {without_dim(args.x.strides, dim), without_dim(args.out.strides, dim)}));
  dispatch_float(args.x.dtype, "softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_group(size, [&](auto threads) {
      const int grid = grid_for(slices.count, Group<threads>::kInBlock, ctx);
      softmax_kernel<threads><<<grid, kBlock, 0, stream_of(ctx)>>>(slices, args.kind, size, args.x.as<T>(), args.x.strides[dim],
                                                                   args.out.as<T>(), args.out.strides[dim]);
    });
  });
  check_launch("softmax");
}

void softmax_backward(const SoftmaxBackwardArgs& args, const ExecContext& ctx) {
  if (args.dx.numel() == 0) return;
  const int dim = args.dim;
  const std::int64_t size = args.y.shape[dim];
  const Walk<3> slices(StridedLoop<3>(without_dim(args.y.shape, dim), {without_dim(args.y.strides, dim), without_dim(args.dout.strides, dim),
                                                                       without_dim(args.dx.strides, dim)}));
  dispatch_float(args.y.dtype, "softmax_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_group(size, [&](auto threads) {
      const int grid = grid_for(slices.count, Group<threads>::kInBlock, ctx);
      softmax_backward_kernel<threads><<<grid, kBlock, 0, stream_of(ctx)>>>(
          slices, args.kind, size, args.y.as<T>(), args.y.strides[dim], args.dout.as<T>(), args.dout.strides[dim], args.dx.as<T>(),
          args.dx.strides[dim]);
    });
  });
  check_launch("softmax_backward");
}

}  // namespace heddle::cuda
