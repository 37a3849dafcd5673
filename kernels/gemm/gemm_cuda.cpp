#include <array>
#include <cstddef>
#include <optional>
#include <utility>

#include "kernels/elementwise/elementwise.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/plan_cuda.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/strided.h"

namespace heddle::cuda {
namespace {

// Either stride of a dimension of size 1 may be anything.
bool is_row_major(const ConstView& view) {
  const int rank = view.shape.rank();
  return (view.strides[rank - 1] == 1 || view.shape[rank - 1] == 1) && (view.strides[rank - 2] >= view.shape[rank - 1] || view.shape[rank - 2] == 1);
}

ConstView transposed(ConstView view) {
  const int rank = view.shape.rank();
  std::swap(view.shape[rank - 1], view.shape[rank - 2]);
  std::swap(view.strides[rank - 1], view.strides[rank - 2]);
  return view;
}

bool is_col_major(const ConstView& view) { return is_row_major(transposed(view)); }

// A dense tensor of one call, and the view of it.
struct Dense {
  Buffer memory;
  MutView view;

  Dense(const Shape& shape, DType dtype, const ExecContext& ctx)
      : memory(shape.numel() * static_cast<std::int64_t>(dtype_size(dtype)), ctx.device),
        view{memory.data(), dtype, ctx.device, shape, contiguous_strides(shape)} {}
};

// An operand whose matrices have a unit stride; copied if they have none.
class Operand {
 public:
  Operand(const ConstView& view, const ExecContext& ctx) : view_(view) {
    if (is_row_major(view) || is_col_major(view)) return;
    dense_.emplace(view.shape, view.dtype, ctx);
    heddle::copy({.source = view, .out = dense_->view}, ctx);
    view_ = dense_->view;
  }
  const ConstView& view() const { return view_; }

 private:
  ConstView view_;
  std::optional<Dense> dense_;
};

const void* address(const ConstView& view, std::int64_t offset) {
  return static_cast<const std::byte*>(view.data) + offset * static_cast<std::int64_t>(dtype_size(view.dtype));
}

std::int64_t alignment_of(const void* pointer) {
  const auto value = reinterpret_cast<std::uintptr_t>(pointer) | 256u;
  return static_cast<std::int64_t>(value & -value);
}

// Note: Row-major products
// cuBLASLt stores matrices by columns: what we hold as row-major [M, N] it sees as [N, M]. So it is asked for c^T = b^T a^T, its
// first operand being our b and its second our a, and nothing is moved. A column-major operand of ours is a transposed one of its.
// This is the only place in the project where rows and columns change places.
MatrixLayout swapped_layout(const ConstView& view, std::int64_t batch_stride) {
  const int rank = view.shape.rank();
  const std::int64_t rows = view.shape[rank - 2], columns = view.shape[rank - 1];
  if (is_row_major(view))
    return {.rows = columns, .columns = rows, .leading = rows == 1 ? columns : view.strides[rank - 2], .batch_stride = batch_stride};
  return {.rows = rows, .columns = columns, .leading = columns == 1 ? rows : view.strides[rank - 1], .batch_stride = batch_stride,
          .is_transposed = 1};
}

Shape batch_part(const Shape& values) {
  Shape batch;
  for (int d = 0; d + 2 < values.rank(); ++d) batch.push_back(values[d]);
  return batch;
}

// A product whose c is row-major, one call for every run of evenly spaced matrices.
void multiply(const GemmArgs& args, const ExecContext& ctx) {
  const auto& [a, b, c, bias, write, before_gelu, dgelu_at, scale] = args;
  const StridedLoop<3> batches(batch_part(c.shape), {batch_part(a.strides), batch_part(b.strides), batch_part(c.strides)});
  batches.walk(0, batches.shape.numel(), [&](const std::array<std::int64_t, 3>& at, std::int64_t count) {
    const GemmPointers pointers{.a = address(b, at[1]),
                                .b = address(a, at[0]),
                                .d = const_cast<void*>(address(c, at[2])),
                                .bias = bias.data,
                                .aux = before_gelu.defined() ? before_gelu.data : dgelu_at.data,
                                .scale = scale};
    GemmKey key{.a = swapped_layout(b, batches.inner_stride(1)),
                .b = swapped_layout(a, batches.inner_stride(0)),
                .d = swapped_layout(c, batches.inner_stride(2)),
                .batches = count,
                .in = static_cast<std::int64_t>(a.dtype),
                .out = static_cast<std::int64_t>(c.dtype),
                .has_bias = bias.defined() ? 1 : 0,
                .accumulates = write == Write::accumulate ? 1 : 0,
                .allows_tf32 = ctx.allow_tf32 ? 1 : 0};
    if (before_gelu.defined()) key.epilogue = Epilogue::gelu;
    if (dgelu_at.defined()) key.epilogue = Epilogue::dgelu;
    key.a.alignment = alignment_of(pointers.a);
    key.b.alignment = alignment_of(pointers.b);
    key.d.alignment = alignment_of(pointers.d);
    run_gemm(key, pointers, ctx);
  });
}

// A bias as the epilogue takes it: dense, aligned, of c's dtype.
class EpilogueBias {
 public:
  EpilogueBias(const ConstView& bias, DType dtype, const ExecContext& ctx) : view_(bias) {
    constexpr std::int64_t kAlignment = 16;
    if (!bias.defined() || (bias.is_contiguous() && bias.dtype == dtype && alignment_of(bias.data) >= kAlignment)) return;
    dense_.emplace(bias.shape, dtype, ctx);
    heddle::copy({.source = bias, .out = dense_->view}, ctx);
    view_ = dense_->view;
  }
  const ConstView& view() const { return view_; }

