#include "nn/embedding.h"

#include "autograd/ops.h"

namespace heddle::nn {

Embedding::Embedding(std::int64_t count, std::int64_t size, double initializer_range, const ModuleOptions& options,
                     Generator& generator)
    : weight_(normal({count, size}, 0.0, initializer_range, generator, options.dtype, options.device)) {
  register_parameter("weight", weight_);
}

Tensor Embedding::forward(const Tensor& ids) const { return embedding(weight_, ids); }

}  // namespace heddle::nn
