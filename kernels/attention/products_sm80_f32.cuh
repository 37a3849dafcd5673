#pragma once

#include <cstdint>

#include "kernels/attention/tile.h"

// A warp's products of float32 tiles on tensor cores, and the copies that fill the tiles.

namespace heddle::cuda::sm80::f32 {

inline constexpr int kWarp = 32;
inline constexpr int kBlockRows = 16;  // of a result

// Note: Three products for one
// A tensor core reads float32 operands as TF32: it drops all but 11 bits. Each operand x is therefore split into big, x rounded to
// 11 bits, and small = x - big, of which 11 bits count too; together that is x to 2^-23. x y becomes big big + (big small + small
// big); small small is below what float32 resolves. Tensor cores also truncate when they add, so sums there are kept short: one tile
// deep, the small products apart from the big ones. What runs over all tiles is added outside, rounded to nearest.
// Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak".
struct Split {
  std::uint32_t big, small;
};

__device__ __forceinline__ Split split(float x) {
  // Half a unit of the 11 bits, then the 13 bits below them go. Three instructions; cvt.rna.tf32 and its check for infinities take eight.
  const std::uint32_t big = (__float_as_uint(x) + 0x1000u) & 0xFFFFE000u;
  return {big, __float_as_uint(x - __uint_as_float(big))};
}

// Note: Fragments of TF32
// mma.m16n8k8: lane l holds of the left operand the rows g = l / 4 and g + 8 at depth t = l % 4 (elements 0 and 1) and t + 4
// (2 and 3); of the right operand the column g at depths t and t + 4; of the result the rows g (elements 0, 1) and g + 8 (2, 3)
// at the columns 2t and 2t + 1. The order of the depth is free if both operands agree: with depth 2t for t and 2t + 1 for t + 4 the
// result of one product is the left operand of the next without any exchange.
// PTX ISA, "Matrix fragments for mma.m16n8k8".
struct Left {
  std::uint32_t big[4], small[4];

  __device__ __forceinline__ void set(float x0, float x1, float x2, float x3) {
    const Split parts[] = {split(x0), split(x1), split(x2), split(x3)};
#pragma unroll
    for (int i = 0; i < 4; ++i) big[i] = parts[i].big, small[i] = parts[i].small;
  }
};

__device__ __forceinline__ void mma(float (&sum)[4], const std::uint32_t (&left)[4], std::uint32_t right0, std::uint32_t right1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// big += the large products, small += the others (Note: Three products for one).
__device__ __forceinline__ void multiply(float (&big)[4], float (&small)[4], const Left& left, const Split& right0, const Split& right1) {
  mma(small, left.small, right0.big, right1.big);
  mma(big, left.big, right0.big, right1.big);
  mma(small, left.big, right0.small, right1.small);
}

// Rows of a tile in shared memory: kHead columns and four more. Lanes that read 8 rows at 4 neighbouring columns then meet all 32
// banks, and so do those that read two neighbouring columns in 8 places of every second row.
template <int kHead>
inline constexpr int kPitch = kHead + 4;

// A warp works on kM blocks of 16 rows. A lane has the rows g + 8 h of them, h < 2 kM: elements 0 and 1 of a result in block h / 2
// for even h, 2 and 3 for odd.
template <int kM, int kBlocks>
using Results = float[kM][kBlocks][4];

// scores = rows * tile^T for the warp's rows and kColumns rows of the tile.
template <int kHead, int kColumns, int kM>
__device__ __forceinline__ void multiply_scores(Results<kM, kColumns / 8>& scores, const float* rows, const float* tile) {
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  constexpr int kP = kPitch<kHead>;
  Results<kM, kColumns / 8> small;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][j][e] = small[m][j][e] = 0.0f;
  constexpr int kUnrolled = 4 / kM;  // more at once spills
#pragma unroll kUnrolled
  for (int k = 0; k < kHead; k += 8) {
    Left left[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float* at = rows + (16 * m + g) * kP + k + t;
      left[m].set(at[0], at[8 * kP], at[4], at[8 * kP + 4]);
    }
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float* at = tile + (8 * j + g) * kP + k + t;
      const Split right0 = split(at[0]), right1 = split(at[4]);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply(scores[m][j], small[m][j], left[m], right0, right1);
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][j][e] += small[m][j][e];
}

// What a warp adds up over all tiles: kM times 16 rows of kColumns columns. Elements 4p .. 4p + 3 of row g + 8 h are the columns
// 16p + 4t .. 16p + 4t + 3.
template <int kM, int kColumns>
struct Sums {
  float at[2 * kM][kColumns / 4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2 * kM; ++h)
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) at[h][i] = 0.0f;
  }
};

