#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention/tile.h"

// Small matrix products on tiles that sit in the cache. Eigen's packs both operands on every call, which at these sizes
// costs a quarter of the time.
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

// c[0..Rows, 0..Vectors] += sum over terms of a[., t] b[t, .], with c held in registers.
template <int Rows, int Vectors, typename T>
void multiply_block(T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, Span terms) {
  using V = typename Lanes<T>::type;
  constexpr std::int64_t kLanes = Lanes<T>::count;
  V sum[Rows][Vectors];
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j) sum[i][j] = *reinterpret_cast<const V*>(c + i * ldc + j * kLanes);
  for (std::int64_t t = terms.begin; t < terms.end; ++t) {
    V row[Vectors];
    for (int j = 0; j < Vectors; ++j) row[j] = *reinterpret_cast<const V*>(b + t * ldb + j * kLanes);
    for (int i = 0; i < Rows; ++i) {
      const T factor = a.data[i * a.row + t * a.column];
      for (int j = 0; j < Vectors; ++j) sum[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j) *reinterpret_cast<V*>(c + i * ldc + j * kLanes) = sum[i][j];
}

// Twelve accumulators, two vectors of b and one broadcast fill the sixteen registers of AVX2.
inline constexpr int kBlockRows = 6;

template <int Vectors, typename T>
void multiply_rows(std::int64_t rows, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, Span terms) {
  switch (rows) {
    case 1: return multiply_block<1, Vectors>(c, ldc, a, b, ldb, terms);
    case 2: return multiply_block<2, Vectors>(c, ldc, a, b, ldb, terms);
    case 3: return multiply_block<3, Vectors>(c, ldc, a, b, ldb, terms);
    case 4: return multiply_block<4, Vectors>(c, ldc, a, b, ldb, terms);
    case 5: return multiply_block<5, Vectors>(c, ldc, a, b, ldb, terms);
    default: return multiply_block<kBlockRows, Vectors>(c, ldc, a, b, ldb, terms);
  }
}

// One panel of columns: see multiply_add.
template <int Vectors, typename T, typename TermsOf>
void multiply_panel(T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, std::int64_t m,
                    const TermsOf& terms_of) {
  for (std::int64_t i = 0; i < m; i += kBlockRows) {
    const std::int64_t rows = std::min<std::int64_t>(kBlockRows, m - i);
    const LeftOperand<T> block{a.data + i * a.row, a.row, a.column};
    const Span first = terms_of(i), last = terms_of(i + rows - 1);
    // What every row of the block sums over, then what is left of each.
    const Span common{std::max(first.begin, last.begin), std::min(first.end, last.end)};
    if (common.size() > 0) multiply_rows<Vectors>(rows, c + i * ldc, ldc, block, b, ldb, common);
    if (first == last) continue;
    for (std::int64_t r = 0; r < rows; ++r) {
      const LeftOperand<T> one{block.data + r * a.row, a.row, a.column};
      const Span own = terms_of(i + r);
      const std::int64_t split = std::clamp(common.begin, own.begin, own.end);
      multiply_block<1, Vectors>(c + (i + r) * ldc, ldc, one, b, ldb, {own.begin, split});
      multiply_block<1, Vectors>(c + (i + r) * ldc, ldc, one, b, ldb, {std::max(split, common.end), own.end});
    }
  }
}

// c[i, :] += sum over t in terms_of(i) of a[i, t] b[t, :], for i in [0, m); the columns n are whole vectors.
// terms_of(i) is a Span whose ends never decrease with i. Terms outside it are not read: see Note: Visible ranges.
template <typename T, typename TermsOf>
void multiply_add(T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, std::int64_t m, std::int64_t n,
                  const TermsOf& terms_of) {
  constexpr std::int64_t kLanes = Lanes<T>::count;
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) multiply_panel<2>(c + j, ldc, a, b + j, ldb, m, terms_of);
  if (j < n) multiply_panel<1>(c + j, ldc, a, b + j, ldb, m, terms_of);
}

}  // namespace heddle::cpu
