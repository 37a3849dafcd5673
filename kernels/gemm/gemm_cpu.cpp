#include <algorithm>
#include <array>
#include <type_traits>

#include "kernels/elementwise/elementwise.h"
#include "kernels/gemm/block_cpu.h"
#include "kernels/gemm/gemm.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/parallel.h"

namespace heddle::cpu {
namespace {

// Note: Cache blocks
// Columns of B are copied kPanel together, so that the innermost loop reads them in one stream. A panel of kTerms terms (16 KB of
// float) stays in L1 while rows of A pass, kRows rows of A (96 KB) stay in L2 while panels pass, and kColumns columns of B are
// copied at a time. Half and twice these numbers make no difference beyond the noise (NOTES.md).
constexpr std::int64_t kTerms = 256;
constexpr std::int64_t kRows = 16 * kBlockRows;
constexpr std::int64_t kColumns = 512;
template <typename A>
constexpr std::int64_t kPanel = kBlockVectors * Lanes<A>::count;

template <typename E>
struct Matrix {
  E* data = nullptr;
  std::int64_t rows = 0, cols = 0;
  std::int64_t row_stride = 0, col_stride = 0;

  E* at(std::int64_t i, std::int64_t j) const { return data + i * row_stride + j * col_stride; }
  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride}; }
  Matrix block(std::int64_t row, std::int64_t height, std::int64_t col, std::int64_t width) const {
    return {data == nullptr ? nullptr : at(row, col), height, width, row_stride, col_stride};
  }
};

// c = scale a b + bias or c += scale a b, with operands of storage type E, computed in A. The bias, if any, is repeated to c's shape.
template <typename E, typename A>
struct Product {
  Matrix<const E> a, b, bias;
  Matrix<A> c;
  Write write;
  A scale;

  Product transposed() const { return {b.transposed(), a.transposed(), bias.transposed(), c.transposed(), write, scale}; }
  Product rows(std::int64_t from, std::int64_t to) const {
    return {a.block(from, to - from, 0, a.cols), b, bias.block(from, to - from, 0, c.cols), c.block(from, to - from, 0, c.cols), write, scale};
  }
};

template <std::int64_t count, typename E, typename A>
void copy_run(const E* __restrict from, A* __restrict to, A scale = 1) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = scale * static_cast<A>(from[i]);
}

// Copies scale * b to panels: panel p holds the columns from p * kPanel on, [b.rows, kPanel], the last one filled up with zeros.
template <typename E, typename A>
void pack_columns(const Matrix<const E>& b, A scale, A* panel) {
  constexpr std::int64_t kWidth = kPanel<A>;
  for (std::int64_t j = 0; j < b.cols; j += kWidth, panel += b.rows * kWidth) {
    const std::int64_t used = std::min(kWidth, b.cols - j);
    if (used == kWidth && b.col_stride == 1) {
      for (std::int64_t t = 0; t < b.rows; ++t) copy_run<kWidth>(b.at(t, j), panel + t * kWidth, scale);
      continue;
    }
    if (used < kWidth) std::fill(panel, panel + b.rows * kWidth, A(0));
    for (std::int64_t l = 0; l < used; ++l)
      for (std::int64_t t = 0; t < b.rows; ++t) panel[t * kWidth + l] = scale * static_cast<A>(*b.at(t, j + l));
  }
}

// Copies a to blocks of kBlockRows rows, each [a.cols, kBlockRows]; the rows missing from the last one are not written. A few
// terms of all blocks at a time: both the cache lines read and those written are then used whole while they stay.
template <typename E, typename A>
void pack_rows(const Matrix<const E>& a, A* blocks) {
  constexpr std::int64_t kTogether = 16;
  for (std::int64_t first = 0; first < a.cols; first += kTogether) {
    const std::int64_t last = std::min(first + kTogether, a.cols);
    for (std::int64_t i = 0; i < a.rows; i += kBlockRows) {
      A* block = blocks + i * a.cols;
      const std::int64_t used = std::min<std::int64_t>(kBlockRows, a.rows - i);
      if (used == kBlockRows && a.row_stride == 1)
        for (std::int64_t t = first; t < last; ++t) copy_run<kBlockRows>(a.at(i, t), block + t * kBlockRows);
      else
        for (std::int64_t t = first; t < last; ++t)
          for (std::int64_t l = 0; l < used; ++l) block[t * kBlockRows + l] = static_cast<A>(*a.at(i + l, t));
    }
  }
}

constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Blocks of both operands, copied: what one thread needs for a product of [M, K] and [K, N]. The panels of columns come first, so
// that they begin where cache lines do.
template <typename A>
struct Scratch {
  std::int64_t M, N, K;
  A* data = nullptr;

  std::int64_t terms() const { return std::min(kTerms, K); }
  std::int64_t columns_size() const { return round_up(std::min(kColumns, N), kPanel<A>) * terms(); }
  std::int64_t rows_size() const { return round_up(round_up(std::min(kRows, M), kBlockRows) * terms(), kPanel<A>); }
  std::int64_t size() const { return columns_size() + rows_size(); }

