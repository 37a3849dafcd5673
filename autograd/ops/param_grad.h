#pragma once

#include "autograd/node.h"

namespace heddle {

// Where a node's backward writes the gradient of a parameter: the leaf's own buffer when the edge leads to one, which saves
// a tensor and an addition; else a new tensor, to be returned to the engine. Without an edge `view` is undefined.
struct ParamGrad {
  MutView view;
  Write write = Write::assign;
  Tensor returned;

  ParamGrad(const Edge& edge, const Shape& shape, DType dtype, Device device) {
    if (!edge) return;
    if (AccumulateGrad* leaf = as_accumulate(edge); leaf != nullptr) {
      const AccumulateGrad::Target target = leaf->target();
      view = target.view;
      write = target.write;
      return;
    }
    returned = Tensor::empty(shape, dtype, device);
    view = returned.mutable_view();
  }
};

}  // namespace heddle
