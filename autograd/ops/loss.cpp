#include "kernels/loss/loss.h"

#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

struct CrossEntropyNode final : Node {
  CrossEntropyNode(const CrossEntropyOptions& options, const Tensor& logits, const Tensor& labels, const Tensor& lse,
                   const Tensor& valid)
      : Node("cross_entropy"), options_(options) {
    save("logits", logits);
    save("labels", labels);
    save("lse", lse);
    save("valid", valid);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor reused = reusable(0);  // a second logits-sized buffer would be the largest of the whole step
    const Tensor logits = saved(0), labels = saved(1), lse = saved(2), valid = saved(3);
    const Tensor rows = reshape(logits, {labels.numel(), logits.size(-1)});
    const Tensor dlogits = reused.defined() ? rows : Tensor::empty(rows.shape(), logits.dtype(), logits.device());
    cross_entropy_backward({.logits = rows.view(),
                            .labels = labels.view(),
                            .ignore_index = options_.ignore_index,
                            .is_mean = options_.reduction == LossReduction::mean,
                            .lse = lse.view(),
                            .valid = valid.view(),
                            .dloss = grads[0].view(),
                            .dlogits = dlogits.mutable_view()},
                           device_context(logits.device()));
    return {reshape(dlogits, logits.shape())};
  }

 private:
  CrossEntropyOptions options_;
};

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropyOptions& options) {
  HEDDLE_CHECK(is_floating(logits.dtype()) && logits.rank() >= 1 && logits.size(-1) >= 1,
               "cross_entropy: logits must be floating point [..., V] with V >= 1, got ", logits.describe());
  Shape expected;
  for (int d = 0; d + 1 < logits.rank(); ++d) expected.push_back(logits.shape()[d]);
  HEDDLE_CHECK(labels.dtype() == DType::i64 && labels.shape() == expected && labels.device() == logits.device(),
               "cross_entropy: labels must be int64 ", expected, " on ", logits.device(), " for logits ", logits.shape(), ", got ",
               labels.describe());
  const DType wide = logits.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const std::int64_t count = labels.numel();
  const Tensor rows = reshape(logits.detach(), {count, logits.size(-1)});
  const Tensor flat_labels = reshape(contiguous(labels), {count});
  const Tensor loss = Tensor::empty({}, wide, logits.device());
  const Tensor lse = Tensor::empty({count}, wide, logits.device());
  const Tensor valid = Tensor::empty({}, DType::i64, logits.device());
  cross_entropy({.logits = rows.view(),
                 .labels = flat_labels.view(),
                 .ignore_index = options.ignore_index,
                 .is_mean = options.reduction == LossReduction::mean,
                 .loss = loss.mutable_view(),
                 .lse = lse.mutable_view(),
                 .valid = valid.mutable_view()},
                device_context(logits.device()));
  if (needs_grad({&logits}))
    record(loss, std::make_shared<CrossEntropyNode>(options, logits, flat_labels, lse, valid), {&logits});
  return loss;
}

}  // namespace heddle
