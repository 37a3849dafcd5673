#include "kernels/loss/loss.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

void check_common(const ConstView& logits, const ConstView& labels, const ConstView& lse, const ConstView& valid, const ConstView& loss) {
  const DType wide = logits.dtype == DType::f64 ? DType::f64 : DType::f32;
  HEDDLE_CHECK(logits.shape.rank() == 2 && logits.shape[1] >= 1, "cross_entropy: needs logits [rows, V] with V >= 1, got ", logits.shape);
  const Shape rows = {logits.shape[0]};
  HEDDLE_CHECK(labels.dtype == DType::i64 && labels.shape == rows && labels.is_contiguous(),
               "cross_entropy: labels must be dense int64 ", rows, ", got ", labels.dtype, " ", labels.shape);
  HEDDLE_CHECK(lse.dtype == wide && lse.shape == rows && lse.is_contiguous() && loss.dtype == wide && loss.shape == Shape{} &&
                   valid.dtype == DType::i64 && valid.shape == Shape{},
               "cross_entropy: needs lse ", wide, " ", rows, ", loss ", wide, " [] and valid int64 []");
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& args, const ExecContext& ctx) {
  check_common(args.logits, args.labels, args.lse, args.valid, args.loss);
  HEDDLE_DISPATCH(ctx, cross_entropy, args);
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecContext& ctx) {
  check_common(args.logits, args.labels, args.lse, args.valid, args.dloss);
  HEDDLE_CHECK(args.dlogits.shape == args.logits.shape && args.dlogits.dtype == args.logits.dtype, "cross_entropy: dlogits is ",
               args.dlogits.dtype, " ", args.dlogits.shape, ", logits ", args.logits.dtype, " ", args.logits.shape);
  HEDDLE_DISPATCH(ctx, cross_entropy_backward, args);
}

}  // namespace heddle
