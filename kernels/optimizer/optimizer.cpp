#include "kernels/optimizer/optimizer.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

void check_parameter(const AdamWParameter& parameter) {
  const MutView& weight = parameter.weight;
  HEDDLE_CHECK(weight.dtype == DType::f32 || weight.dtype == DType::f64, "adamw: the master weight must be float32 or float64, got ",
               weight.dtype);
  const auto fits = [&](const ConstView& view) { return view.shape == weight.shape && view.is_contiguous(); };
  const auto matches = [&](const ConstView& view) { return fits(view) && view.dtype == weight.dtype; };
  HEDDLE_CHECK(weight.is_contiguous() && matches(parameter.grad) && matches(parameter.first_moment) && matches(parameter.second_moment),
               "adamw: gradient and moments must be dense ", weight.dtype, " ", weight.shape, " like the weight; the gradient is ",
               parameter.grad.dtype, " ", parameter.grad.shape);
  HEDDLE_CHECK(!parameter.rounded.defined() || fits(parameter.rounded), "adamw: the rounded copy must be dense ", weight.shape, ", got ",
               parameter.rounded.shape);
}

void check_scalar(const char* what, const ConstView& view, DType dtype) {
  HEDDLE_CHECK(view.dtype == dtype && view.shape == Shape{} && view.defined(), what, " must be ", dtype, " [], got ", view.dtype, " ", view.shape);
}

}  // namespace

void adamw(const AdamWArgs& args, const ExecContext& ctx) {
  for (const AdamWParameter& parameter : args.parameters) check_parameter(parameter);
  check_scalar("adamw: learning_rate", args.learning_rate, DType::f64);
  check_scalar("adamw: grad_scale", args.grad_scale, DType::f64);
  check_scalar("adamw: grad_norm", args.grad_norm, DType::f64);
  if (args.loss.defined()) check_scalar("adamw: loss", args.loss, DType::f64);
  check_scalar("adamw: step", args.step, DType::i64);
  HEDDLE_DISPATCH(ctx, adamw, args);
}

void global_norm(const GlobalNormArgs& args, const ExecContext& ctx) {
  check_scalar("global_norm: the result", args.out, DType::f64);
  if (args.first_nonfinite.defined()) check_scalar("global_norm: first_nonfinite", args.first_nonfinite, DType::f64);
  for (const ConstView& tensor : args.tensors)
    HEDDLE_CHECK(tensor.is_contiguous(), "global_norm: needs dense tensors, got ", tensor.shape, " with strides ", tensor.strides);
  HEDDLE_DISPATCH(ctx, global_norm, args);
}

}  // namespace heddle
