#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention/tile.h"
#include "kernels/gemm/block_cpu.h"

// Small matrix products on tiles that sit in the cache, of which only the visible part is computed.
namespace heddle::cpu {

// Columns of a tile are padded to whole vectors.
template <typename T>
std::int64_t padded_columns(std::int64_t columns) {
  return (columns + Lanes<T>::count - 1) / Lanes<T>::count * Lanes<T>::count;
}

// A block of rows over some of the terms.
template <int Vectors, typename T>
void multiply_terms(std::int64_t rows, Write write, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, Span terms) {
  const LeftOperand<T> left{a.data + terms.begin * a.column, a.row, a.column};
  multiply_rows<Vectors>(rows, write, c, ldc, left, b + terms.begin * ldb, ldb, terms.size());
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
    multiply_terms<Vectors>(count, write, c + i * ldc, ldc, block, b, ldb, common);
    if (first == last) continue;
    for (std::int64_t r = 0; r < count; ++r) {
      const LeftOperand<T> one{block.data + r * a.row, a.row, a.column};
      const Span own = terms_of(i + r);
      const Span before{own.begin, std::clamp(common.begin, own.begin, own.end)};
      const Span after{std::max(before.end, common.end), own.end};
      multiply_terms<Vectors>(1, Write::accumulate, c + (i + r) * ldc, ldc, one, b, ldb, before);
      multiply_terms<Vectors>(1, Write::accumulate, c + (i + r) * ldc, ldc, one, b, ldb, after);
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
