#include "kernels/norm/norm.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

const char* name_of(NormKind kind) { return kind == NormKind::layer ? "layer_norm" : "rms_norm"; }

void check_rows(NormKind kind, const ConstView& x, const ConstView& other) {
  HEDDLE_CHECK(x.shape.rank() == 2 && x.shape[1] >= 1, name_of(kind), ": needs rows of at least 1 element, got ", x.shape);
  HEDDLE_CHECK(other.shape == x.shape && other.dtype == x.dtype, name_of(kind), ": operands differ, ", x.dtype, " ", x.shape,
               " and ", other.dtype, " ", other.shape);
}

void check_vector(NormKind kind, const char* what, const ConstView& x, const ConstView& vector, bool may_be_f32) {
  if (!vector.defined()) return;
  const bool dtype_fits = vector.dtype == x.dtype || (may_be_f32 && vector.dtype == DType::f32);
  HEDDLE_CHECK(vector.shape == Shape{x.shape[1]} && dtype_fits, name_of(kind), ": ", what, " must be ", x.dtype, " [",
               x.shape[1], "], got ", vector.dtype, " ", vector.shape);
}

void check_statistics(NormKind kind, const ConstView& x, const ConstView& mean, const ConstView& rstd) {
  const DType dtype = x.dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto fits = [&](const ConstView& view) {
    return view.shape == Shape{x.shape[0]} && view.dtype == dtype && view.is_contiguous();
  };
  HEDDLE_CHECK(fits(rstd) && (kind == NormKind::rms || fits(mean)), name_of(kind), ": statistics must be dense ", dtype, " [",
               x.shape[0], "]");
}

}  // namespace

void norm(const NormArgs& args, const ExecContext& ctx) {
  check_rows(args.kind, args.x, args.out);
  check_vector(args.kind, "weight", args.x, args.weight, false);
  check_vector(args.kind, "bias", args.x, args.bias, false);
  check_statistics(args.kind, args.x, args.mean, args.rstd);
  if (args.residual.defined()) {
    check_rows(args.kind, args.x, args.residual);
    check_rows(args.kind, args.x, args.sum);
  }
  HEDDLE_CHECK(args.eps > 0.0, name_of(args.kind), ": eps must be > 0, got ", args.eps);
  HEDDLE_DISPATCH(ctx, norm, args);
}

void norm_backward(const NormBackwardArgs& args, const ExecContext& ctx) {
  check_rows(args.kind, args.x, args.dout);
  if (args.dx.defined()) check_rows(args.kind, args.x, args.dx);
  if (args.dsum.defined()) check_rows(args.kind, args.x, args.dsum);
  check_vector(args.kind, "weight", args.x, args.weight, false);
  check_vector(args.kind, "dweight", args.x, args.dweight, true);
  check_vector(args.kind, "dbias", args.x, args.dbias, true);
  check_statistics(args.kind, args.x, args.mean, args.rstd);
  HEDDLE_DISPATCH(ctx, norm_backward, args);
}

}  // namespace heddle
