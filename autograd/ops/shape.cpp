#include <algorithm>
#include <utility>

#include "autograd/node.h"
#include "autograd/ops.h"
#include "kernels/runtime/strided.h"

namespace heddle {
namespace {

// The gradient of a view is a view of the gradient; slice and split put theirs into a zeroed buffer.
struct PermuteNode final : Node {
  explicit PermuteNode(const std::vector<int>& dims) : Node("permute"), inverse_(dims.size()) {
    for (std::size_t i = 0; i < dims.size(); ++i) inverse_[static_cast<std::size_t>(dims[i])] = static_cast<int>(i);
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override { return {permute(grads[0], inverse_)}; }

 private:
  std::vector<int> inverse_;
};

struct ReshapeNode final : Node {
  explicit ReshapeNode(const Shape& shape) : Node("reshape"), shape_(shape) {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override { return {reshape(grads[0], shape_)}; }

 private:
  Shape shape_;
};

struct ExpandNode final : Node {
  explicit ExpandNode(const Shape& shape) : Node("expand"), shape_(shape) {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override { return {sum_to(grads[0], shape_)}; }

 private:
  Shape shape_;
};

struct SliceNode final : Node {
  SliceNode(const Shape& shape, int dim, std::int64_t start, std::int64_t end)
      : Node("slice"), shape_(shape), dim_(dim), start_(start), end_(end) {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dx = Tensor::zeros(shape_, grads[0].dtype(), grads[0].device());
    slice(dx, dim_, start_, end_).copy_(grads[0]);
    return {dx};
  }

 private:
  Shape shape_;
  int dim_;
  std::int64_t start_, end_;
};

struct ConcatNode final : Node {
  ConcatNode(std::vector<std::int64_t> sizes, int dim) : Node("concat"), sizes_(std::move(sizes)), dim_(dim) {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override { return split(grads[0], sizes_, dim_); }

 private:
  std::vector<std::int64_t> sizes_;
  int dim_;
};

// One node for all pieces, so that their gradients land in one buffer rather than in one zero-padded buffer each.
struct SplitNode final : Node {
  SplitNode(const Tensor& x, std::vector<std::int64_t> sizes, int dim)
      : Node("split"), spec_{x.shape(), x.dtype(), x.device()}, sizes_(std::move(sizes)), dim_(dim) {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor dx = Tensor::empty(spec_.shape, spec_.dtype, spec_.device);
    std::int64_t start = 0;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      const Tensor piece = slice(dx, dim_, start, start + sizes_[i]);
      if (grads[i].defined()) piece.copy_(grads[i]);
      else piece.zero_();
      start += sizes_[i];
    }
    return {dx};
  }

