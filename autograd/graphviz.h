#pragma once

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "autograd/tensor.h"

namespace heddle {

// Writes the recorded graph behind `root` in Graphviz's dot language: one box an op with its output shapes, one ellipse
// a leaf, labelled with its name from `names` where it has one. Arrows run from inputs to results.
void write_graphviz(std::ostream& out, const Tensor& root, const std::vector<std::pair<std::string, Tensor>>& names = {});

}  // namespace heddle
