#include "kernels/gemm/gemm.h"

#include "kernels/elementwise/elementwise.h"
#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

bool fuses_gelu([[maybe_unused]] const GemmArgs& args, [[maybe_unused]] const ExecContext& ctx) {
#if HEDDLE_WITH_CUDA
  return ctx.device.is_cuda() && cuda::gemm_fuses_gelu(args);
#else
  return false;
#endif
}

// The product, then the GELU over it.
void gemm_and_gelu(const GemmArgs& args, const ExecContext& ctx) {
  GemmArgs product = args;
  product.before_gelu = {};
  product.dgelu_at = {};
  if (args.before_gelu.defined()) {
    product.c = args.before_gelu;
    gemm(product, ctx);
    unary({.op = UnaryOp::gelu_tanh, .x = args.before_gelu, .out = args.c}, ctx);
  } else {
    gemm(product, ctx);
    unary_backward({.op = UnaryOp::gelu_tanh, .x = args.dgelu_at, .dout = args.c, .dx = args.c}, ctx);
  }
}

}  // namespace

void gemm(const GemmArgs& args, const ExecContext& ctx) {
  const auto& [a, b, c, bias, write, before_gelu, dgelu_at, scale] = args;
  const int rank = c.shape.rank();
  HEDDLE_CHECK(rank >= 2 && a.shape.rank() == rank && b.shape.rank() == rank, "gemm: ranks must be equal and at least 2, got ",
               a.shape, ", ", b.shape, " and ", c.shape);
  bool fits = a.shape[rank - 1] == b.shape[rank - 2] && a.shape[rank - 2] == c.shape[rank - 2] &&
              b.shape[rank - 1] == c.shape[rank - 1];
  for (int d = 0; d < rank - 2; ++d) fits = fits && a.shape[d] == c.shape[d] && b.shape[d] == c.shape[d];
  HEDDLE_CHECK(fits, "gemm: shapes ", a.shape, " x ", b.shape, " do not give ", c.shape);
  HEDDLE_CHECK(a.dtype == b.dtype && (c.dtype == a.dtype || c.dtype == DType::f32), "gemm: dtypes ", a.dtype, " x ", b.dtype,
               " -> ", c.dtype, " are not supported; inputs must be equal and the output theirs or float32");
  HEDDLE_CHECK(c.strides[rank - 1] == 1 || c.strides[rank - 2] == 1 || c.numel() <= 1, "gemm: the output needs a unit stride");
  if (bias.defined())
    HEDDLE_CHECK(bias.shape == Shape{c.shape.back()} && bias.dtype == a.dtype && write == Write::assign,
                 "gemm: bias must be ", a.dtype, " [", c.shape.back(), "] with an assigned output, got ", bias.dtype, " ",
                 bias.shape);
  if (before_gelu.defined() || dgelu_at.defined()) {
    const ConstView at = before_gelu.defined() ? ConstView(before_gelu) : dgelu_at;
    HEDDLE_CHECK(at.shape == c.shape && at.dtype == c.dtype && write == Write::assign &&
                     before_gelu.defined() != dgelu_at.defined() && !(dgelu_at.defined() && bias.defined()),
                 "gemm: the input of the GELU must be ", c.dtype, " ", c.shape, " like the assigned output, got ", at.dtype, " ", at.shape);
  }
  if (c.numel() == 0) return;
  if ((before_gelu.defined() || dgelu_at.defined()) && !fuses_gelu(args, ctx)) return gemm_and_gelu(args, ctx);
  HEDDLE_DISPATCH(ctx, gemm, args);
}

}  // namespace heddle
