#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HEDDLE_HOST_DEVICE __host__ __device__
#else
#define HEDDLE_HOST_DEVICE
#endif

namespace heddle {

// What an AdamW update needs beside the tensors, the same on every device.
struct UpdateNumbers {
  double learning_rate = 0;
  double factor = 0;  // of every gradient: scale and clipping
  double rate = 0;    // learning_rate / (1 - beta1^t)
  double root = 0;    // 1 / sqrt(1 - beta2^t)
  bool applies = false;
};

struct UpdateInputs {
  double beta1, beta2, max_grad_norm;
  double learning_rate, grad_scale, grad_norm, loss;
};

// The numbers of update t; see AdamWArgs.
HEDDLE_HOST_DEVICE inline UpdateNumbers update_numbers(const UpdateInputs& in, std::int64_t t) {
  const double norm = in.grad_scale * in.grad_norm;
  const double clip = in.max_grad_norm > 0 && norm + 1e-6 > in.max_grad_norm ? in.max_grad_norm / (norm + 1e-6) : 1.0;
  UpdateNumbers out;
  out.learning_rate = in.learning_rate;
  out.factor = in.grad_scale * clip;
  out.rate = in.learning_rate / (1.0 - std::pow(in.beta1, static_cast<double>(t)));
  out.root = 1.0 / std::sqrt(1.0 - std::pow(in.beta2, static_cast<double>(t)));
  out.applies = std::isfinite(norm) && std::isfinite(in.loss);
  return out;
}

}  // namespace heddle
