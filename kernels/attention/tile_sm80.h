#pragma once

namespace heddle::cuda::sm80 {

// The sizes of the kernels' tiles, one set for each head size that is compiled; a head takes the next larger one. Every
// block needs twice as many bytes of shared memory as its tiles have elements.

// Forward: a block has kRows query rows, a multiple of 16 for each of its warps, and takes kKeys keys at a time.
template <int kHead_, int kRows_, int kKeys_, int kWarps_, int kStages_>
struct ForwardShape {
  static constexpr int kHead = kHead_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kStages_;  // tiles of keys and of values in shared memory
  static constexpr int kSharedBytes = 2 * kHead * (kRows + 2 * kStages * kKeys);
};

// Backward: a block has kKeys keys and takes kRows query rows at a time. kKeyWarps of its warps side by side share the keys, the
// others the rows (of the scores) or the head's columns (of dk and dv). kRowWarps share the rows of dq.
template <int kHead_, int kRows_, int kKeys_, int kWarps_, int kKeyWarps_, int kRowWarps_, int kStages_>
struct BackwardShape {
  static constexpr int kHead = kHead_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeyWarps = kKeyWarps_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kStages = kStages_;  // tiles of queries and of output gradients in shared memory
  static constexpr int kRowBytes = 4 * kRows;  // of log-sum-exp, and of delta, of a tile
  // A warp that has all rows of its keys' scores multiplies by the probabilities from registers; else they go through memory, as
  // the gradients of scores always do.
  static constexpr bool kHasWholeRows = kKeyWarps == kWarps;
  static constexpr int kScoreTiles = kHasWholeRows ? 1 : 2;
  static constexpr int kSharedBytes =
      4 * kHead * (kKeys + kStages * kRows) + 2 * kScoreTiles * kRows * kKeys + 2 * kStages * kRowBytes + 4 * kKeys;
};

// Small shapes are for devices that give a block 99 KB of shared memory (compute capabilities 8.6, 8.9); the others need the 163 KB
// of 8.0.
template <int kHead>
struct Shapes;

template <>
struct Shapes<32> {
  using Forward = ForwardShape<32, 128, 64, 4, 2>;
  using Backward = BackwardShape<32, 64, 128, 4, 4, 2, 2>;
};
template <>
struct Shapes<64> {
  using Forward = ForwardShape<64, 128, 96, 4, 2>;
  using Backward = BackwardShape<64, 64, 128, 4, 4, 2, 2>;
};
template <>
struct Shapes<96> {
  using Forward = ForwardShape<96, 128, 64, 4, 1>;
};
template <>
struct Shapes<128> {
  using Forward = ForwardShape<128, 128, 64, 4, 1>;
  using Backward = BackwardShape<128, 64, 128, 8, 4, 2, 2>;
  using SmallBackward = BackwardShape<128, 64, 64, 4, 2, 2, 1>;
};
template <>
struct Shapes<192> {
  using Forward = ForwardShape<192, 64, 64, 4, 1>;
};
template <>
struct Shapes<256> {
  using Forward = ForwardShape<256, 64, 64, 4, 1>;
  using Backward = BackwardShape<256, 64, 64, 8, 2, 2, 1>;
  using SmallBackward = BackwardShape<256, 32, 32, 4, 2, 2, 1>;
};

}  // namespace heddle::cuda::sm80
