#include "kernels/reduce/reduce.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

// Checks that `reduced` is `full` with size 1 along `dim`.
void check_reduced(const char* op, const Shape& full, const Shape& reduced, int dim) {
  HEDDLE_CHECK(dim >= 0 && dim < full.rank(), op, ": dimension ", dim, " is out of range for rank ", full.rank());
  HEDDLE_CHECK(full[dim] >= 1, op, ": dimension ", dim, " of ", full, " has no elements");
  Shape expected = full;
  expected[dim] = 1;
  HEDDLE_CHECK(reduced == expected, op, ": ", full, " along dimension ", dim, " gives ", expected, ", got ", reduced);
}

}  // namespace

void sum(const SumArgs& args, const ExecContext& ctx) {
  const Shape& from = args.x.shape;
  const Shape& to = args.out.shape;
  bool fits = from.rank() == to.rank();
  for (int d = 0; fits && d < to.rank(); ++d) fits = to[d] == from[d] || to[d] == 1;
  HEDDLE_CHECK(fits, "sum: ", from, " does not reduce to ", to);
  HEDDLE_CHECK(args.out.dtype == args.x.dtype || args.out.dtype == DType::f32, "sum: no sum of ", args.x.dtype, " into ",
               args.out.dtype, "; cast the input first");
  HEDDLE_DISPATCH(ctx, sum, args);
}

void max(const MaxArgs& args, const ExecContext& ctx) {
  check_reduced("max", args.x.shape, args.out.shape, args.dim);
  check_reduced("max", args.x.shape, args.index.shape, args.dim);
  HEDDLE_CHECK(args.out.dtype == args.x.dtype && args.index.dtype == DType::i64, "max: needs outputs ", args.x.dtype,
               " and int64, got ", args.out.dtype, " and ", args.index.dtype);
  HEDDLE_DISPATCH(ctx, max, args);
}

void max_backward(const MaxBackwardArgs& args, const ExecContext& ctx) {
  check_reduced("max_backward", args.dx.shape, args.dout.shape, args.dim);
  check_reduced("max_backward", args.dx.shape, args.index.shape, args.dim);
  HEDDLE_CHECK(args.dout.dtype == args.dx.dtype && args.index.dtype == DType::i64, "max_backward: needs gradients of one dtype and int64 indices, got ",
               args.dout.dtype, ", ", args.dx.dtype, " and ", args.index.dtype);
  HEDDLE_DISPATCH(ctx, max_backward, args);
}

}  // namespace heddle
