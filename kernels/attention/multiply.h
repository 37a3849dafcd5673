#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention/tile.h"
#include "kernels/runtime/view.h"

// Small matrix products on tiles that sit in the cache. Eigen's packs both operands on every call, which at these sizes
// costs a quarter of the time (NOTES.md).
namespace heddle::cpu {

// One vector register's worth of T. GCC and Clang lower it to whatever the machine has.
template <typename T>
struct Lanes {
  typedef T type __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
  static constexpr std::int64_t count = 32 / sizeof(T);
};

// Columns of a tile are padded to whole vectors.
template <typename T>
std::int64_t padded_columns(std::int64_t columns) {
  return (columns + Lanes<T>::count - 1) / Lanes<T>::count * Lanes<T>::count;
}

// A left operand with any strides: a transposed one costs nothing, its elements are broadcast one by one.
template <typename T>
struct LeftOperand {
  const T* data;
  std::int64_t row;
  std::int64_t column;
};

// Twelve accumulators, two vectors of b and one broadcast fill the sixteen registers of AVX2.
inline constexpr int kBlockRows = 6;
inline constexpr int kBlockVectors = 2;

// c[i, j] (+)= sum over terms of a[i, t] b[t, j] for Rows rows and Vectors vectors of columns, with c held in registers.
template <int Rows, int Vectors, typename T>
void multiply_block(Write write, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, Span terms) {
  using V = typename Lanes<T>::type;
  constexpr std::int64_t kLanes = Lanes<T>::count;
  V sum[Rows][Vectors] = {};
  if (write == Write::accumulate) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) sum[i][j] = *reinterpret_cast<const V*>(c + i * ldc + j * kLanes);
  }
  for (std::int64_t t = terms.begin; t < terms.end; ++t) {
    V row[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) row[j] = *reinterpret_cast<const V*>(b + t * ldb + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const T factor = a.data[i * a.row + t * a.column];
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) sum[i][j] += factor * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) *reinterpret_cast<V*>(c + i * ldc + j * kLanes) = sum[i][j];
}

template <int Vectors, typename T>
void multiply_rows(std::int64_t rows, Write write, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb,
                   Span terms) {
  switch (rows) {
    case 1: return multiply_block<1, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 2: return multiply_block<2, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 3: return multiply_block<3, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 4: return multiply_block<4, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 5: return multiply_block<5, Vectors>(write, c, ldc, a, b, ldb, terms);
    default: return multiply_block<kBlockRows, Vectors>(write, c, ldc, a, b, ldb, terms);
  }
}

// One panel of columns: see multiply.
template <int Vectors, typename T, typename TermsOf>
void multiply_panel(Write write, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, Span rows,
                    const TermsOf& terms_of) {
  for (std::int64_t i = rows.begin; i < rows.end; i += kBlockRows) {
    const std::int64_t count = std::min<std::int64_t>(kBlockRows, rows.end - i);
    const LeftOperand<T> block{a.data + i * a.row, a.row, a.column};
    const Span first = terms_of(i), last = terms_of(i + count - 1);
    // What every row of the block sums over, then what is left of each.
    const Span common{std::max(first.begin, last.begin), std::min(first.end, last.end)};
    multiply_rows<Vectors>(count, write, c + i * ldc, ldc, block, b, ldb, common);
    if (first == last) continue;
    for (std::int64_t r = 0; r < count; ++r) {
      const LeftOperand<T> one{block.data + r * a.row, a.row, a.column};
      const Span own = terms_of(i + r);
      const Span before{own.begin, std::clamp(common.begin, own.begin, own.end)};
      const Span after{std::max(before.end, common.end), own.end};
      multiply_block<1, Vectors>(Write::accumulate, c + (i + r) * ldc, ldc, one, b, ldb, before);
      multiply_block<1, Vectors>(Write::accumulate, c + (i + r) * ldc, ldc, one, b, ldb, after);
    }
  }
}

// c[i, j] (+)= sum over t in terms_of(i) of a[i, t] b[t, j]. The columns, n of them, are whole vectors, taken a panel at
// a time; rows_of(columns) are the rows that a panel needs. terms_of(i) is a Span whose ends never decrease with i;
// terms outside it are not read: see Note: Visible ranges.
template <typename T, typename RowsOf, typename TermsOf>
void multiply(Write write, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, std::int64_t n,
              const RowsOf& rows_of, const TermsOf& terms_of) {
  constexpr std::int64_t kLanes = Lanes<T>::count, kPanel = kBlockVectors * kLanes;
  std::int64_t j = 0;
  for (; j + kPanel <= n; j += kPanel)
    multiply_panel<kBlockVectors>(write, c + j, ldc, a, b + j, ldb, rows_of(Span{j, j + kPanel}), terms_of);
  for (; j < n; j += kLanes) multiply_panel<1>(write, c + j, ldc, a, b + j, ldb, rows_of(Span{j, j + kLanes}), terms_of);
}

// The scores' product, c = a b over all K terms, where only the rows rows_of(columns) of a panel are needed.
template <typename T, typename RowsOf>
void multiply_scores(T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, std::int64_t n, std::int64_t K,
                     const RowsOf& rows_of) {
  multiply(Write::assign, c, ldc, a, b, ldb, n, rows_of, [K](std::int64_t) { return Span{0, K}; });
}

// The product with probabilities, c += a b, where row i sums over the visible terms_of(i) only.
template <typename T, typename TermsOf>
void multiply_visible(T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, std::int64_t m, std::int64_t n,
                      const TermsOf& terms_of) {
  multiply(Write::accumulate, c, ldc, a, b, ldb, n, [m](Span) { return Span{0, m}; }, terms_of);
}

}  // namespace heddle::cpu
