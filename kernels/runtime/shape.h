#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>

#include "kernels/runtime/check.h"

namespace heddle {

inline constexpr int kMaxRank = 6;

// Up to kMaxRank int64 values held inline: a shape, or strides in elements. Rank 0 is a scalar.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> values) {
    for (std::int64_t value : values) push_back(value);
  }

  // `rank` copies of `value`.
  static Shape filled(int rank, std::int64_t value) {
    Shape shape;
    for (int i = 0; i < rank; ++i) shape.push_back(value);
    return shape;
  }

  int rank() const { return rank_; }
  std::int64_t operator[](int i) const { return values_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return values_[static_cast<std::size_t>(i)]; }
  std::int64_t back() const { return (*this)[rank_ - 1]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + rank_; }

  void push_back(std::int64_t value) {
    HEDDLE_CHECK(rank_ < kMaxRank, "shape: rank is limited to ", kMaxRank);
    values_[static_cast<std::size_t>(rank_++)] = value;
  }

  // Product of all values; 1 for a scalar.
  std::int64_t numel() const {
    std::int64_t product = 1;
    for (std::int64_t value : *this) product *= value;
    return product;
  }

  friend bool operator==(const Shape& a, const Shape& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

 private:
  std::array<std::int64_t, kMaxRank> values_{};
  int rank_ = 0;
};

// Prints "[2, 3]".
inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int i = 0; i < shape.rank(); ++i) out << (i > 0 ? ", " : "") << shape[i];
  return out << ']';
}

// Row-major strides of a dense tensor of this shape.
inline Shape contiguous_strides(const Shape& shape) {
  Shape strides = Shape::filled(shape.rank(), 1);
  for (int i = shape.rank() - 2; i >= 0; --i) strides[i] = strides[i + 1] * std::max<std::int64_t>(shape[i + 1], 1);
  return strides;
}

// Maps a dimension index in [-rank, rank) to [0, rank); `op` names the caller in the error.
inline int normalise_dim(int dim, int rank, const char* op) {
  HEDDLE_CHECK(dim >= -rank && dim < rank, op, ": dimension ", dim, " is out of range for rank ", rank);
  return dim < 0 ? dim + rank : dim;
}

// Product of all values. Throws naming `op` if a size is negative, or if the sizes other than 0 multiply to more than 64
// bits can count in bytes: every shape a user gives goes through here, so numel() and the strides cannot overflow.
std::int64_t checked_numel(const Shape& shape, const char* op);

// The shape both operands broadcast to, by NumPy's rule: align on the right; sizes must be equal or 1.
Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op);

}  // namespace heddle
