#include "kernels/softmax/softmax.h"

#include <cmath>
#include <limits>

#include "kernels/elementwise/row_cpu.h"
#include "kernels/runtime/strided.h"

namespace heddle::cpu {
namespace {

// Calls body(offsets) for every slice along `dim` of N operands, in parallel.
template <int N, typename Body>
void for_each_slice(const Shape& shape, int dim, std::array<Shape, N> strides, const Body& body) {
  for (Shape& operand : strides) operand = without_dim(operand, dim);
  const StridedLoop<N> loop(without_dim(shape, dim), strides);
  loop.run(
      [&](std::array<std::int64_t, N> offsets, std::int64_t count) {
        for (std::int64_t c = 0; c < count; ++c) {
          body(offsets);
          for (int i = 0; i < N; ++i) offsets[i] += loop.inner_stride(i);
        }
      },
      row_grain(shape[dim]));
}

template <typename A>
void softmax_row(SoftmaxKind kind, const A* x, std::int64_t size, A* out) {
  MutRow<A> y(out, size);
  const A largest = max_row(x, size);
  if (largest == -std::numeric_limits<A>::infinity()) {
    y = kind == SoftmaxKind::softmax ? A(0) : largest;
    return;
  }
  const A total = exp_row(x, largest, size, out);
  if (kind == SoftmaxKind::softmax) y *= A(1) / total;
  else y = (Row<A>(x, size) - largest) - std::log(total);
}

template <typename A>
void softmax_backward_row(SoftmaxKind kind, const A* y, const A* dout, std::int64_t size, A* out) {
  const Row<A> p(y, size), dy(dout, size);
  MutRow<A> dx(out, size);
  if (kind == SoftmaxKind::softmax) {
    dx = p * (dy - (p * dy).sum());
    return;
  }
  exp_row(y, A(0), size, out);
  dx = dy - dx * dy.sum();
}

}  // namespace

void softmax(const SoftmaxArgs& args, const ExecContext&) {
  dispatch_float(args.x.dtype, "softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const std::int64_t size = args.x.shape[args.dim], from = args.x.strides[args.dim], to = args.out.strides[args.dim];
    const RowScratch<A> scratch(size, 2);
    for_each_slice<2>(args.x.shape, args.dim, {args.x.strides, args.out.strides}, [&](const auto& offsets) {
      T* out = args.out.as<T>() + offsets[1];
      const A* x = read_row(args.x.as<T>() + offsets[0], from, size, scratch.row(0));
      A* y = row_target(out, to, scratch.row(1));
      softmax_row(args.kind, x, size, y);
      write_row(y, out, to, size);
    });
  });
}

void softmax_backward(const SoftmaxBackwardArgs& args, const ExecContext&) {
  dispatch_float(args.y.dtype, "softmax_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const int dim = args.dim;
    const std::int64_t size = args.y.shape[dim];
    const RowScratch<A> scratch(size, 3);
    for_each_slice<3>(args.y.shape, dim, {args.y.strides, args.dout.strides, args.dx.strides}, [&](const auto& offsets) {
      T* out = args.dx.as<T>() + offsets[2];
      const A* y = read_row(args.y.as<T>() + offsets[0], args.y.strides[dim], size, scratch.row(0));
      const A* dout = read_row(args.dout.as<T>() + offsets[1], args.dout.strides[dim], size, scratch.row(1));
      A* dx = row_target(out, args.dx.strides[dim], scratch.row(2));
      softmax_backward_row(args.kind, y, dout, size, dx);
      write_row(dx, out, args.dx.strides[dim], size);
    });
  });
}

}  // namespace heddle::cpu