 private:
  GradSpec spec_;
  std::vector<std::int64_t> sizes_;
  int dim_;
};

// The strides that read x's memory under another shape of as many elements; false if no strides do.
bool view_strides(const Tensor& x, const Shape& target, Shape& out) {
  out = contiguous_strides(target);
  if (x.numel() == 0) return true;
  const StridedLoop<1> runs(x.shape(), {x.strides()});  // the maximal evenly spaced runs of x
  int run = runs.shape.rank() - 1;
  std::int64_t left = runs.shape[run], stride = runs.strides[0][run];
  for (int t = target.rank() - 1; t >= 0; --t) {
    if (target[t] == 1) continue;
    if (left == 1) {
      left = runs.shape[--run];
      stride = runs.strides[0][run];
    }
    if (left % target[t] != 0) return false;
    out[t] = stride;
    stride *= target[t];
    left /= target[t];
  }
  return true;
}

// Fills in a size of -1 and checks that the element count stays.
Shape resolve_shape(const Tensor& x, const Shape& wanted) {
  Shape shape = wanted;
  int unknown = -1;
  for (int d = 0; d < shape.rank(); ++d) {
    HEDDLE_CHECK(shape[d] >= 0 || (shape[d] == -1 && unknown < 0), "reshape: sizes must be >= 0, one may be -1, got ", wanted);
    if (shape[d] == -1) shape[unknown = d] = 1;
  }
  const std::int64_t known = checked_numel(shape, "reshape");
  if (unknown >= 0 && known > 0) shape[unknown] = x.numel() / known;
  HEDDLE_CHECK((unknown < 0 || known > 0) && shape.numel() == x.numel(), "reshape: ", x.shape(), " with ", x.numel(),
               " elements does not fit ", wanted);
  return shape;
}

}  // namespace

Tensor permute(const Tensor& x, const std::vector<int>& dims) {
  HEDDLE_CHECK(static_cast<int>(dims.size()) == x.rank(), "permute: ", dims.size(), " dimensions given for ", x.shape());
  std::vector<int> order;
  Shape shape, strides;
  for (int dim : dims) {
    const int d = normalise_dim(dim, x.rank(), "permute");
    HEDDLE_CHECK(std::find(order.begin(), order.end(), d) == order.end(), "permute: dimension ", dim, " given twice");
    order.push_back(d);
    shape.push_back(x.shape()[d]);
    strides.push_back(x.strides()[d]);
  }
  const Tensor out = x.alias(shape, strides, x.storage_offset());
  if (needs_grad({&x})) record(out, std::make_shared<PermuteNode>(order), {&x});
  return out;
}

Tensor transpose(const Tensor& x, int dim0, int dim1) {
  std::vector<int> dims;
  for (int d = 0; d < x.rank(); ++d) dims.push_back(d);
  const int a = normalise_dim(dim0, x.rank(), "transpose"), b = normalise_dim(dim1, x.rank(), "transpose");
  std::swap(dims[static_cast<std::size_t>(a)], dims[static_cast<std::size_t>(b)]);
  return permute(x, dims);
}

Tensor slice(const Tensor& x, int dim, std::int64_t start, std::int64_t end) {
  const int d = normalise_dim(dim, x.rank(), "slice");
  HEDDLE_CHECK(0 <= start && start <= end && end <= x.shape()[d], "slice: [", start, ", ", end, ") is outside dimension ", d,
               " of ", x.shape());
  Shape shape = x.shape();
  shape[d] = end - start;
  const Tensor out = x.alias(shape, x.strides(), x.storage_offset() + start * x.strides()[d]);
  if (needs_grad({&x})) record(out, std::make_shared<SliceNode>(x.shape(), d, start, end), {&x});
  return out;
}

Tensor select_index(const Tensor& x, int dim, std::int64_t index) {
  const int d = normalise_dim(dim, x.rank(), "select_index");
  HEDDLE_CHECK(0 <= index && index < x.shape()[d], "select_index: index ", index, " is outside dimension ", d, " of ",
               x.shape());
  return squeeze(slice(x, d, index, index + 1), d);
}

Tensor reshape(const Tensor& x, const Shape& wanted) {
  const Shape shape = resolve_shape(x, wanted);
  if (shape == x.shape()) return x;
  Shape strides;
  if (!view_strides(x, shape, strides)) return reshape(contiguous(x), shape);
  const Tensor out = x.alias(shape, strides, x.storage_offset());
  if (needs_grad({&x})) record(out, std::make_shared<ReshapeNode>(x.shape()), {&x});
  return out;
}

Tensor expand(const Tensor& x, const Shape& shape) {
  checked_numel(shape, "expand");
  HEDDLE_CHECK(broadcast_shapes(x.shape(), shape, "expand") == shape, "expand: ", x.shape(), " does not expand to ", shape);
  const Tensor out = x.alias(shape, broadcast_strides(x.shape(), x.strides(), shape), x.storage_offset());
  if (needs_grad({&x})) record(out, std::make_shared<ExpandNode>(x.shape()), {&x});
  return out;
}

Tensor unsqueeze(const Tensor& x, int dim) {
  const int at = normalise_dim(dim, x.rank() + 1, "unsqueeze");
  Shape shape;
  for (int d = 0; d <= x.rank(); ++d) {
    if (d == at) shape.push_back(1);
    if (d < x.rank()) shape.push_back(x.shape()[d]);
  }
  return reshape(x, shape);
}

Tensor squeeze(const Tensor& x, int dim) {
  const int at = normalise_dim(dim, x.rank(), "squeeze");
  HEDDLE_CHECK(x.shape()[at] == 1, "squeeze: dimension ", at, " of ", x.shape(), " is not 1");
  Shape shape;
  for (int d = 0; d < x.rank(); ++d)
    if (d != at) shape.push_back(x.shape()[d]);
  return reshape(x, shape);
}

Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  const Tensor out = x.clone();
  // The gradient of a copy is the gradient itself, under the same shape.
  if (needs_grad({&x})) record(out, std::make_shared<ReshapeNode>(x.shape()), {&x});
  return out;
}

std::vector<Tensor> split(const Tensor& x, const std::vector<std::int64_t>& sizes, int dim) {
  const int d = normalise_dim(dim, x.rank(), "split");
  std::int64_t total = 0;
  for (std::int64_t size : sizes) {
    HEDDLE_CHECK(size >= 0, "split: sizes must be >= 0, got ", size);
    total += size;
  }
  HEDDLE_CHECK(total == x.shape()[d], "split: sizes add up to ", total, ", dimension ", d, " of ", x.shape(), " is ",
               x.shape()[d]);
  std::vector<Tensor> pieces;
  std::int64_t start = 0;
  for (std::int64_t size : sizes) {
    pieces.push_back(slice(x.detach(), d, start, start + size));
    start += size;
  }
  if (needs_grad({&x})) record(pieces, std::make_shared<SplitNode>(x, sizes, d), {x});
  return pieces;
}

Tensor concat(const std::vector<Tensor>& tensors, int dim) {
  HEDDLE_CHECK(!tensors.empty(), "concat: no tensors given");
  const Tensor& first = tensors[0];
  const int d = normalise_dim(dim, first.rank(), "concat");
  std::vector<std::int64_t> sizes;
  Shape shape = first.shape();
  shape[d] = 0;
  for (const Tensor& tensor : tensors) {
    Shape expected = first.shape();
    if (tensor.rank() == first.rank()) expected[d] = tensor.shape()[d];
    HEDDLE_CHECK(tensor.shape() == expected && tensor.dtype() == first.dtype() && tensor.device() == first.device(),
                 "concat: ", tensor.describe(), " does not join ", first.describe(), " along dimension ", d);
    sizes.push_back(expected[d]);
    shape[d] += expected[d];
  }
  const Tensor out = Tensor::empty(shape, first.dtype(), first.device());
  std::int64_t start = 0;
  for (const Tensor& tensor : tensors) {
    slice(out, d, start, start + tensor.shape()[d]).copy_(tensor.detach());
    start += tensor.shape()[d];
  }
  if (needs_grad(tensors)) record({out}, std::make_shared<ConcatNode>(std::move(sizes), d), tensors);
  return out;
}

}  // namespace heddle
