#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention/multiply.h"
#include "kernels/runtime/view.h"

// Moving tiles between tensors of any stride and dtype and the dense, padded tiles that the products work on.
namespace heddle::cpu {

// Hands out consecutive 64-byte-aligned arrays of a workspace. Without one it only counts.
template <typename T>
class Arena {
 public:
  explicit Arena(T* base) : base_(base) {}

  T* take(std::int64_t count) {
    constexpr std::int64_t kAlign = 64 / sizeof(T);
    T* array = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count + kAlign - 1) / kAlign * kAlign;
    return array;
  }
  std::int64_t used() const { return used_; }

 private:
  T* base_;
  std::int64_t used_ = 0;
};

// One head of a [B, S, H, D] tensor: rows of D elements of storage type E.
template <typename E>
struct HeadRows {
  E* data;
  std::int64_t row;
  std::int64_t column;

  HeadRows at_row(std::int64_t index) const { return {data + index * row, row, column}; }
};

template <typename E>
HeadRows<const E> head_rows(const ConstView& view, std::int64_t b, std::int64_t h) {
  return {view.as<E>() + b * view.strides[0] + h * view.strides[2], view.strides[1], view.strides[3]};
}
template <typename E>
HeadRows<E> head_rows(const MutView& view, std::int64_t b, std::int64_t h) {
  return {view.as<E>() + b * view.strides[0] + h * view.strides[2], view.strides[1], view.strides[3]};
}

// tile[r, d] = factor * rows[r, d]; the columns from D to `padded` become zero. The loops above take tiles in order and
// rows are too far apart for the hardware to guess, so each row asks for the same row of the next tile (NOTES.md).
template <typename E, typename T>
void load_tile(HeadRows<E> rows, std::int64_t count, std::int64_t D, std::int64_t padded, T* tile, T factor = 1) {
  for (std::int64_t r = 0; r < count; ++r) {
    const auto* source = rows.data + r * rows.row;
    T* target = tile + r * padded;
    for (std::int64_t d = 0; d < D; d += 64 / sizeof(E)) __builtin_prefetch(source + count * rows.row + d);
    if (rows.column == 1)
      for (std::int64_t d = 0; d < D; ++d) target[d] = factor * static_cast<T>(source[d]);
    else
      for (std::int64_t d = 0; d < D; ++d) target[d] = factor * static_cast<T>(source[d * rows.column]);
    std::fill(target + D, target + padded, T{0});
  }
}

// tile[d, r] = rows[r, d]; the columns from `count` to the next multiple of a vector become zero. Rows are taken a vector
// at a time, so that their cache lines stay while the columns pass.
template <typename E, typename T>
void load_transposed(HeadRows<const E> rows, std::int64_t count, std::int64_t D, std::int64_t padded, T* tile) {
  constexpr std::int64_t kLanes = Lanes<T>::count;
  for (std::int64_t r = 0; r < count; r += kLanes) {
    const std::int64_t used = std::min(count - r, kLanes);
    for (std::int64_t d = 0; d < D; ++d) {
      const E* source = rows.data + r * rows.row + d * rows.column;
      typename Lanes<T>::type column = {};
      if (used == kLanes)
        for (std::int64_t l = 0; l < kLanes; ++l) column[l] = static_cast<T>(source[l * rows.row]);
      else
        for (std::int64_t l = 0; l < used; ++l) column[l] = static_cast<T>(source[l * rows.row]);
      *reinterpret_cast<typename Lanes<T>::type*>(tile + d * padded + r) = column;
    }
  }
}

// rows[r, d] = factor * tile[r, d]
template <typename E, typename T>
void store_tile(const T* tile, std::int64_t padded, std::int64_t count, std::int64_t D, HeadRows<E> rows, T factor = 1) {
  for (std::int64_t r = 0; r < count; ++r) {
    E* target = rows.data + r * rows.row;
    const T* source = tile + r * padded;
    if (rows.column == 1)
      for (std::int64_t d = 0; d < D; ++d) target[d] = static_cast<E>(factor * source[d]);
    else
      for (std::int64_t d = 0; d < D; ++d) target[d * rows.column] = static_cast<E>(factor * source[d]);
  }
}

}  // namespace heddle::cpu
