#pragma once

#include <cstdint>

#include "kernels/attention/mma_sm80.cuh"

// A matrix of 16-bit elements in shared memory, in the layout that ldmatrix reads without bank conflicts.

namespace heddle::cuda::sm80 {

// Pages of 64 (or 32) columns lie one after the other; in a page, rows of 128 (64) bytes follow each other. The 16-byte chunks
// of a row are permuted by the row's number, so that the same chunk of 8 neighbouring rows lies in 8 different bank groups.
template <int kRows_, int kColumns_>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPageColumns = kColumns % 128 == 0 || kColumns == 64 ? 64 : 32;
  static constexpr int kRowBytes = kPageColumns * 2;
  static constexpr int kPageBytes = kRows * kRowBytes;
  static constexpr int kBytes = kRows * kColumns * 2;
  static_assert(kColumns % kPageColumns == 0 && kRows % 16 == 0);

  __device__ __forceinline__ static int permutation(int row) { return kPageColumns == 64 ? row & 7 : row >> 1 & 3; }

  // Where the element is, in bytes from the start.
  __device__ __forceinline__ static int offset(int row, int column) {
    const int chunk = column % kPageColumns / 8 ^ permutation(row);
    return column / kPageColumns * kPageBytes + row * kRowBytes + chunk * 16 + column % 8 * 2;
  }
};

// One lane's place in a tile, from which other rows and columns are reached with constants only: the permutation repeats after
// 8 rows and is an exclusive or on the chunk. `row` is a multiple of 8. `column` is a multiple of 8 that sets only bits which are
// 0 in the column where the cursor starts, its part inside the page that is.
template <typename Tile>
struct Cursor {
  std::uint32_t start;

  __device__ __forceinline__ std::uint32_t at(int row, int column) const {
    return (start ^ (column % Tile::kPageColumns * 2)) + column / Tile::kPageColumns * Tile::kPageBytes + row * Tile::kRowBytes;
  }
};

// Lanes 0-7 and 8-15 at the rows 0-7 and 8-15, lanes 16-31 the same 8 columns further: the matrices of a left operand stored
// [row][depth], and of a right operand stored [depth][column].
template <typename Tile>
__device__ __forceinline__ Cursor<Tile> rows_first(std::uint32_t base, int row, int column) {
  const int lane = threadIdx.x % kWarp;
  return {base + Tile::offset(row + lane % 16, column + lane / 16 * 8)};
}
// Lanes 8-15 are 8 columns further, lanes 16-31 8 rows: a right operand stored [column][depth], a left one stored [depth][row].
template <typename Tile>
__device__ __forceinline__ Cursor<Tile> columns_first(std::uint32_t base, int row, int column) {
  const int lane = threadIdx.x % kWarp;
  return {base + Tile::offset(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8)};
}
// Where a lane's elements of a result belong (Note: Fragments).
template <typename Tile>
__device__ __forceinline__ Cursor<Tile> result(std::uint32_t base, int row, int column) {
  const int lane = threadIdx.x % kWarp;
  return {base + Tile::offset(row + lane / 4, column + lane % 4 * 2)};
}

// Rows of a matrix in global memory, columns side by side.
template <typename T>
struct GlobalRows {
  T* data;
  std::int64_t stride;

  __device__ __forceinline__ T* row(int index) const { return data + index * stride; }
};

// Starts the copies of a tile by all kThreads threads. Rows outside [first, rows) and columns from `columns` (a multiple of 8)
// on become zero.
template <typename Tile, int kThreads, typename T>
__device__ __forceinline__ void load_tile(std::uint32_t to, const GlobalRows<const T>& from, int first, int rows, int columns) {
  constexpr int kChunks = Tile::kPageColumns / 8, kRowStep = kThreads / kChunks;
  static_assert(kRowStep % 8 == 0 && (Tile::kRows % kRowStep == 0 || Tile::kRows < kRowStep));
  const int thread_row = threadIdx.x / kChunks, column = threadIdx.x % kChunks * 8;
  const T* source = from.row(thread_row) + column;
  const Cursor<Tile> target{to + Tile::offset(thread_row, column)};
#pragma unroll
  for (int row = 0; row < Tile::kRows; row += kRowStep) {
    if (Tile::kRows < kRowStep && thread_row >= Tile::kRows) break;
#pragma unroll
    for (int page = 0; page < Tile::kColumns; page += Tile::kPageColumns)
      copy_16(target.at(row, page), source + page, thread_row + row >= first && thread_row + row < rows && page + column < columns);
    source += kRowStep * from.stride;
  }
}

// Writes kRows rows of a tile, from `first` on, to global memory, 16 bytes at a time, by kThreads threads of which this is number
// `thread`. Row 0 of the tile is row 0 of `to`; rows from `rows` on and columns from `columns` on are left out.
template <typename Tile, int kRows, int kThreads, typename T>
__device__ __forceinline__ void store_tile(std::uint32_t from, int first, int thread, const GlobalRows<T>& to, int rows, int columns) {
  constexpr int kChunks = Tile::kColumns / 8;
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int row = first + i / kChunks, column = i % kChunks * 8;
    if (row < rows && column < columns) *reinterpret_cast<uint4*>(to.row(row) + column) = load_shared_16(from + Tile::offset(row, column));
  }
}

// Note: Elements that are not finite
// A weight of 0 times a NaN or an infinity is a NaN, so such an element would reach rows that do not see its key. Tiles that
// have hidden pairs are searched for them: they become 0 in shared memory, and what they do to the rows that see them is added
// apart.
__device__ __forceinline__ std::uint32_t exponent_mask(__nv_bfloat16) { return 0x7F807F80u; }
__device__ __forceinline__ std::uint32_t exponent_mask(__half) { return 0x7C007C00u; }

// The sign bits of a pair's halves tell which are not finite: adding its lowest bit to an exponent of ones carries into the sign.
template <typename T>
__device__ __forceinline__ std::uint32_t not_finite(std::uint32_t pair) {
  constexpr std::uint32_t kSigns = 0x80008000u;
  const std::uint32_t mask = exponent_mask(T());
  return (pair & mask) + (mask & ~(mask << 1)) & kSigns;
}

// Whether a tile has an element that is not finite. Every thread of the block must call it, and gets the same answer.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ bool has_not_finite(std::uint32_t tile) {
  std::uint32_t found = 0;
  for (int at = threadIdx.x * 16; at < Tile::kBytes; at += kThreads * 16) {
    const uint4 chunk = load_shared_16(tile + at);
    found |= not_finite<T>(chunk.x) | not_finite<T>(chunk.y) | not_finite<T>(chunk.z) | not_finite<T>(chunk.w);
  }
  return __syncthreads_or(found != 0);
}

// Makes the elements that are not finite 0.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ void clear_not_finite(std::uint32_t tile) {
  for (int at = threadIdx.x * 4; at < Tile::kBytes; at += kThreads * 4) {
    const std::uint32_t pair = load_shared(tile + at);
    if (const std::uint32_t found = not_finite<T>(pair)) store_shared(tile + at, pair & ~((found >> 15) * 0xFFFFu));
  }
}

// Writes a warp's result times a factor as 16-bit elements.
template <typename T, typename Tile, int kM, int kN>
__device__ __forceinline__ void put_result(const Cursor<Tile>& to, const float (&sum)[kM][kN][4], float factor = 1.0f) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared(to.at(16 * i + 8 * half, 8 * j), pack(sum[i][j][2 * half] * factor, sum[i][j][2 * half + 1] * factor, T()));
}

}  // namespace heddle::cuda::sm80