  A* columns() const { return data; }
  A* rows() const { return data + columns_size(); }
};

// One block of c, at most kBlockRows x kPanel, from a panel of b.
template <typename A>
void multiply_tile(const Matrix<A>& c, Write write, LeftOperand<A> a, const A* panel, std::int64_t terms) {
  constexpr std::int64_t kWidth = kPanel<A>;
  if (c.cols == kWidth) return multiply_rows<kBlockVectors>(c.rows, write, c.data, c.row_stride, a, panel, kWidth, terms);
  std::array<A, kBlockRows * kWidth> whole;
  multiply_rows<kBlockVectors>(c.rows, Write::assign, whole.data(), kWidth, a, panel, kWidth, terms);
  for (std::int64_t i = 0; i < c.rows; ++i)
    for (std::int64_t j = 0; j < c.cols; ++j) {
      const A before = write == Write::accumulate ? *c.at(i, j) : A(0);
      *c.at(i, j) = before + whole[static_cast<std::size_t>(i * kWidth + j)];
    }
}

template <typename E, typename A>
void copy_bias(const Matrix<const E>& bias, const Matrix<A>& c) {
  for (std::int64_t i = 0; i < c.rows; ++i) {
    if (bias.col_stride == 1 && c.col_stride == 1)
      for (std::int64_t j = 0; j < c.cols; ++j) c.at(i, 0)[j] = static_cast<A>(bias.at(i, 0)[j]);
    else
      for (std::int64_t j = 0; j < c.cols; ++j) *c.at(i, j) = static_cast<A>(*bias.at(i, j));
  }
}

// The columns [j, j + width) of c and the terms [t, t + terms).
template <typename E, typename A>
void multiply_columns(const Product<E, A>& p, std::int64_t j, std::int64_t width, std::int64_t t, std::int64_t terms,
                      const Scratch<A>& scratch) {
  const bool adds_bias = t == 0 && p.bias.data != nullptr;
  const Write write = t == 0 && !adds_bias ? p.write : Write::accumulate;
  pack_columns(p.b.block(t, terms, j, width), p.scale, scratch.columns());
  for (std::int64_t i = 0; i < p.c.rows; i += kRows) {
    const std::int64_t height = std::min(kRows, p.c.rows - i);
    const Matrix<const E> a = p.a.block(i, height, t, terms);
    // Rows whose terms lie side by side are read where they are.
    const bool in_place = std::is_same_v<E, A> && a.col_stride == 1;
    if (!in_place) pack_rows(a, scratch.rows());
    for (std::int64_t l = 0; l < width; l += kPanel<A>)
      for (std::int64_t r = 0; r < height; r += kBlockRows) {
        const std::int64_t tile_rows = std::min<std::int64_t>(kBlockRows, height - r), tile_cols = std::min(kPanel<A>, width - l);
        const Matrix<A> c = p.c.block(i + r, tile_rows, j + l, tile_cols);
        LeftOperand<A> left = {scratch.rows() + r * terms, 1, kBlockRows};
        if constexpr (std::is_same_v<E, A>)
          if (in_place) left = {a.at(r, 0), a.row_stride, 1};
        if (adds_bias) copy_bias(p.bias.block(i + r, tile_rows, j + l, tile_cols), c);
        multiply_tile(c, write, left, scratch.columns() + l * terms, terms);
      }
  }
}

// On one thread; the columns of c lie side by side.
template <typename E, typename A>
void multiply(const Product<E, A>& p, const Scratch<A>& scratch) {
  for (std::int64_t j = 0; j < p.c.cols; j += kColumns) {
    std::int64_t t = 0;
    do {  // once even without terms
      multiply_columns(p, j, std::min(kColumns, p.c.cols - j), t, std::min(kTerms, p.a.cols - t), scratch);
      t += kTerms;
    } while (t < p.a.cols);
  }
}

// Sum of x[i] y[i] in four vectors of partial sums.
template <typename A>
A dot(const A* x, const A* y, std::int64_t n) {
  using V = typename Lanes<A>::type;
  constexpr std::int64_t kLanes = Lanes<A>::count;
  constexpr int kVectors = 4;
  V sums[kVectors] = {};
  std::int64_t i = 0;
  for (; i + kVectors * kLanes <= n; i += kVectors * kLanes)
    for (int v = 0; v < kVectors; ++v)
      sums[v] += *reinterpret_cast<const V*>(x + i + v * kLanes) * *reinterpret_cast<const V*>(y + i + v * kLanes);
  const V sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  A total = 0;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) total += sum[lane];
  for (; i < n; ++i) total += x[i] * y[i];
  return total;
}

// Too few columns of c to repay the copies, and operands whose terms are runs in memory: one sum an element.
constexpr std::int64_t kFewColumns = 8;
template <typename E, typename A>
bool has_few_columns(const Product<E, A>& p) {
  return std::is_same_v<E, A> && p.c.cols <= kFewColumns && p.a.col_stride == 1 && p.b.row_stride == 1;
}
template <typename A>
void multiply_few_columns(const Product<A, A>& p) {
  for (std::int64_t i = 0; i < p.c.rows; ++i)
    for (std::int64_t j = 0; j < p.c.cols; ++j) {
      A before = A(0);
      if (p.bias.data != nullptr) before = *p.bias.at(i, j);
      else if (p.write == Write::accumulate) before = *p.c.at(i, j);
      *p.c.at(i, j) = before + p.scale * dot(p.a.at(i, 0), p.b.at(0, j), p.a.cols);
    }
}

