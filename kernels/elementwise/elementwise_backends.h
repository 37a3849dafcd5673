#pragma once

#include "kernels/elementwise/elementwise.h"

// The same signatures on each device; elementwise.cpp checks the arguments and picks one.

namespace heddle::cpu {
void copy(const CopyArgs& args, const ExecContext& ctx);
void fill(const FillArgs& args, const ExecContext& ctx);
void unary(const UnaryArgs& args, const ExecContext& ctx);
void unary_backward(const UnaryBackwardArgs& args, const ExecContext& ctx);
void binary(const BinaryArgs& args, const ExecContext& ctx);
void swiglu(const SwigluArgs& args, const ExecContext& ctx);
void swiglu_backward(const SwigluBackwardArgs& args, const ExecContext& ctx);
void select(const SelectArgs& args, const ExecContext& ctx);
}  // namespace heddle::cpu

namespace heddle::cuda {
void copy(const CopyArgs& args, const ExecContext& ctx);
void fill(const FillArgs& args, const ExecContext& ctx);
void unary(const UnaryArgs& args, const ExecContext& ctx);
void unary_backward(const UnaryBackwardArgs& args, const ExecContext& ctx);
void binary(const BinaryArgs& args, const ExecContext& ctx);
void swiglu(const SwigluArgs& args, const ExecContext& ctx);
void swiglu_backward(const SwigluBackwardArgs& args, const ExecContext& ctx);
void select(const SelectArgs& args, const ExecContext& ctx);
}  // namespace heddle::cuda
