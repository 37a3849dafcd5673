#pragma once

#include "autograd/tensor.h"

namespace heddle::lora {

// The part of a matrix [out, in] that belongs to its r largest singular values, as scale * b a.
struct PrincipalPart {
  Tensor a;  // [r, in]  sqrt(S / scale) V^T, float64 on the CPU
  Tensor b;  // [out, r] U sqrt(S / scale)
};

// Exact to rounding, as PEFT's: its A and B are made for the same rest of the weight. Rows of a and columns of b beyond the size of the
// matrix are zero.
PrincipalPart principal_part(const Tensor& weight, std::int64_t r, double scale);

}  // namespace heddle::lora
