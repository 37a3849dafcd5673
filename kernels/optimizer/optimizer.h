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
};

// One step of AdamW for step number t >= 1, with g the gradient:
//   w -= lr * weight_decay * w
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   w -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
// Loshchilov and Hutter 2019, algorithm 2, with the learning rate inside the decay.
struct AdamWArgs {
  std::vector<AdamWParameter> parameters;
  double learning_rate;
  double beta1;
  double beta2;
  double eps;
  std::int64_t step;
};
void adamw(const AdamWArgs& args, const ExecContext& ctx);

// out = sqrt(sum of x^2 over all elements of all tensors), in float64. NaN or infinity anywhere gives a norm that is not
// finite. The order of the additions does not depend on the number of threads.
struct GlobalNormArgs {
  std::vector<ConstView> tensors;  // any floating dtypes
  MutView out;                     // float64 []
};
void global_norm(const GlobalNormArgs& args, const ExecContext& ctx);

// Multiplies every tensor by a number, in place.
struct ScaleAllArgs {
  std::vector<MutView> tensors;
  double factor;
};
void scale_all(const ScaleAllArgs& args, const ExecContext& ctx);

namespace cpu {
void adamw(const AdamWArgs& args, const ExecContext& ctx);
void global_norm(const GlobalNormArgs& args, const ExecContext& ctx);
void scale_all(const ScaleAllArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void adamw(const AdamWArgs& args, const ExecContext& ctx);
void global_norm(const GlobalNormArgs& args, const ExecContext& ctx);
void scale_all(const ScaleAllArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
