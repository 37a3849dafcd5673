#pragma once

#include "autograd/random.h"
#include "nn/module.h"

namespace heddle::nn {

// Rows of weight [count, size], drawn from N(0, initializer_range), looked up by integer id.
class Embedding final : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t size, double initializer_range, const ModuleOptions& options, Generator& generator);

  // ids int64 or int32 [...] -> [..., size]. An id outside [0, count) throws.
  Tensor forward(const Tensor& ids) const;
  const Tensor& weight() const { return weight_; }

 private:
  Tensor weight_;
};

}  // namespace heddle::nn
