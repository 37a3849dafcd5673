#include <Eigen/Core>
#include <algorithm>

#include "kernels/elementwise/elementwise.h"
#include "kernels/gemm/gemm.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/parallel.h"

namespace heddle::cpu {
namespace {

// One matrix of a batch with a unit stride along its rows or its columns.
template <typename A>
struct Matrix {
  A* data;
  std::int64_t rows, cols;
  std::int64_t row_stride, col_stride;

  // Either stride of a dimension of size 1 may be anything.
  bool is_row_major() const { return col_stride == 1 && (row_stride >= cols || rows == 1); }
  bool is_col_major() const { return row_stride == 1 && (col_stride >= rows || cols == 1); }
  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride}; }
  Matrix block_rows(std::int64_t begin, std::int64_t end) const {
    return {data + begin * row_stride, end - begin, cols, row_stride, col_stride};
  }
  Matrix block_cols(std::int64_t begin, std::int64_t end) const {
    return transposed().block_rows(begin, end).transposed();
  }
};

// Calls fn with an Eigen map in the layout of `m`.
template <typename A, typename Fn>
void with_map(const Matrix<A>& m, const Fn& fn) {
  using Scalar = std::remove_const_t<A>;
  using RowMajor = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using ColMajor = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
  using Row = std::conditional_t<std::is_const_v<A>, const RowMajor, RowMajor>;
  using Col = std::conditional_t<std::is_const_v<A>, const ColMajor, ColMajor>;
  if (m.is_row_major())
    fn(Eigen::Map<Row, 0, Eigen::OuterStride<>>(m.data, m.rows, m.cols, Eigen::OuterStride<>(std::max(m.row_stride, m.cols))));
  else
    fn(Eigen::Map<Col, 0, Eigen::OuterStride<>>(m.data, m.rows, m.cols, Eigen::OuterStride<>(std::max(m.col_stride, m.rows))));
}

// c = a b or c += a b on one thread; c is row-major.
template <typename A>
void multiply(const Matrix<const A>& a, const Matrix<const A>& b, const Matrix<A>& c, Write write) {
  using Out = Eigen::Matrix<A, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Eigen::Map<Out, 0, Eigen::OuterStride<>> out(c.data, c.rows, c.cols, Eigen::OuterStride<>(std::max(c.row_stride, c.cols)));
  with_map(a, [&](const auto& left) {
    with_map(b, [&](const auto& right) {
      if (write == Write::assign) out.noalias() = left * right;
      else out.noalias() += left * right;
    });
  });
}

template <typename A>
void add_bias(const Matrix<A>& c, const A* bias, std::int64_t bias_stride) {
  for (std::int64_t i = 0; i < c.rows; ++i)
    for (std::int64_t j = 0; j < c.cols; ++j) c.data[i * c.row_stride + j * c.col_stride] += bias[j * bias_stride];
}

// A batch of matrices in the type the product is computed in. Operands of another dtype, or without a unit stride, are
// copied to dense float memory first.
template <typename A>
class Operand {
 public:
  explicit Operand(const ConstView& view) : view_(view) {
    const int rank = view.shape.rank();
    const Matrix<const A> first = {nullptr, view.shape[rank - 2], view.shape[rank - 1], view.strides[rank - 2], view.strides[rank - 1]};
    if (view.dtype == dtype_of<A>() && (first.is_row_major() || first.is_col_major())) return;
    dense_ = Buffer(view.numel() * static_cast<std::int64_t>(sizeof(A)), kCpu);
    const MutView copied = {dense_.data(), dtype_of<A>(), kCpu, view.shape, contiguous_strides(view.shape)};
    heddle::copy({.source = view, .out = copied}, ExecContext{});
    view_ = copied;
  }

  Matrix<const A> matrix(std::int64_t batch) const {
    const int rank = view_.shape.rank();
    std::int64_t offset = 0;
    for (int d = rank - 3; d >= 0; --d) {
      offset += batch % view_.shape[d] * view_.strides[d];
      batch /= view_.shape[d];
    }
    return {view_.template as<A>() + offset, view_.shape[rank - 2], view_.shape[rank - 1], view_.strides[rank - 2],
            view_.strides[rank - 1]};
  }

