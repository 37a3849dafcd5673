#pragma once

#include <cstdint>
#include <vector>

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// Work over a list of dense tensors on one device.

namespace heddle {

// One parameter of an AdamW step. All views have one shape and are dense.
struct AdamWParameter {
  MutView weight;        // float32 or float64: the master copy
  ConstView grad;        // dtype of weight
  MutView first_moment;  // dtype of weight
  MutView second_moment;
  MutView rounded;  // optional bfloat16 or float16 copy of the new weight
  double weight_decay = 0.0;
  double rate_scale = 1.0;  // of the learning rate
};

// One update by AdamW. Every number that changes from one update to the next is read from the device's memory, so that the host
// need not know it when it starts the update. With n = grad_scale * grad_norm, the gradient is
//   g = grad * grad_scale * min(1, max_grad_norm / (n + 1e-6))          max_grad_norm 0: no clipping
// and, t being the updates so far and this one and the learning rate multiplied by the parameter's rate_scale,
//   w -= learning_rate * weight_decay * w
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   w -= learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
// If n or the loss is NaN or infinite, nothing is written.
// Loshchilov and Hutter 2019, algorithm 2, with the learning rate inside the decay.
struct AdamWArgs {
  std::vector<AdamWParameter> parameters;
  double beta1;
  double beta2;
  double eps;
  double max_grad_norm = 0;
  ConstView learning_rate;  // float64 []
  ConstView grad_scale;     // float64 []
  ConstView grad_norm;      // float64 []: of all gradients as they are, before the scale
  ConstView loss = {};      // float64 []; optional
  MutView step;             // int64 []: updates so far; one more after an update
};
void adamw(const AdamWArgs& args, const ExecContext& ctx);

// out = sqrt(sum of x^2 over all elements of all tensors), in float64. NaN or infinity anywhere gives a norm that is not
// finite. The order of the additions does not depend on the number of threads.
struct GlobalNormArgs {
  std::vector<ConstView> tensors;  // any floating dtypes
  MutView out;                     // float64 []
  MutView first_nonfinite = {};    // float64 []; optional: the index of the first tensor that holds NaN or infinity, else -1
};
void global_norm(const GlobalNormArgs& args, const ExecContext& ctx);

namespace cpu {
void adamw(const AdamWArgs& args, const ExecContext& ctx);
void global_norm(const GlobalNormArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void adamw(const AdamWArgs& args, const ExecContext& ctx);
void global_norm(const GlobalNormArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
