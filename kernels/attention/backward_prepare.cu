#include "kernels/attention/backward_prepare.h"

#include <numbers>

#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"

namespace heddle::cuda {
namespace {

// Columns a thread handles: 16 bytes of a 16-bit dtype, 32 bytes of float32.
constexpr int kColumns = 8;
constexpr int kVectorBytes = 16;

// A [B, Sq, Hq, D] operand of a kernel.
template <typename T>
struct Rows {
  T* data;
  std::int64_t batch, row, head, column;  // strides in elements
  bool has_vectors;  // every 8th column starts at a multiple of 16 bytes, and columns are neighbours

  template <typename View>
  explicit Rows(const View& view)
      : data(static_cast<T*>(view.data)), batch(view.strides[0]), row(view.strides[1]), head(view.strides[2]), column(view.strides[3]) {
    has_vectors = column == 1 && reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0;
    for (const std::int64_t stride : {batch, row, head}) has_vectors = has_vectors && stride * sizeof(T) % kVectorBytes == 0;
  }

  __device__ T* at(std::int64_t b, std::int64_t s, std::int64_t h) const { return data + b * batch + s * row + h * head; }
};

template <typename T>
using EightOf = Pack<T, kColumns>;

template <typename T>
__device__ EightOf<T> load_eight(const Rows<const T>& x, const T* row, int first, int D) {
  EightOf<T> values;
  if (x.has_vectors && first + kColumns <= D) {
    using Vector = Pack<T, kVectorBytes / sizeof(T)>;
    constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
    for (int i = 0; i < kColumns; i += kWidth) {
      const Vector part = *reinterpret_cast<const Vector*>(row + first + i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values.at[i + j] = part.at[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values.at[i] = first + i < D ? row[(first + i) * x.column] : convert<T>(0.0f);
  }
  return values;
}

template <typename T>
__device__ void store_eight(const Rows<T>& x, T* row, int first, int D, const EightOf<T>& values) {
  if (x.has_vectors && first + kColumns <= D) {
    using Vector = Pack<T, kVectorBytes / sizeof(T)>;
    constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
    for (int i = 0; i < kColumns; i += kWidth) {
      Vector part;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part.at[j] = values.at[i + j];
      *reinterpret_cast<Vector*>(row + first + i) = part;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (first + i < D) row[(first + i) * x.column] = values.at[i];
  }
}

// Blocks are numbered heads first, so that those running together read neighbouring memory of [B, Sq, Hq, D].
struct BlockIndex {
  std::int64_t sequence, chunk, head;

  __device__ BlockIndex(std::int64_t heads, std::int64_t chunks)
      : sequence(blockIdx.x / heads / chunks), chunk(blockIdx.x / heads % chunks), head(blockIdx.x % heads) {}
};

struct RowStrides {
  const float* data;
  std::int64_t batch, head, row;

  explicit RowStrides(const ConstView& view) : data(static_cast<const float*>(view.data)), batch(0), head(0), row(0) {
    if (!view.defined()) return;
    batch = view.strides[0];
    head = view.strides[1];
    row = view.strides[2];
  }
  __device__ float at(std::int64_t b, std::int64_t h, std::int64_t s) const { return data[b * batch + h * head + s * row]; }
};

template <typename T>
struct PrepareParams {
  PaddedRows rows;
  Rows<const T> out, dout;
  RowStrides lse, dlse;
  float* lse_log2;
  float* delta;
  float4* dq_sum;
  T* dout_copy;
  int heads, D, columns;
  std::int64_t tensor_rows;  // of out in one batch entry
  std::int64_t chunks;       // blocks a sequence and head
};

// kLanes threads share a row.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kBlock) prepare_kernel(const __grid_constant__ PrepareParams<T> p) {
  constexpr int kRows = kBlock / kLanes;
  let_next_start();
  const BlockIndex block(p.heads, p.chunks);
  const PaddedSequence sequence(p.rows, block.sequence);
  const int lane = threadIdx.x % kLanes, column = lane * kColumns;
  const std::int64_t row = block.chunk * kRows + threadIdx.x / kLanes;
  const std::int64_t tensor_row = sequence.row + row;
  const bool is_inside = row < sequence.length;
  float sum = 0.0f;
  if (is_inside && column < p.D) {
    const auto out = load_eight(p.out, p.out.at(sequence.batch, tensor_row, block.head), column, p.D);
    const auto dout = load_eight(p.dout, p.dout.at(sequence.batch, tensor_row, block.head), column, p.D);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum += convert<float>(out.at[i]) * convert<float>(dout.at[i]);
    if (p.dout_copy != nullptr) {
      T* to = p.dout_copy + ((sequence.batch * p.tensor_rows + tensor_row) * p.heads + block.head) * p.D + column;
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (column + i < p.D) to[i] = dout.at[i];
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (row >= (sequence.length + p.rows.tile - 1) / p.rows.tile * p.rows.tile) return;
  const std::int64_t at = block.head * p.rows.total_rows + sequence.padded + row;
  if (p.dq_sum != nullptr)
    for (int i = lane; i < p.columns / 4; i += kLanes) p.dq_sum[at * (p.columns / 4) + i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  if (lane != 0) return;
  const float lse = is_inside ? p.lse.at(sequence.batch, block.head, tensor_row) : -infinity<float>();
  const float dlse = is_inside && p.dlse.data != nullptr ? p.dlse.at(sequence.batch, block.head, tensor_row) : 0.0f;
  const bool sees_keys = lse != -infinity<float>();
  p.lse_log2[at] = sees_keys ? lse * std::numbers::log2e_v<float> : infinity<float>();
  p.delta[at] = sees_keys ? sum - dlse : 0.0f;  // whatever dout holds in a row without keys
}

template <typename T>
struct FinishParams {
  PaddedRows rows;
  const float4* dq_sum;
  Rows<T> dq;
  int heads, D, columns;
  std::int64_t chunks;
  float scale;
};

// One thread converts 8 columns of a row and of the row 8 below it: with warpgroup blocks they are 64 bytes in a row.
template <typename T, int kLanes, DqOrder kOrder>
__global__ void __launch_bounds__(kBlock) finish_kernel(const __grid_constant__ FinishParams<T> p) {
  constexpr int kRows = 2 * kBlock / kLanes;
  wait_for_previous();
  const BlockIndex block(p.heads, p.chunks);
  const PaddedSequence sequence(p.rows, block.sequence);
  const int chunk = threadIdx.x % kLanes, pair = threadIdx.x / kLanes;
  const std::int64_t row = block.chunk * kRows + pair / 8 * 16 + pair % 8;
  if (row >= sequence.length || chunk * kColumns >= p.D) return;
  const std::int64_t at = block.head * p.rows.total_rows + sequence.padded + row;
  float4 sums[4];  // the row's, then the other's
  if constexpr (kOrder == DqOrder::rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = p.dq_sum[((at + i / 2 * 8) * p.columns + chunk * kColumns) / 4 + i % 2];
  } else {
    const std::int64_t tile = at / 64 * (p.columns / 64) + chunk / 8;
    const int thread = static_cast<int>(at % 64) / 16 * 32 + static_cast<int>(at % 8) * 4;
    float4 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = p.dq_sum[tile * 1024 + chunk % 8 * 128 + thread + i];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = {raw[2 * i].x, raw[2 * i].y, raw[2 * i + 1].x, raw[2 * i + 1].y};
      sums[2 + i] = {raw[2 * i].z, raw[2 * i].w, raw[2 * i + 1].z, raw[2 * i + 1].w};
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= sequence.length) break;
    EightOf<T> values;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 sum = sums[2 * half + i];
      const float parts[] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) values.at[4 * i + j] = convert<T>(parts[j] * p.scale);
    }
    T* to = p.dq.at(sequence.batch, sequence.row + row + 8 * half, block.head);
    store_eight(p.dq, to, chunk * kColumns, p.D, values);
  }
}

// Calls fn(std::integral_constant<int, kLanes>{}) with the threads that share a row of `columns`.
template <typename Fn>
void with_lanes(std::int64_t columns, const Fn& fn) {
  if (columns <= 8 * kColumns) fn(std::integral_constant<int, 8>{});
  else if (columns <= 16 * kColumns) fn(std::integral_constant<int, 16>{});
  else fn(std::integral_constant<int, 32>{});
}

// Calls fn with a value-initialised element of a dtype that the CUDA backward takes.
template <typename Fn>
void with_element(DType dtype, const Fn& fn) {
  if (dtype == DType::bf16) fn(bfloat16{});
  else if (dtype == DType::f16) fn(float16{});
  else fn(float{});
}

}  // namespace

void backward_prepare(const BackwardPrepareArgs& args, const ExecContext& ctx) {
  const std::int64_t Hq = args.dout.shape[2], D = args.dout.shape[3];
  if (args.rows.sequences * args.rows.longest == 0) return;
  with_element(args.dout.dtype, [&](auto element) {
    using T = decltype(element);
    with_lanes(D, [&](auto lanes) {
      constexpr int kRows = kBlock / lanes;
      const std::int64_t chunks = (args.rows.longest_padded() + kRows - 1) / kRows;
      const PrepareParams<T> p{args.rows, Rows<const T>(args.out), Rows<const T>(args.dout), RowStrides(args.lse), RowStrides(args.dlse),
                               args.lse_log2, args.delta, reinterpret_cast<float4*>(args.dq_sum), static_cast<T*>(args.dout_copy),
                               static_cast<int>(Hq), static_cast<int>(D), args.columns, args.dout.shape[1], chunks};
      prepare_kernel<T, lanes><<<static_cast<unsigned>(args.rows.sequences * chunks * Hq), kBlock, 0, stream_of(ctx)>>>(p);
    });
  });
  check_launch("attention backward: prepare");
}

void backward_finish(const BackwardFinishArgs& args, const ExecContext& ctx) {
  const std::int64_t Hq = args.dq.shape[2], D = args.dq.shape[3];
  if (args.rows.sequences * args.rows.longest == 0) return;
  with_element(args.dq.dtype, [&](auto element) {
    using T = decltype(element);
    with_lanes(D, [&](auto lanes) {
      constexpr int kRows = 2 * kBlock / lanes;
      const std::int64_t chunks = (args.rows.longest + kRows - 1) / kRows;
      const FinishParams<T> p{args.rows, reinterpret_cast<const float4*>(args.dq_sum), Rows<T>(args.dq), static_cast<int>(Hq),
                              static_cast<int>(D), args.columns, chunks, static_cast<float>(args.scale)};
      const auto kernel = args.order == DqOrder::rows ? finish_kernel<T, lanes, DqOrder::rows>
                                                      : finish_kernel<T, lanes, DqOrder::warpgroup_blocks>;
      launch_early(args.starts_early, kernel, static_cast<unsigned>(args.rows.sequences * chunks * Hq), kBlock, 0, ctx, p);
    });
  });
  check_launch("attention backward: finish");
}

}  // namespace heddle::cuda
