#pragma once

#include <functional>

#include "autograd/tensor.h"
#include "kernels/runtime/context.h"

// What the bench commands share: how a piece of work is timed, the rate it is compared with, and what it runs on.

namespace heddle::examples {

// Seconds of one call with cold caches, over `runs` calls: median and quartiles.
struct Timing {
  double median = 0, low = 0, high = 0;
  int runs = 0;
  bool in_graph = false;
};

// Warms up, then times `work`, which must not wait for the device. Work below 50 us on a CUDA device runs inside a CUDA graph, where
// the host's launches do not show. runs = 0 takes what fits in a tenth of a second, 10 to 50.
Timing measure(const std::function<void()>& work, int runs, const ExecContext& ctx);

// FLOP/s of the best square matrix product: 4096 and 8192 wide on CUDA, 1024 on the CPU.
double gemm_ceiling(DType dtype, const ExecContext& ctx);

// Standard normal values at the price of one small table: the table over and over, each tensor from where the last one ended. Zeros or
// constants draw less power and come out faster.
class RandomTable {
 public:
  RandomTable(DType dtype, Device device);
  Tensor tensor(const Shape& shape);

 private:
  Tensor table_;
  std::int64_t position_ = 0;
};

}  // namespace heddle::examples
