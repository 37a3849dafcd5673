#include "kernels/quantize/code_scales.cuh"
#include "kernels/quantize/half_pairs.cuh"

namespace heddle::cuda {
namespace {

// A chunk is 16 bytes of results: with more to a thread its stores would each fill half a sector, which takes five times as long.
__device__ void store_chunk(float* to, const float (&x)[4]) { *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]}; }

template <typename Half>
__device__ void store_chunk(Half* to, const float (&x)[8]) {
  constexpr Half kKind{};
  *reinterpret_cast<uint4*>(to) = {pair_of(kKind, x[0], x[1]), pair_of(kKind, x[2], x[3]), pair_of(kKind, x[4], x[5]), pair_of(kKind, x[6], x[7])};
}

// What all chunks have in common.
template <typename T>
struct Decoding {
  Rows<T> out;
  const std::uint8_t* codes;
  std::int64_t row_bytes;
  std::int64_t first_row, first_column;
  bool is_aligned;
};

// Of the chunk at [i, column] of out.
template <typename F, typename T>
__device__ CodeWords<F, kWide<T>> load_chunk(const Decoding<T>& p, std::int64_t i, std::int64_t column) {
  const int count = at_most<kWide<T>>(p.out.columns - column);
  const std::uint8_t* from = p.codes + (p.first_row + i) * p.row_bytes + (p.first_column + column) * F::kBits / 8;
  if (p.is_aligned && count == kWide<T>) return load_codes<F, kWide<T>>(from);
  CodeWords<F, kWide<T>> words = {};
#pragma unroll
  for (int j = 0; j < words.kBytes; ++j)
    if (j * 8 < count * F::kBits) words.at[j / 4] |= static_cast<std::uint32_t>(from[j]) << (j % 4 * 8);
  return words;
}

template <typename F, typename T>
__device__ void store_values(const Decoding<T>& p, std::int64_t i, std::int64_t column, const CodeWords<F, kWide<T>>& words, float scale) {
  constexpr int kChunk = kWide<T>;
  float values[kChunk];
  words.values(values);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) values[j] *= scale;
  const int count = at_most<kChunk>(p.out.columns - column), skipped = column < 0 ? static_cast<int>(-column) : 0;
  T* to = p.out.data + i * p.out.stride + column;
  if (p.is_aligned && count == kChunk) {
    store_chunk(to, values);
  } else {
#pragma unroll
    for (int j = 0; j < kChunk; ++j)
      if (j >= skipped && j < count) to[j] = convert<T>(values[j]);
  }
}

// Chunks start at multiples of their size in columns of the matrix, so that all of one share a scale; the first may begin before first_column. A
// thread takes kTurns of them, kBlock apart, and loads all before it decodes one.
constexpr int kTurns = 4;
template <typename F, typename T, typename Scale>
__global__ void decode_kernel(const Decoding<T> p, const Scale scale) {
  constexpr int kChunk = kWide<T>;
  const std::int64_t i = my_row(), row = p.first_row + i;
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * (kTurns * kBlock) + threadIdx.x) * kChunk - p.first_column % kChunk;
  if (i >= p.out.rows) return;
  const auto& scale_of = scale.of_tensor();
  CodeWords<F, kChunk> words[kTurns];
  decltype(scale_of.stored(0, 0)) scales[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const std::int64_t column = first + turn * (kBlock * kChunk);
    if (column >= p.out.columns) continue;
    words[turn] = load_chunk<F>(p, i, column);
    scales[turn] = scale_of.stored(row, p.first_column + column);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const std::int64_t column = first + turn * (kBlock * kChunk);
    if (column < p.out.columns) store_values<F>(p, i, column, words[turn], scale_of.value(scales[turn]));
  }
}

template <typename F, typename T, typename Scale>
void decode_chunks(const DequantizeArgs& args, const Scale& scale, const ExecContext& ctx) {
  constexpr int kChunk = kWide<T>;
  const Rows<T> out(args.out);
  const std::int64_t row_bytes = args.w.codes.shape[1], skipped = args.first_column % kChunk;
  const bool is_aligned = out.is_aligned && skipped == 0 && reinterpret_cast<std::uintptr_t>(args.w.codes.data) % 8 == 0 && row_bytes % 8 == 0;
  const Decoding<T> p = {out, args.w.codes.as<std::uint8_t>(), row_bytes, args.first_row, args.first_column, is_aligned};
  decode_kernel<F><<<chunk_grid(out.rows, out.columns + skipped, kTurns * kChunk), kBlock, 0, stream_of(ctx)>>>(p, scale);
}

}  // namespace

void dequantize(const DequantizeArgs& args, const ExecContext& ctx) {
  dispatch_stored(args.out.dtype, "dequantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_scales(args.w, [&]<typename F>(F, const auto& scale) { decode_chunks<F, T>(args, scale, ctx); });
  });
  check_launch("dequantize");
}

}  // namespace heddle::cuda