 private:
  ConstView view_;
  Buffer dense_;
};

// Work is cut over threads along the longer side of C. 2^16 multiply-adds are worth a thread. A cut falls on a multiple of
// kPanel, three AVX-512 registers of float, which is what Eigen's kernel takes at a time: every element is then summed in
// the order it would have in the whole product, so the result does not depend on the number of threads.
constexpr std::int64_t kPanel = 48;
constexpr std::int64_t kMinWork = std::int64_t{1} << 16;

template <typename A>
void gemm_typed(const ConstView& a_view, const ConstView& b_view, const MutView& c_view, const ConstView& bias, Write write) {
  const Operand<A> a(a_view), b(b_view);
  const Operand<A> c(c_view);  // same dtype and a unit stride: never copied
  const int rank = c_view.shape.rank();
  const std::int64_t M = c_view.shape[rank - 2], N = c_view.shape[rank - 1], K = a_view.shape[rank - 1];
  const std::int64_t batches = c_view.numel() / (M * N);
  const bool cut_rows = M >= N;
  const std::int64_t side = cut_rows ? M : N;
  const std::int64_t threads = std::min<std::int64_t>(num_threads(), 1 + batches * M * N * K / kMinWork);
  const std::int64_t panels = std::max<std::int64_t>(1, side / kPanel);
  const std::int64_t cuts = std::clamp<std::int64_t>((threads + batches - 1) / batches, 1, panels);
  parallel_for(batches * cuts, threads == 1 ? batches * cuts : 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t batch = task / cuts, cut = task % cuts;
      const std::int64_t from = panels * cut / cuts * kPanel;
      const std::int64_t to = cut + 1 == cuts ? side : panels * (cut + 1) / cuts * kPanel;
      Matrix<const A> left = a.matrix(batch), right = b.matrix(batch);
      const Matrix<const A> whole = c.matrix(batch);
      Matrix<A> out = {const_cast<A*>(whole.data), M, N, whole.row_stride, whole.col_stride};
      if (cut_rows) left = left.block_rows(from, to), out = out.block_rows(from, to);
      else right = right.block_cols(from, to), out = out.block_cols(from, to);
      if (out.is_row_major()) multiply(left, right, out, write);
      else multiply(right.transposed(), left.transposed(), out.transposed(), write);
      if (bias.defined()) add_bias(out, bias.as<A>() + (cut_rows ? 0 : from) * bias.strides[0], bias.strides[0]);
    }
  });
}

// Computes in float and rounds once: for half inputs, or a float output of them.
void gemm_half(const GemmArgs& args, const ExecContext& ctx) {
  Buffer bias_memory;
  ConstView bias;
  if (args.bias.defined()) {
    bias_memory = Buffer(args.bias.numel() * 4, kCpu);
    const MutView wide = {bias_memory.data(), DType::f32, kCpu, args.bias.shape, {1}};
    heddle::copy({.source = args.bias, .out = wide}, ctx);
    bias = wide;
  }
  if (args.c.dtype == DType::f32) {
    gemm_typed<float>(args.a, args.b, args.c, bias, args.write);
    return;
  }
  const Buffer memory(args.c.numel() * 4, kCpu);
  const MutView wide = {memory.data(), DType::f32, kCpu, args.c.shape, contiguous_strides(args.c.shape)};
  gemm_typed<float>(args.a, args.b, wide, bias, Write::assign);
  heddle::copy({.source = wide, .out = args.c, .write = args.write}, ctx);
}

}  // namespace

void gemm(const GemmArgs& args, const ExecContext& ctx) {
  if (args.a.dtype == DType::f64 && args.c.dtype == DType::f64)
    gemm_typed<double>(args.a, args.b, args.c, args.bias, args.write);
  else if (args.a.dtype == DType::f32)
    gemm_typed<float>(args.a, args.b, args.c, args.bias, args.write);
  else if (args.a.dtype == DType::bf16 || args.a.dtype == DType::f16)
    gemm_half(args, ctx);
  else
    throw Error(concat_text("gemm: no product of ", args.a.dtype, " into ", args.c.dtype, "; cast the operands first"));
}

}  // namespace heddle::cpu
