#pragma once

#include <cublasLt.h>

#include <cstdint>

#include "kernels/runtime/context.h"
#include "kernels/runtime/dtype.h"

namespace heddle::cuda {

// One matrix, or a batch of them a stride apart, as cuBLASLt sees it: column-major [rows, columns].
struct MatrixLayout {
  std::int64_t rows = 0, columns = 0;
  std::int64_t leading = 0;       // from one column to the next
  std::int64_t batch_stride = 0;  // 0 repeats a matrix
  std::int64_t is_transposed = 0;
  std::int64_t alignment = 0;  // of its address in bytes, up to 256
};

enum class Epilogue : std::int64_t {
  none,
  gelu,   // aux = scale a b + bias, d = gelu_tanh(aux)
  dgelu,  // d = scale a b * gelu_tanh'(aux)
};

// The scales of FP8 operands: float32, of a whole operand, of each row of what the caller holds by rows, or of blocks: in a 128 x 128, rows of
// ceil(terms / 128) of them padded to a multiple of 4; in b 128 terms of a row, at [terms / 128, row].
enum class Fp8Scales : std::int64_t { none, tensor, row, block };
enum class Fp8Type : std::int64_t { e4m3, e5m2 };

// All that decides how a product is computed: d = scale a b + bias, or d += scale a b. Plain bytes without padding, so that two keys are equal
// exactly when their bytes are.
struct GemmKey {
  MatrixLayout a, b, d;
  std::int64_t batches = 1;
  std::int64_t in = 0, out = 0;  // DType
  std::int64_t has_bias = 0;
  std::int64_t accumulates = 0;
  std::int64_t allows_tf32 = 0;
  Epilogue epilogue = Epilogue::none;
  Fp8Scales fp8 = Fp8Scales::none;  // else a and b are of the types below, not both E5M2, and `in` names the dtype of bias
  Fp8Type a_type = Fp8Type::e4m3, b_type = Fp8Type::e4m3;
  std::int64_t is_precise = 0;  // FP8: sums are added up in float32 every few terms, not in the tensor cores alone
};
static_assert(sizeof(GemmKey) == 29 * sizeof(std::int64_t));

// Where the operands of one call are, and the factor of the product.
struct GemmPointers {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;  // [rows of d], of d's dtype, 16-byte aligned
  const void* aux = nullptr;   // laid out like d; written by Epilogue::gelu
  const void* a_scales = nullptr;
  const void* b_scales = nullptr;
  double scale = 1;
};

// Runs the product by the plan for its key; the plan is made, and the library's heuristic asked, the first time. Throws
// heddle::Error if cuBLASLt has no algorithm or refuses the call.
void run_gemm(const GemmKey& key, const GemmPointers& pointers, const ExecContext& ctx);

}  // namespace heddle::cuda
