#pragma once

#include <cstdint>

namespace heddle::nn {

// A random order of 0 .. size-1 that is computed, not stored: permutation[i] is a function of (size, seed, stream, i)
// alone, so any position can be looked up without replaying the ones before it.
// A Feistel network (Luby and Rackoff 1988) on the next even number of bits, with Philox as the round function; results
// past the end are sent through again until one is inside (cycle walking, Black and Rogaway 2002).
class Permutation {
 public:
  // size in [1, 2^62]. Streams of one seed are independent orders: one an epoch, for example.
  Permutation(std::int64_t size, std::uint64_t seed, std::uint64_t stream);
  std::int64_t operator[](std::int64_t index) const;  // index in [0, size)
  std::int64_t size() const { return size_; }

 private:
  std::uint64_t encrypt(std::uint64_t value) const;

  std::int64_t size_;
  std::uint64_t seed_;
  std::uint64_t stream_;
  int half_bits_;
};

}  // namespace heddle::nn
