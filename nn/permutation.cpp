#include "nn/permutation.h"

#include <bit>
#include <cassert>
#include <utility>

#include "kernels/runtime/check.h"
#include "kernels/runtime/random.h"

namespace heddle::nn {
namespace {

// Four rounds make the network indistinguishable from a random permutation in theory, for wide halves; six leave a
// margin for the narrow halves of small sets.
constexpr std::uint64_t kRounds = 6;

}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t seed, std::uint64_t stream)
    : size_(size), seed_(seed), stream_(stream) {
  HEDDLE_CHECK(size >= 1 && size <= (std::int64_t{1} << 62), "permutation: size must be in [1, 2^62], got ", size);
  const int bits = std::bit_width(static_cast<std::uint64_t>(size - 1));
  half_bits_ = (bits + 1) / 2;
}

std::int64_t Permutation::operator[](std::int64_t index) const {
  assert(index >= 0 && index < size_);
  auto value = static_cast<std::uint64_t>(index);
  // The network permutes fewer than 4 * size values, so about one in four or better is inside.
  do value = encrypt(value);
  while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

std::uint64_t Permutation::encrypt(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    const std::uint64_t mixed = philox(seed_, right | (round << 32), stream_)[0];
    left ^= mixed & mask;
    std::swap(left, right);
  }
  return (left << half_bits_) | right;
}

}  // namespace heddle::nn
