#pragma once

#include <cuda_fp8.h>

#include "kernels/quantize/chunk.cuh"
#include "kernels/quantize/divide.cuh"
#include "kernels/quantize/half_pairs.cuh"
#include "kernels/runtime/random.h"

// How kernels read what is to be quantised and write its codes: kChunk elements at a time, which share a scale.

namespace heddle::cuda {

inline constexpr int kChunk = 16;
static_assert(kChunk == kNvBlock && kMxBlock == 2 * kChunk && kFp8Block % kChunk == 0);

// A chunk as it is stored.
template <typename T>
class Chunk {
 public:
  // From an address that is a multiple of 16 if `is_aligned`; elements past `count` are 0.
  __device__ void load(const T* from, int count, bool is_aligned) {
    if (is_aligned && count == kChunk) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words_[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) reinterpret_cast<T*>(words_)[i] = i < count ? from[i] : T{};
    }
  }

  __device__ void unpack(float (&out)[kChunk]) const {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if constexpr (kIsFloat) {
        out[i] = __uint_as_float(word(i));
      } else {
        const float2 both = floats_of(T{}, word(i));
        out[2 * i] = both.x, out[2 * i + 1] = both.y;
      }
    }
  }

  // The largest magnitude: of pairs as they are stored, before they take the registers of floats.
  __device__ float largest() const {
    if constexpr (kIsFloat) {
      float out = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) out = fmaxf(out, fabsf(__uint_as_float(word(i))));
      return out;
    } else {
      std::uint32_t pair = word(0);
#pragma unroll
      for (int i = 1; i < kChunk / 2; ++i) pair = larger_of(T{}, pair, word(i));
      const float2 both = floats_of(T{}, pair);
      return fmaxf(fabsf(both.x), fabsf(both.y));
    }
  }

 private:
  static constexpr bool kIsFloat = std::is_same_v<T, float>;
  static constexpr int kWords = kChunk / kWide<T>;
  __device__ std::uint32_t word(int i) const {
    const uint4& four = words_[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }

  uint4 words_[kWords];
};

// Calls fn(chunk, count, row, column) for the chunks of a thread, kTurns of which lie kBlock chunks apart in a row, while the next one is being
// loaded; count is what there is of a chunk, if any.
inline constexpr int kTurns = 4, kTurn = kBlock * kChunk;
template <typename T, typename Fn>
__device__ void for_chunks(const Rows<const T>& x, const Fn& fn) {
  const std::int64_t row = my_row(), begin = static_cast<std::int64_t>(blockIdx.x) * (kTurns * kTurn), first = begin + threadIdx.x * kChunk;
  if (row >= x.rows) return;
  const int end = at_most<kTurns * kTurn>(x.columns - begin);
  const T* from = x.data + row * x.stride + first;
  int left = end - static_cast<int>(threadIdx.x) * kChunk;
  Chunk<T> next;
  next.load(from, min(left, kChunk), x.is_aligned);
#pragma unroll 1
  for (int turn = 0; turn < end; turn += kTurn) {
    const Chunk<T> chunk = next;
    const int count = min(left, kChunk);
    left -= kTurn;
    from += kTurn;
    if (turn + kTurn < end) next.load(from, min(left, kChunk), x.is_aligned);
    fn(chunk, count, row, first + turn);
  }
}

// Eight E2M1 codes of numbers given as halves of them. The code of a magnitude m is 2 m up to m = 2, then m - 2 more of it up to 4, then
// (m - 4) / 2 more up to 6, each rounded to an integer, to the even one of two; together they are the codes of encode(). The float adder
// rounds them, in sums whose last bit is worth 16^j for the j-th of four codes.
__device__ inline std::uint32_t encode_e2m1(const float (&halves)[8]) {
  constexpr auto place = [](int j) { return static_cast<float>(1 << (4 * j)); };
  std::uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = 0x1.8p23f * place(4);
#pragma unroll
    for (int j = 3; j >= 0; --j) {
      const float half = fabsf(halves[4 * i + j]);
      sum += 0x1.8p23f * (place(j) - place(j + 1));
      sum = fmaf(__saturatef(half), 4.0f * place(j), sum);
      sum = fmaf(__saturatef(half - 1.0f), 2.0f * place(j), sum);
      sum = fmaf(__saturatef(half - 2.0f), place(j), sum);
    }
    words[i] = __float_as_uint(sum);
  }
  const auto signs = [&](int first) {  // of every second one, at the top of a byte
    const auto both = [&](int i) { return __byte_perm(__float_as_uint(halves[i]), __float_as_uint(halves[i + 2]), 0x0073); };
    return __byte_perm(both(first), both(first + 4), 0x5410) & 0x80808080u;
  };
  return __byte_perm(words[0], words[1], 0x5410) | signs(0) >> 4 | signs(1);
}