 private:
  ConstView view_;
  std::optional<Dense> dense_;
};

}  // namespace

// Dense half matrices whose rows start at multiples of 16 bytes, which is what the library's fused kernels are made for.
bool gemm_fuses_gelu(const GemmArgs& args) {
  const ConstView c = args.c, aux = args.before_gelu.defined() ? ConstView(args.before_gelu) : args.dgelu_at;
  const bool is_half = c.dtype == args.a.dtype && dtype_size(c.dtype) == 2;
  const auto is_aligned = [](const ConstView& view) { return view.is_contiguous() && alignment_of(view.data) >= 16; };
  return is_half && c.shape.rank() == 2 && c.shape[1] % 8 == 0 && args.a.shape[1] > 0 && is_aligned(c) && is_aligned(aux);
}

void gemm(const GemmArgs& args, const ExecContext& ctx) {
  const DType in = args.a.dtype, out = args.c.dtype;
  HEDDLE_CHECK(is_floating(in) && (out == in || in != DType::f64), "gemm: no product of ", in, " into ", out, "; cast the operands first");
  const int rank = args.c.shape.rank();
  if (args.a.shape[rank - 1] == 0) {  // a sum of no terms
    if (args.bias.defined()) heddle::copy({.source = args.bias, .out = args.c}, ctx);
    else if (args.write == Write::assign) heddle::fill({.out = args.c}, ctx);
    return;
  }
  const Operand a(args.a, ctx), b(args.b, ctx);
  const bool is_swapped = !is_row_major(args.c);
  GemmArgs product = args;
  product.a = a.view();
  product.b = b.view();
  if (args.bias.defined() && (is_swapped || in == DType::f64)) {
    // The epilogue adds along rows of c, and not in float64. Elsewhere the bias is there first and the product is added to it, in
    // the type the sums are kept in.
    const Dense wide(args.c.shape, in == DType::f64 ? in : DType::f32, ctx);
    heddle::copy({.source = args.bias, .out = wide.view}, ctx);
    product.c = wide.view;
    product.bias = {};
    product.write = Write::accumulate;
    multiply(product, ctx);
    heddle::copy({.source = wide.view, .out = args.c}, ctx);
  } else if (is_swapped) {
    const ConstView turned = transposed(args.c);
    product.a = transposed(b.view());
    product.b = transposed(a.view());
    product.c = {const_cast<void*>(turned.data), out, turned.device, turned.shape, turned.strides};
    multiply(product, ctx);
  } else {
    const EpilogueBias bias(args.bias, out, ctx);
    product.bias = bias.view();
    multiply(product, ctx);
  }
}

}  // namespace heddle::cuda
