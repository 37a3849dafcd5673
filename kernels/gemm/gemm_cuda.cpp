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

// c = a b + bias or c += a b for a row-major c, one call for every run of evenly spaced matrices.
void multiply(const ConstView& a, const ConstView& b, const MutView& c, const ConstView& bias, Write write, const ExecContext& ctx) {
  const StridedLoop<3> batches(batch_part(c.shape), {batch_part(a.strides), batch_part(b.strides), batch_part(c.strides)});
  batches.walk(0, batches.shape.numel(), [&](const std::array<std::int64_t, 3>& at, std::int64_t count) {
    const void* a_data = address(a, at[0]);
    const void* b_data = address(b, at[1]);
    void* c_data = const_cast<void*>(address(c, at[2]));
    GemmKey key{.a = swapped_layout(b, batches.inner_stride(1)),
                .b = swapped_layout(a, batches.inner_stride(0)),
                .d = swapped_layout(c, batches.inner_stride(2)),
                .batches = count,
                .in = static_cast<std::int64_t>(a.dtype),
                .out = static_cast<std::int64_t>(c.dtype),
                .has_bias = bias.defined() ? 1 : 0,
                .accumulates = write == Write::accumulate ? 1 : 0,
                .allows_tf32 = ctx.allow_tf32 ? 1 : 0};
    key.a.alignment = alignment_of(b_data);
    key.b.alignment = alignment_of(a_data);
    key.d.alignment = alignment_of(c_data);
    run_gemm(key, b_data, a_data, c_data, bias.data, ctx);
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
  if (args.bias.defined() && (is_swapped || in == DType::f64)) {
    // The epilogue adds along rows of c, and not in float64. Elsewhere the bias is there first and the product is added to it, in
    // the type the sums are kept in.
    const Dense wide(args.c.shape, in == DType::f64 ? in : DType::f32, ctx);
    heddle::copy({.source = args.bias, .out = wide.view}, ctx);
    multiply(a.view(), b.view(), wide.view, {}, Write::accumulate, ctx);
    heddle::copy({.source = wide.view, .out = args.c}, ctx);
  } else if (is_swapped) {
    const ConstView turned = transposed(args.c);
    multiply(transposed(b.view()), transposed(a.view()), {const_cast<void*>(turned.data), out, turned.device, turned.shape, turned.strides}, {},
             args.write, ctx);
  } else {
    const EpilogueBias bias(args.bias, out, ctx);
    multiply(a.view(), b.view(), args.c, bias.view(), args.write, ctx);
  }
}

}  // namespace heddle::cuda
