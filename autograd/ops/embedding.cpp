#include "kernels/embedding/embedding.h"

#include "autograd/node.h"
#include "autograd/ops.h"
#include "autograd/ops/param_grad.h"

namespace heddle {
namespace {

struct EmbeddingNode final : Node {
  EmbeddingNode(const Tensor& weight, const Tensor& ids, std::int64_t padding_idx)
      : Node("embedding"), shape_(weight.shape()), padding_idx_(padding_idx) {
    save("ids", ids);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor ids = saved(0);
    const Tensor dout = reshape(grads[0], {ids.numel(), shape_[1]});
    const ParamGrad dweight(edges()[0], shape_, dout.dtype(), dout.device());
    embedding_backward({.ids = ids.view(),
                        .dout = dout.view(),
                        .dweight = dweight.view,
                        .write = dweight.write,
                        .padding_idx = padding_idx_},
                       device_context(dout.device()));
    return {dweight.returned};
  }

 private:
  Shape shape_;
  std::int64_t padding_idx_;
};

}  // namespace

Tensor embedding(const Tensor& weight, const Tensor& ids, std::int64_t padding_idx) {
  HEDDLE_CHECK(weight.rank() == 2 && is_floating(weight.dtype()), "embedding: weight must be floating point [V, C], got ",
               weight.describe());
  HEDDLE_CHECK(ids.device() == weight.device(), "embedding: ids are on ", ids.device(), ", weight on ", weight.device(), "; move one");
  HEDDLE_CHECK(padding_idx >= -1 && padding_idx < weight.size(0), "embedding: padding_idx ", padding_idx, " is outside [0, ",
               weight.size(0), "); use -1 for none");
  Shape shape = ids.shape();
  shape.push_back(weight.size(1));
  const Tensor flat_ids = reshape(contiguous(ids.detach()), {ids.numel()});
  const Tensor out = Tensor::empty({ids.numel(), weight.size(1)}, weight.dtype(), weight.device());
  embedding({.weight = weight.view(), .ids = flat_ids.view(), .out = out.mutable_view()}, device_context(weight.device()));
  const Tensor result = reshape(out, shape);
  if (needs_grad({&weight})) record(result, std::make_shared<EmbeddingNode>(weight, flat_ids, padding_idx), {&weight});
  return result;
}

}  // namespace heddle