// A power of two as E8M0.
struct PowerOfTwo {
  std::uint8_t code;
};

// Divides a chunk by a scale and by a power of two.
__device__ inline void divide(float (&x)[kChunk], float scale, float power) { Divisor(scale * power).divide(x); }
__device__ inline void divide(float (&x)[kChunk], PowerOfTwo scale, float power) {
  const float reciprocal = decode_e8m0(static_cast<std::uint8_t>(254 - scale.code)) / power;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] *= reciprocal;
}

// The codes of a chunk as words. The instruction for FP8 differs from encode() in the sign of NaN alone.
template <typename F, typename Scale>
__device__ void encode_words(float (&x)[kChunk], Scale scale, std::uint32_t (&words)[kChunk * F::kBits / 32]) {
  constexpr int kPerWord = 32 / F::kBits;
  divide(x, scale, F::kBits == 4 ? 2.0f : 1.0f);
#pragma unroll
  for (int w = 0; w < kChunk / kPerWord; ++w) {
    if constexpr (F::kBits == 4) {
      float eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = x[8 * w + i];
      words[w] = encode_e2m1(eight);
    } else {
      constexpr __nv_fp8_interpretation_t kKind = std::is_same_v<F, E4M3> ? __NV_E4M3 : __NV_E5M2;
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < kPerWord; i += 2) {
        const std::uint32_t pair = __nv_cvt_float2_to_fp8x2({x[w * kPerWord + i], x[w * kPerWord + i + 1]}, __NV_SATFINITE, kKind);
        words[w] |= pair << (8 * i);
      }
    }
  }
}

// Drawn codes. Not inlined: a third of the time of compiling the kernels went into copies of this.
template <typename F, typename Scale>
__device__ __noinline__ void draw_words(const float (&x)[kChunk], Scale scale, std::int64_t row, std::int64_t column, std::uint64_t seed,
                                        std::uint32_t (&words)[kChunk * F::kBits / 32]) {
  constexpr int kPerWord = 32 / F::kBits;
  float quotients[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) quotients[i] = x[i];
  divide(quotients, scale, 1.0f);
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    const auto random = philox(seed, static_cast<std::uint64_t>(column + i) / 4, static_cast<std::uint64_t>(row));
    std::uint32_t four = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) four |= static_cast<std::uint32_t>(encode_stochastic<F>(quotients[i + j], random[j])) << (F::kBits * j);
    if (i % kPerWord == 0) words[i / kPerWord] = four;
    else words[i / kPerWord] |= four << 16;
  }
}

// Where codes go, and how elements are drawn.
struct Codes {
  std::uint8_t* data;
  std::int64_t row_bytes;
  bool is_aligned;
  bool is_stochastic;
  std::uint64_t seed;
};

// Writes the codes of the chunk x at [row, column], `count` of whose elements are there; the others are 0.
template <typename F, typename Scale>
__device__ void store_codes(float (&x)[kChunk], Scale scale, int count, std::int64_t row, std::int64_t column, const Codes& codes) {
  std::uint32_t words[kChunk * F::kBits / 32];
  if (codes.is_stochastic) {
    float copy[kChunk];  // for which alone, and its codes, there is memory
    std::uint32_t drawn[kChunk * F::kBits / 32];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) copy[i] = x[i];
    draw_words<F>(copy, scale, row, column, codes.seed, drawn);
#pragma unroll
    for (int i = 0; i < kChunk * F::kBits / 32; ++i) words[i] = drawn[i];
  } else {
    encode_words<F>(x, scale, words);
  }
  std::uint8_t* out = codes.data + row * codes.row_bytes + column * F::kBits / 8;
  if (codes.is_aligned && count == kChunk) {
    if constexpr (F::kBits == 4) *reinterpret_cast<uint2*>(out) = {words[0], words[1]};
    else *reinterpret_cast<uint4*>(out) = {words[0], words[1], words[2], words[3]};
  } else {
    const int bytes = (count * F::kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < kChunk * F::kBits / 8; ++i)
      if (i < bytes) out[i] = static_cast<std::uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

}  // namespace heddle::cuda