// The product itself, or its transpose where that has few columns or is the one whose rows are runs in memory.
template <typename E, typename A>
Product<E, A> oriented(const Product<E, A>& p) {
  if (has_few_columns(p)) return p;
  const bool turns = has_few_columns(p.transposed()) || (p.c.col_stride != 1 && p.c.cols != 1);
  return turns ? p.transposed() : p;
}

template <typename E, typename View>
Matrix<E> matrix_of(const View& view, std::int64_t batch) {
  const int rank = view.shape.rank();
  std::int64_t offset = 0;
  for (int d = rank - 3; d >= 0; --d) {
    offset += batch % view.shape[d] * view.strides[d];
    batch /= view.shape[d];
  }
  return {view.template as<std::remove_const_t<E>>() + offset, view.shape[rank - 2], view.shape[rank - 1], view.strides[rank - 2],
          view.strides[rank - 1]};
}

template <typename E, typename A>
Product<E, A> product_of(const GemmArgs& args, const MutView& c, std::int64_t batch) {
  Product<E, A> p = {matrix_of<const E>(args.a, batch), matrix_of<const E>(args.b, batch), {}, matrix_of<A>(c, batch), args.write,
                     static_cast<A>(args.scale)};
  if (args.bias.defined()) p.bias = {args.bias.as<E>(), p.c.rows, p.c.cols, 0, args.bias.strides[0]};
  return oriented(p);
}

// Multiply-adds worth a thread: some 7 microseconds.
constexpr std::int64_t kMinWork = std::int64_t{1} << 18;

// The products of operands of type E into c, which is of type A. Work is cut over threads along the longer side of a matrix,
// into whole blocks or panels; every element is summed in the same order wherever the cuts are.
template <typename E, typename A>
void gemm_typed(const GemmArgs& args, const MutView& c) {
  const Product<E, A> first = product_of<E, A>(args, c, 0);
  const std::int64_t M = first.c.rows, N = first.c.cols, K = first.a.cols, batches = c.numel() / (M * N);
  const bool cuts_rows = M >= N;
  const std::int64_t side = cuts_rows ? M : N, unit = cuts_rows ? kBlockRows : kPanel<A>;
  const std::int64_t units = (side + unit - 1) / unit;
  const std::int64_t threads = std::min<std::int64_t>(num_threads(), 1 + batches * M * N * K / kMinWork);
  const std::int64_t cuts = std::clamp<std::int64_t>((threads + batches - 1) / batches, 1, units);
  const std::int64_t scratch_size = has_few_columns(first) ? 0 : Scratch<A>{M, N, K}.size();
  const Buffer memory(num_threads() * scratch_size * static_cast<std::int64_t>(sizeof(A)), kCpu);
  parallel_for(batches * cuts, (batches * cuts + threads - 1) / threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch<A> scratch = {M, N, K, static_cast<A*>(memory.data()) + thread_index() * scratch_size};
    for (std::int64_t task = begin; task < end; ++task) {
      Product<E, A> p = product_of<E, A>(args, c, task / cuts);
      const std::int64_t cut = task % cuts;
      const std::int64_t from = units * cut / cuts * unit, to = std::min(units * (cut + 1) / cuts * unit, side);
      p = cuts_rows ? p.rows(from, to) : p.transposed().rows(from, to).transposed();
      if constexpr (std::is_same_v<E, A>)
        if (has_few_columns(first)) {
          multiply_few_columns(p);
          continue;
        }
      multiply(p, scratch);
    }
  });
}

// Into a 16-bit c: computed in float and rounded once.
template <typename E>
void gemm_rounded(const GemmArgs& args, const ExecContext& ctx) {
  const Buffer memory(args.c.numel() * 4, kCpu);
  const MutView wide = {memory.data(), DType::f32, kCpu, args.c.shape, contiguous_strides(args.c.shape)};
  GemmArgs product = args;
  product.write = Write::assign;
  gemm_typed<E, float>(product, wide);
  heddle::copy({.source = wide, .out = args.c, .write = args.write}, ctx);
}

}  // namespace

void gemm(const GemmArgs& args, const ExecContext& ctx) {
  HEDDLE_CHECK(is_floating(args.a.dtype) && (args.c.dtype == args.a.dtype || args.a.dtype != DType::f64), "gemm: no product of ",
               args.a.dtype, " into ", args.c.dtype, "; cast the operands first");
  dispatch_float(args.a.dtype, "gemm", [&]<typename E>(std::type_identity<E>) {
    using A = accumulate_t<E>;
    if (args.c.dtype == dtype_of<A>()) gemm_typed<E, A>(args, args.c);
    else if constexpr (!std::is_same_v<E, A>) gemm_rounded<E>(args, ctx);
  });
}

}  // namespace heddle::cpu