// Note: Hidden rows
// A weight of 0 times a NaN or an infinity is a NaN, so such an element would reach rows that do not see it. Tiles that have
// both hidden pairs and elements that are not finite are rare: there every such element is added as it is to the rows that see
// it, which makes them what they would become, and is 0 in the product. The other rows keep the bits they would have without it.

// is_visible(h, row of the tile): whether the lane's row g + 8 h sees it. Every thread of the block must call this, after all
// have finished reading the tile for something else.
template <int kHead, int kRows, int kThreads, int kM, int kColumns, typename Visible>
__device__ __forceinline__ void take_not_finite(Sums<kM, kColumns>& sums, float* tile, int first, const Visible& is_visible) {
  constexpr int kP = kPitch<kHead>;
  bool found = false;
  for (int i = threadIdx.x; i < kRows * kHead; i += kThreads) found = found || !isfinite(tile[i / kHead * kP + i % kHead]);
  if (!__syncthreads_or(found)) return;
  for (int row = 0; row < kRows; ++row) {
    const float* at = tile + row * kP + first + 4 * (threadIdx.x % 4);
#pragma unroll
    for (int h = 0; h < 2 * kM; ++h) {
      if (!is_visible(h, row)) continue;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i)
        if (const float value = at[i / 4 * 16 + i % 4]; !isfinite(value)) sums.at[h][i] += value;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kHead; i += kThreads)
    if (float& value = tile[i / kHead * kP + i % kHead]; !isfinite(value)) value = 0.0f;
  __syncthreads();
}

// sums = factor * sums + weights * tile, for the warp's rows of weights over the kRows rows of the tile, and of these the columns
// from `first` on.
template <int kHead, int kRows, int kM, int kColumns>
__device__ __forceinline__ void multiply_weights(Sums<kM, kColumns>& sums, const float (&factor)[2 * kM], const Results<kM, kRows / 8>& weights,
                                                 const float* tile, int first) {
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  constexpr int kP = kPitch<kHead>;
  Left left[kM][kRows / 8];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) left[m][j].set(weights[m][j][0], weights[m][j][2], weights[m][j][1], weights[m][j][3]);
  // Sixteen columns at a time: the even ones are one block of the product, the odd ones the other.
#pragma unroll
  for (int p = 0; p < kColumns / 16; ++p) {
    Results<kM, 2> big = {}, small = {};
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float* at = tile + (8 * j + 2 * t) * kP + first + 16 * p + 2 * g;
      const float2 upper = *reinterpret_cast<const float2*>(at), lower = *reinterpret_cast<const float2*>(at + kP);
      const Split even0 = split(upper.x), even1 = split(lower.x), odd0 = split(upper.y), odd1 = split(lower.y);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        multiply(big[m][0], small[m][0], left[m][j], even0, even1);
        multiply(big[m][1], small[m][1], left[m][j], odd0, odd1);
      }
    }
#pragma unroll
    for (int h = 0; h < 2 * kM; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums.at[h][4 * p + e];
        const int from = h % 2 * 2 + e / 2;
        sum = sum * factor[h] + (big[h / 2][e % 2][from] + small[h / 2][e % 2][from]);
      }
  }
}

// One head of a [B, S, H, D] tensor: rows of D elements.
template <typename T>
struct HeadRows {
  T* data;
  std::int64_t row, column;
  bool has_vectors;  // every 4th element of a row starts at a multiple of 16 bytes
};

// A [B, S, H, D] tensor.
template <typename T>
struct Operand {
  T* data;
  std::int64_t batch, row, head, column;  // strides in elements
  bool has_vectors;

  template <typename View>
  explicit Operand(const View& view)
      : data(static_cast<T*>(view.data)), batch(view.strides[0]), row(view.strides[1]), head(view.strides[2]), column(view.strides[3]) {
    has_vectors = column == 1 && view.shape[3] % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
    for (int d = 0; d < 3; ++d) has_vectors = has_vectors && (view.shape[d] == 1 || view.strides[d] % 4 == 0);
  }
  __device__ HeadRows<T> rows(std::int64_t b, std::int64_t h, std::int64_t first) const {
    return {data + b * batch + h * head + first * row, row, column, has_vectors};
  }
};

