#include "kernels/norm/norm.h"

#include <cmath>

#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/row_cpu.h"

namespace heddle::cpu {
namespace {

template <typename T>
void norm_typed(const NormArgs& args) {
  using A = accumulate_t<T>;
  const std::int64_t rows = args.x.shape[0], N = args.x.shape[1];
  const std::vector<A> weight_values = read_vector<T>(args.weight, N, A(1));
  const std::vector<A> bias_values = read_vector<T>(args.bias, N, A(0));
  const Row<A> weight(weight_values.data(), N), bias(bias_values.data(), N);
  const RowScratch<A> scratch(N, 2);
  parallel_for(rows, row_grain(N), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      T* out = args.out.as<T>() + r * args.out.strides[0];
      const Row<A> x(read_row(args.x.as<T>() + r * args.x.strides[0], args.x.strides[1], N, scratch.row(0)), N);
      MutRow<A> y(row_target(out, args.out.strides[1], scratch.row(1)), N);
      const A mean = args.kind == NormKind::layer ? x.mean() : A(0);
      const A rstd = A(1) / std::sqrt((x - mean).square().mean() + static_cast<A>(args.eps));
      y = (x - mean) * rstd * weight + bias;
      write_row(y.data(), out, args.out.strides[1], N);
      args.rstd.as<A>()[r] = rstd;
      if (args.kind == NormKind::layer) args.mean.as<A>()[r] = mean;
    }
  });
}

// The backward of one row: writes dx if wanted and adds to the row sums.
template <typename T>
struct NormBackward {
  using A = accumulate_t<T>;
  const NormBackwardArgs& args;
  std::int64_t N;
  std::vector<A> weight_values;
  RowScratch<A> scratch;  // x, dout, xhat, dx, dsum

  explicit NormBackward(const NormBackwardArgs& a)
      : args(a), N(a.x.shape[1]), weight_values(read_vector<T>(a.weight, N, A(1))), scratch(N, 5) {}

  void add_row(std::int64_t r, MutRow<A> dweight, MutRow<A> dbias) const {
    const bool is_layer = args.kind == NormKind::layer;
    const Row<A> x(read_row(args.x.as<T>() + r * args.x.strides[0], args.x.strides[1], N, scratch.row(0)), N);
    const Row<A> dout(read_row(args.dout.as<T>() + r * args.dout.strides[0], args.dout.strides[1], N, scratch.row(1)), N);
    const A mean = is_layer ? args.mean.as<A>()[r] : A(0);
    const A rstd = args.rstd.as<A>()[r];
    MutRow<A> xhat(scratch.row(2), N);
    xhat = (x - mean) * rstd;
    if (args.dweight.defined()) dweight += dout * xhat;
    if (args.dbias.defined()) dbias += dout;
    if (!args.dx.defined()) return;

    T* to = args.dx.as<T>() + r * args.dx.strides[0];
    const Row<A> weight(weight_values.data(), N);
    MutRow<A> dx(row_target(to, args.dx.strides[1], scratch.row(3)), N);
    dx = dout * weight;  // g
    const A mean_g = is_layer ? dx.mean() : A(0);
    const A mean_gx = (dx * xhat).mean();
    dx = rstd * (dx - mean_g - xhat * mean_gx);
    if (args.dsum.defined())
      dx += Row<A>(read_row(args.dsum.as<T>() + r * args.dsum.strides[0], args.dsum.strides[1], N, scratch.row(4)), N);
    write_row(dx.data(), to, args.dx.strides[1], N);
  }
};

template <typename T>
void norm_backward_typed(const NormBackwardArgs& args) {
  using A = accumulate_t<T>;
  const std::int64_t rows = args.x.shape[0], N = args.x.shape[1];
  const NormBackward<T> row_kernel(args);
  std::vector<A> partial(static_cast<std::size_t>(kReductionChunks * 2 * N));  // [chunks, {dweight, dbias}, N]
  const std::int64_t grain = kReductionChunks * row_grain(N) / std::max<std::int64_t>(rows, 1);
  parallel_for(kReductionChunks, std::max<std::int64_t>(grain, 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      MutRow<A> dweight(partial.data() + chunk * 2 * N, N), dbias(dweight.data() + N, N);
      const std::int64_t last = rows * (chunk + 1) / kReductionChunks;
      for (std::int64_t r = rows * chunk / kReductionChunks; r < last; ++r) row_kernel.add_row(r, dweight, dbias);
    }
  });
  MutRow<A> total(partial.data(), 2 * N);
  for (std::int64_t chunk = 1; chunk < kReductionChunks; ++chunk) total += Row<A>(partial.data() + chunk * 2 * N, 2 * N);
  if (args.dweight.defined()) write_vector(partial.data(), args.dweight, args.write_dweight);
  if (args.dbias.defined()) write_vector(partial.data() + N, args.dbias, args.write_dbias);
}

}  // namespace

void norm(const NormArgs& args, const ExecContext& ctx) {
  if (args.residual.defined()) {
    heddle::binary({.op = BinaryOp::add, .a = args.x, .b = args.residual, .out = args.sum}, ctx);
    NormArgs of_sum = args;
    of_sum.x = args.sum;
    of_sum.residual = {};
    return cpu::norm(of_sum, ctx);
  }
  dispatch_float(args.x.dtype, "norm", [&](auto tag) { norm_typed<typename decltype(tag)::type>(args); });
}

void norm_backward(const NormBackwardArgs& args, const ExecContext&) {
  dispatch_float(args.x.dtype, "norm_backward", [&](auto tag) { norm_backward_typed<typename decltype(tag)::type>(args); });
}

}  // namespace heddle::cpu
