#pragma once

#include <cstdint>

#include "kernels/runtime/view.h"

// The innermost step of every matrix product on the CPU: one block of the result, held in registers.
namespace heddle::cpu {

// One vector register's worth of T. GCC and Clang lower it to whatever the machine has.
template <typename T>
struct Lanes {
  typedef T type __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
  static constexpr std::int64_t count = 32 / sizeof(T);
};

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

// c[i, j] (+)= sum over t in [0, terms) of a[i, t] b[t, j] for Rows rows and Vectors vectors of columns. Terms are added
// in order, from zero, and their sum to c at the end.
template <int Rows, int Vectors, typename T>
void multiply_block(Write write, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb, std::int64_t terms) {
  using V = typename Lanes<T>::type;
  constexpr std::int64_t kLanes = Lanes<T>::count;
  V sum[Rows][Vectors] = {};
  for (std::int64_t t = 0; t < terms; ++t) {
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
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      V& out = *reinterpret_cast<V*>(c + i * ldc + j * kLanes);
      out = write == Write::accumulate ? out + sum[i][j] : sum[i][j];
    }
  }
}

// The same for 1 to kBlockRows rows.
template <int Vectors, typename T>
void multiply_rows(std::int64_t rows, Write write, T* c, std::int64_t ldc, LeftOperand<T> a, const T* b, std::int64_t ldb,
                   std::int64_t terms) {
  switch (rows) {
    case 1: return multiply_block<1, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 2: return multiply_block<2, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 3: return multiply_block<3, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 4: return multiply_block<4, Vectors>(write, c, ldc, a, b, ldb, terms);
    case 5: return multiply_block<5, Vectors>(write, c, ldc, a, b, ldb, terms);
    default: return multiply_block<kBlockRows, Vectors>(write, c, ldc, a, b, ldb, terms);
  }
}

}  // namespace heddle::cpu
