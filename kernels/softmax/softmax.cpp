#include "kernels/softmax/softmax.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

void check_pair(const char* op, const ConstView& a, const ConstView& b, int dim) {
  HEDDLE_CHECK(a.shape == b.shape && a.dtype == b.dtype, op, ": operands differ, ", a.dtype, " ", a.shape, " and ", b.dtype,
               " ", b.shape);
  HEDDLE_CHECK(dim >= 0 && dim < a.shape.rank(), op, ": dimension ", dim, " is out of range for rank ", a.shape.rank());
}

}  // namespace

void softmax(const SoftmaxArgs& args, const ExecContext& ctx) {
  check_pair("softmax", args.x, args.out, args.dim);
  HEDDLE_CHECK(args.x.shape[args.dim] >= 1, "softmax: dimension ", args.dim, " of ", args.x.shape, " has no elements");
  HEDDLE_DISPATCH(ctx, softmax, args);
}

void softmax_backward(const SoftmaxBackwardArgs& args, const ExecContext& ctx) {
  check_pair("softmax_backward", args.y, args.dout, args.dim);
  check_pair("softmax_backward", args.y, args.dx, args.dim);
  HEDDLE_DISPATCH(ctx, softmax_backward, args);
}

}  // namespace heddle
