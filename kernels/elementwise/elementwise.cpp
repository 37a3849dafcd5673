#include "kernels/elementwise/elementwise.h"

#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

void check_input(const char* op, const ConstView& input, const MutView& out) {
  HEDDLE_CHECK(input.dtype == out.dtype, op, ": dtypes differ, ", input.dtype, " and ", out.dtype, "; cast one of them");
  HEDDLE_CHECK(input.device == out.device, op, ": devices differ, ", input.device, " and ", out.device);
  HEDDLE_CHECK(broadcast_shapes(input.shape, out.shape, op) == out.shape, op, ": input ", input.shape,
               " does not broadcast to ", out.shape);
}

}  // namespace

void copy(const CopyArgs& args, const ExecContext& ctx) {
  HEDDLE_CHECK(broadcast_shapes(args.source.shape, args.out.shape, "copy") == args.out.shape, "copy: source ",
               args.source.shape, " does not broadcast to ", args.out.shape);
  HEDDLE_DISPATCH(ctx, copy, args);
}

void fill(const FillArgs& args, const ExecContext& ctx) { HEDDLE_DISPATCH(ctx, fill, args); }

void unary(const UnaryArgs& args, const ExecContext& ctx) {
  check_input("unary", args.x, args.out);
  HEDDLE_DISPATCH(ctx, unary, args);
}

void unary_backward(const UnaryBackwardArgs& args, const ExecContext& ctx) {
  check_input("unary_backward", args.x, args.dx);
  check_input("unary_backward", args.dout, args.dx);
  HEDDLE_DISPATCH(ctx, unary_backward, args);
}

void binary(const BinaryArgs& args, const ExecContext& ctx) {
  check_input("binary", args.a, args.out);
  check_input("binary", args.b, args.out);
  HEDDLE_DISPATCH(ctx, binary, args);
}

void swiglu(const SwigluArgs& args, const ExecContext& ctx) {
  check_input("swiglu", args.gate, args.out);
  check_input("swiglu", args.up, args.out);
  HEDDLE_DISPATCH(ctx, swiglu, args);
}

void swiglu_backward(const SwigluBackwardArgs& args, const ExecContext& ctx) {
  check_input("swiglu_backward", args.gate, args.dgate);
  check_input("swiglu_backward", args.up, args.dgate);
  check_input("swiglu_backward", args.dout, args.dgate);
  check_input("swiglu_backward", args.dup, args.dgate);
  HEDDLE_DISPATCH(ctx, swiglu_backward, args);
}

void select(const SelectArgs& args, const ExecContext& ctx) {
  HEDDLE_CHECK(args.condition.dtype == DType::boolean, "where: the condition must be bool, got ", args.condition.dtype);
  HEDDLE_CHECK(broadcast_shapes(args.condition.shape, args.out.shape, "where") == args.out.shape, "where: condition ",
               args.condition.shape, " does not broadcast to ", args.out.shape);
  check_input("where", args.a, args.out);
  check_input("where", args.b, args.out);
  HEDDLE_DISPATCH(ctx, select, args);
}

}  // namespace heddle
