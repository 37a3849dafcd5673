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

}  // namespace

void adamw(const AdamWArgs& args, const ExecContext& ctx) {
  HEDDLE_CHECK(args.step >= 1, "adamw: steps are counted from 1, got ", args.step);
  for (const AdamWParameter& parameter : args.parameters) check_parameter(parameter);
  HEDDLE_DISPATCH(ctx, adamw, args);
}

void global_norm(const GlobalNormArgs& args, const ExecContext& ctx) {
  HEDDLE_CHECK(args.out.dtype == DType::f64 && args.out.shape == Shape{}, "global_norm: the result is float64 [], got ",
               args.out.dtype, " ", args.out.shape);
  for (const ConstView& tensor : args.tensors)
    HEDDLE_CHECK(tensor.is_contiguous(), "global_norm: needs dense tensors, got ", tensor.shape, " with strides ", tensor.strides);
  HEDDLE_DISPATCH(ctx, global_norm, args);
}

void scale_all(const ScaleAllArgs& args, const ExecContext& ctx) {
  for (const MutView& tensor : args.tensors)
    HEDDLE_CHECK(tensor.is_contiguous(), "scale_all: needs dense tensors, got ", tensor.shape, " with strides ", tensor.strides);
  HEDDLE_DISPATCH(ctx, scale_all, args);
}

}  // namespace heddle
