#pragma once

#include "kernels/quantize/quant_gemm.h"

namespace heddle::cuda {

// Computes x w^T + bias by a kernel that decodes weights as it reads them, if there are few rows of x: up to 16 in bfloat16 and float16, up to 4
// in float32. Weights are not rounded to the dtype of x. Returns whether it did.
bool few_rows_product(const QuantGemmArgs& args, const ExecContext& ctx);

}  // namespace heddle::cuda
