#include "kernels/runtime/shape.h"

#include <limits>

namespace heddle {

std::int64_t checked_numel(const Shape& shape, const char* op) {
  constexpr std::int64_t kMostElements = std::numeric_limits<std::int64_t>::max() / 8;  // 8: the largest dtype
  std::int64_t product = 1;
  for (std::int64_t size : shape) {
    HEDDLE_CHECK(size >= 0, op, ": sizes must be >= 0, got ", shape);
    HEDDLE_CHECK(size == 0 || product <= kMostElements / size, op, ": shape ", shape,
                 " has more elements than 64 bits can count in bytes");
    product *= std::max<std::int64_t>(size, 1);
  }
  return shape.numel();
}

Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op) {
  const int rank = std::max(a.rank(), b.rank());
  Shape out = Shape::filled(rank, 1);
  for (int i = 0; i < rank; ++i) {
    const int ia = i - (rank - a.rank());
    const int ib = i - (rank - b.rank());
    const std::int64_t da = ia < 0 ? 1 : a[ia];
    const std::int64_t db = ib < 0 ? 1 : b[ib];
    HEDDLE_CHECK(da == db || da == 1 || db == 1, op, ": shapes ", a, " and ", b,
                 " do not broadcast; sizes must be equal or 1, aligned on the right");
    out[i] = da == 1 ? db : da;
  }
  return out;
}

}  // namespace heddle
