#pragma once

#include "autograd/tensor.h"

namespace heddle {

// Runs the graph behind `root` backwards, starting with `gradient` (the shape, dtype and device of root). Each node runs
// once, after all gradients of its outputs have arrived. Gradients a node returns are checked for number, shape, dtype
// and device, and for NaN and infinity when the environment has HEDDLE_CHECK_FINITE=1. If a node throws, leaves keep what
// they received until then and the graph is spent. Iterative: depth is limited by memory only.
void run_backward(const Tensor& root, const Tensor& gradient, bool retain_graph);

}  // namespace heddle
