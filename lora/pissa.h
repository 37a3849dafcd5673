#pragma once

#include "autograd/tensor.h"

namespace heddle::lora {

// The part of a matrix [out, in] that belongs to its r largest singular values, as scale * b a.
struct PrincipalPart {
  Tensor a;  // [r, in]  sqrt(S / scale) V^T, float64 on the CPU
  Tensor b;  // [out, r] U sqrt(S / scale)
};

// Halko, Martinsson and Tropp 2011: 32 rounds of subspace iteration on 2 r + 8 vectors from a fixed seed, then Jacobi's rotations. What is
// found is exact to rounding where the spectrum falls off behind 2 r + 8, and nearly the largest part of the matrix where it does not.
PrincipalPart principal_part(const Tensor& weight, std::int64_t r, double scale);

}  // namespace heddle::lora
