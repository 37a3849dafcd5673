#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "autograd/tensor.h"

namespace heddle {

struct GradcheckOptions {
  double step = 1e-6;       // of the central difference
  double tolerance = 1e-5;  // bound on the relative error
  std::uint64_t seed = 1;   // of the cotangent
};

struct GradcheckResult {
  bool ok = false;
  double worst_error = 0.0;  // over all elements of all inputs
  double bound = 0.0;        // what it was held to
  std::string message;       // where the worst error is, with both values; or what went wrong
};

// Compares the gradients of fn with central differences. fn maps the inputs to one tensor and must be deterministic;
// inputs are leaves of any strides; those that require a gradient are float64 and are checked element by element:
//   d/dx sum(c * fn(x)) = (L(x + step) - L(x - step)) / (2 step),  c random normal,
//   error = |analytic - numeric| / max(|analytic|, |numeric|, 1e-3).
// In float64 at step 1e-6, rounding costs about 1e-10 times the size of the outputs and truncation 1e-12 times the third
// derivative; the floor of 1e-3 keeps both far under the tolerance for outputs up to about 10. The backward is run a second
// time with the same cotangent under other strides and must agree to 1e-12. Throws heddle::Error if an input that requires a
// gradient is not float64, or none requires one.
GradcheckResult gradcheck(const std::function<Tensor(const std::vector<Tensor>&)>& fn, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options = {});

}  // namespace heddle
