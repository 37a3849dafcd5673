#pragma once

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// Element by element. Inputs broadcast to the shape of the output (NumPy's rule) and may have any strides, 0 included;
// all floating dtypes, computed in float32 (float64 for float64) and rounded once. An output may be the very same view
// as an input, but not overlap it otherwise.

namespace heddle {

// out = source, or out += source, converted to the dtype of out; any pair of dtypes. A non-zero value becomes true;
// a float becomes an integer by truncation. Conversions and sums of int64 are exact up to 2^53.
struct CopyArgs {
  ConstView source;
  MutView out;
  Write write = Write::assign;
};
void copy(const CopyArgs& args, const ExecContext& ctx);

// out = value, any dtype.
struct FillArgs {
  MutView out;
  double value = 0.0;
};
void fill(const FillArgs& args, const ExecContext& ctx);

enum class UnaryOp {
  neg,         // -x
  scale,       // parameter * x
  add_scalar,  // x + parameter
  pow,         // x ^ parameter
  exp,
  log,
  sqrt,
  relu,
  gelu,       // x * Phi(x), the exact form with erf. Hendrycks and Gimpel 2016.
  gelu_tanh,  // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), same paper
  silu,       // x * sigmoid(x)
};
struct UnaryArgs {
  UnaryOp op;
  ConstView x;
  MutView out;  // dtype of x
  double parameter = 0.0;
};
void unary(const UnaryArgs& args, const ExecContext& ctx);

// dx = dout * f'(x).
struct UnaryBackwardArgs {
  UnaryOp op;
  ConstView x;  // the input of the forward; for exp and sqrt its output
  ConstView dout;
  MutView dx;
  double parameter = 0.0;
};
void unary_backward(const UnaryBackwardArgs& args, const ExecContext& ctx);

enum class BinaryOp { add, sub, mul, div };
struct BinaryArgs {
  BinaryOp op;
  ConstView a;
  ConstView b;  // dtype of a
  MutView out;  // dtype of a
};
void binary(const BinaryArgs& args, const ExecContext& ctx);

// out = silu(gate) * up. Shazeer 2020, "GLU variants improve transformer".
struct SwigluArgs {
  ConstView gate;
  ConstView up;
  MutView out;
};
void swiglu(const SwigluArgs& args, const ExecContext& ctx);

struct SwigluBackwardArgs {
  ConstView gate;
  ConstView up;
  ConstView dout;
  MutView dgate;
  MutView dup;
};
void swiglu_backward(const SwigluBackwardArgs& args, const ExecContext& ctx);

// out = condition ? a : b. The branch not taken is never read into arithmetic, so its NaN does not leak.
struct SelectArgs {
  ConstView condition;  // bool
  ConstView a;
  ConstView b;
  MutView out;
};
void select(const SelectArgs& args, const ExecContext& ctx);

}  // namespace heddle
