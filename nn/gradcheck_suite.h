#pragma once

#include <functional>
#include <string>
#include <vector>

#include "autograd/gradcheck.h"

namespace heddle::nn {

// One op or module on one set of inputs.
struct GradcheckCase {
  std::string name;    // "matmul", "TransformerBlock"
  std::string node;    // the Node it exercises, "MatmulNode"; empty for a module
  std::string inputs;  // "[3, 4] [4, 5], transposed"
  std::function<GradcheckResult()> run;
};

// Every op on dense, transposed, sliced and repeated (stride 0) inputs, then every module, in float64: what
// `heddle gradcheck` prints and the tests run. Seeds are fixed.
std::vector<GradcheckCase> gradcheck_cases();

// The two halves.
std::vector<GradcheckCase> op_gradcheck_cases();
std::vector<GradcheckCase> module_gradcheck_cases();

}  // namespace heddle::nn
