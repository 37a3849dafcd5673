#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/runtime/host_copy.h"
#include "nn/module.h"

namespace heddle::nn {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // for tensors of two or more dimensions; never for biases and norms
  std::function<double(const NamedTensor&)> rate_scale = {};  // of a parameter: multiplies its learning rate; absent: 1
};

struct UpdateArgs {
  double learning_rate;
  double grad_scale = 1;     // every gradient is multiplied by this first: 1 / tokens after a sum over tokens
  double max_grad_norm = 0;  // 0: no clipping
  Tensor loss = {};          // float64 [], optional: with a loss that is not finite nothing is updated either
};

struct UpdateResult {
  double grad_norm = 0;   // of all scaled gradients together, before clipping
  double loss = 0;        // as given
  bool applied = false;   // false: the norm or the loss is not finite, and nothing changed
  std::string nonfinite;  // then: the first parameter whose gradient holds NaN or infinity; empty if it is the loss
};

// An update that the device may still be working on.
class PendingUpdate {
 public:
  bool is_ready() const { return numbers_.is_ready(); }
  UpdateResult result() const;  // waits for the update

 private:
  friend class AdamW;
  PendingUpdate(const Tensor& numbers, double grad_scale, std::vector<std::string> names)
      : numbers_(numbers.view()), grad_scale_(grad_scale), names_(std::move(names)) {}

  HostCopy numbers_;  // the norm, the index of the first gradient that is not finite, the loss
  double grad_scale_;
  std::vector<std::string> names_;  // of the parameters with a gradient
};

// The first of the tensors that holds NaN or infinity; "" if all values are finite. Integers are skipped.
std::string first_nonfinite(const std::vector<NamedTensor>& tensors);

// AdamW with decoupled decay (Loshchilov and Hutter 2019) and clipping by the global norm. Gradients are multiplied by
// min(1, max_grad_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.
//
// Weights are updated in float32 (float64 for float64). For a bfloat16 or float16 parameter the optimiser keeps a
// float32 master copy, accumulates its gradient in float32 and writes the rounded weight back.
class AdamW {
 public:
  // The parameters must be leaves that require a gradient and are dense; master copies start from their present values.
  AdamW(std::vector<NamedTensor> parameters, const AdamWOptions& options);

  // One update from the gradients of the parameters; a parameter without a gradient is left alone. If the global norm is
  // not finite, weights, moments and step count stay bitwise as they are: the device decides, and the host learns of it from the
  // result. Returns as soon as the work is handed to the device.
  PendingUpdate start_update(const UpdateArgs& args);
  UpdateResult update(const UpdateArgs& args) { return start_update(args).result(); }

  // start_update() in its parts, for a step whose device work is recorded (kernels/runtime/work_graph.h): the numbers that change
  // from step to step, the work, and its result on the way to the host. `loss` as in UpdateArgs.
  void set_rates(double learning_rate, double grad_scale);
  void issue_update(double max_grad_norm, const Tensor& loss);
  PendingUpdate pending_update() const { return {numbers_, grad_scale_, updated_}; }

  void zero_grad() const;
  // Has the parameters count as written (Tensor::version): by an update that a recorded step does, unseen by the host.
  void count_versions() const;
  std::int64_t updates() const;  // applied so far: t of the bias correction
  // "weight decay 0.1: 18 tensors, 800000 parameters; no decay: 26 tensors, 5376 parameters"
  std::string describe_groups() const;

  // Everything a resumed run needs, as handles on the live tensors: exp_avg.NAME, exp_avg_sq.NAME, master.NAME (of
  // half-precision parameters) and step.
  std::vector<NamedTensor> state() const;

 private:
  struct Slot {
    std::string name;
    Tensor parameter;
    Tensor master;  // the parameter itself unless it is half precision
    Tensor exp_avg;
    Tensor exp_avg_sq;
    double weight_decay;
    double rate_scale;

    bool has_master() const { return master.impl_ptr() != parameter.impl_ptr(); }
  };

  AdamWOptions options_;
  std::vector<Slot> slots_;
  double grad_scale_ = 1;             // of the last update
  std::vector<std::string> updated_;  // the parameters it had gradients of
  Tensor step_;     // int64 []
  Tensor rates_;    // float64 [2]: learning rate and gradient scale of the update
  Tensor numbers_;  // float64 [3]: what PendingUpdate reads
};

}  // namespace heddle::nn