// Starts copying the rows [first, first + kRows) of a head into a tile; rows from `end` on and columns from D on become 0.
template <int kHead, int kRows, int kThreads>
__device__ __forceinline__ void copy_tile(float* tile, const HeadRows<const float>& rows, int first, int end, int D) {
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(tile));
  if (rows.has_vectors) {
    for (int i = threadIdx.x; i < kRows * kHead / 4; i += kThreads) {
      const int r = i / (kHead / 4), d = i % (kHead / 4) * 4;
      const bool is_inside = first + r < end && d < D;
      const float* from = is_inside ? rows.data + (first + r) * rows.row + d : rows.data;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + (r * kPitch<kHead> + d) * 4), "l"(from),
                   "r"(is_inside ? 16 : 0) : "memory");
    }
  } else {
    for (int i = threadIdx.x; i < kRows * kHead; i += kThreads) {
      const int r = i / kHead, d = i % kHead;
      const bool is_inside = first + r < end && d < D;
      const float* from = is_inside ? rows.data + (first + r) * rows.row + d * rows.column : rows.data;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + (r * kPitch<kHead> + d) * 4), "l"(from),
                   "r"(is_inside ? 4 : 0) : "memory");
    }
  }
}
// Waits for the copies of all threads of the block.
__device__ __forceinline__ void wait_for_tiles() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// Writes factor * sums to the warp's rows from `row` on, of which the tensor has `count`, at the columns from `first` on.
template <int kM, int kColumns>
__device__ __forceinline__ void store_sums(const Sums<kM, kColumns>& sums, const float (&factor)[2 * kM], const HeadRows<float>& rows, int row,
                                           int count, int first, int D) {
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2 * kM; ++h) {
    if (row + g + 8 * h >= count) continue;
    float* to = rows.data + (row + g + 8 * h) * rows.row;
#pragma unroll
    for (int p = 0; p < kColumns / 16; ++p) {
      const int column = first + 16 * p + 4 * t;
      float values[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = sums.at[h][4 * p + e] * factor[h];
      if (rows.has_vectors && column < D) {
        *reinterpret_cast<float4*>(to + column) = float4{values[0], values[1], values[2], values[3]};
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (column + e < D) to[(column + e) * rows.column] = values[e];
      }
    }
  }
}

// The sequences of a batch: one a batch entry, all of one length, or cut out of one batch entry by cu_seqlens.
struct Batch {
  const std::int32_t* cu_seqlens_q = nullptr;  // null: all are as long as the tensors
  const std::int32_t* cu_seqlens_k = nullptr;
  std::int64_t Tq = 0, Tk = 0;  // rows of the tensors in a batch entry
  std::int64_t longest_q = 0, longest_k = 0;
  std::int64_t count = 0;
  int Hq = 0, Hkv = 0, D = 0;
  bool is_causal = false;
  float scale = 0, scale_log2 = 0;  // scale * log2(e)
};

// One of them.
struct Sequence {
  std::int64_t batch, query, key;  // its batch entry and its first row in q and in k
  AttentionMask mask;

  __device__ __forceinline__ Sequence(const Batch& all, std::int64_t index)
      : batch(index), query(0), key(0), mask{all.Tq, all.Tk, all.is_causal} {
    if (all.cu_seqlens_q == nullptr) return;
    batch = 0;
    // Ends that break the contract are reported elsewhere; here they must not lead out of the tensors.
    const auto cut = [index](const std::int32_t* ends, std::int64_t rows, std::int64_t longest, std::int64_t& first, std::int64_t& length) {
      first = std::clamp<std::int64_t>(ends[index], 0, rows);
      length = std::clamp<std::int64_t>(ends[index + 1] - first, 0, std::min(longest, rows - first));
    };
    cut(all.cu_seqlens_q, all.Tq, all.longest_q, query, mask.Sq);
    cut(all.cu_seqlens_k, all.Tk, all.longest_k, key, mask.Sk);
  }
};

}  // namespace heddle::cuda::sm80::f32
