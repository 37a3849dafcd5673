#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>

#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/embedding/embedding.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/fault.cuh"
#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"

namespace heddle::cuda {
namespace {

std::string describe_id(const Fault& fault) {
  return concat_text("embedding: id ", fault.value, " at position ", fault.position, " is outside the vocabulary [0, ", fault.limit, ")");
}

struct Ids {
  const void* data;
  bool is_wide;  // int64, else int32

  __device__ std::int64_t at(std::int64_t i) const {
    return is_wide ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
};

Ids ids_of(const ConstView& ids) { return {ids.data, ids.dtype == DType::i64}; }

// Threads that move a row: few, since rows are short and many are under way.
constexpr int kGatherBlock = 64;

// A block a row. An id outside [0, V) gives a row of NaN and a fault.
template <typename T>
__global__ void gather_kernel(Ids ids, std::int64_t n, std::int64_t V, std::int64_t C, const T* weight, std::int64_t weight_row,
                              std::int64_t weight_column, T* out, std::int64_t out_row, std::int64_t out_column, FaultSlot faults, Fault fault) {
  for (std::int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    const std::int64_t id = ids.at(i);
    const bool is_inside = id >= 0 && id < V;
    if (!is_inside && threadIdx.x == 0) {
      fault.value = id;
      fault.position = i;
      report(faults, fault);
    }
    const T* from = weight + (is_inside ? id : 0) * weight_row;
    T* to = out + i * out_row;
    for (std::int64_t c = threadIdx.x; c < C; c += blockDim.x)
      to[c * out_column] = is_inside ? from[c * weight_column] : convert<T>(nanf(""));
  }
}

// Sort keys: the id, or V for a position that adds to no row.
__global__ void keys_kernel(Ids ids, std::int64_t n, std::int64_t V, std::int64_t padding_idx, std::uint32_t* keys, std::int32_t* positions) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t i = first; i < n; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::int64_t id = ids.at(i);
    const bool adds = id >= 0 && id < V && id != padding_idx;
    keys[i] = static_cast<std::uint32_t>(adds ? id : V);
    positions[i] = static_cast<std::int32_t>(i);
  }
}

__device__ std::int64_t lower_bound(const std::uint32_t* keys, std::int64_t n, std::int64_t key) {
  std::int64_t from = 0, to = n;
  while (from < to) {
    const std::int64_t middle = (from + to) / 2;
    if (keys[middle] < key) from = middle + 1;
    else to = middle;
  }
  return from;
}

constexpr int kColumns = 32;
constexpr int kRows = kBlock / kColumns;

template <typename T, typename Out>
struct ScatterTask {
  const std::uint32_t* keys;      // [n], ascending
  const std::int32_t* positions;  // [n], ascending where keys are equal
  std::int64_t n, V, C;
  const T* dout;
  std::int64_t dout_row, dout_column;
  Out* dweight;
  std::int64_t dweight_row, dweight_column;
  bool accumulates;
};

// A block an id: kColumns columns at a time, kRows threads sharing the occurrences of the id.
template <typename T, typename Out>
__global__ void scatter_kernel(const __grid_constant__ ScatterTask<T, Out> task) {
  using A = accumulate_t<T>;
  __shared__ A sums[kRows][kColumns];
  __shared__ std::int64_t ends[2];
  const int column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  for (std::int64_t v = blockIdx.x; v < task.V; v += gridDim.x) {
    if (threadIdx.x < 2) ends[threadIdx.x] = lower_bound(task.keys, task.n, v + threadIdx.x);
    __syncthreads();
    const std::int64_t from = ends[0], to = ends[1];
    for (std::int64_t tile = 0; tile < task.C && !(task.accumulates && from == to); tile += kColumns) {
      const std::int64_t c = tile + column;
      A sum = 0;
      if (c < task.C) {
#pragma unroll 4
        for (std::int64_t i = from + row; i < to; i += kRows)
          sum += convert<A>(task.dout[task.positions[i] * task.dout_row + c * task.dout_column]);
      }
      sums[row][column] = sum;
      __syncthreads();
      if (row == 0 && c < task.C) {
        for (int other = 1; other < kRows; ++other) sum += sums[other][column];
        Out& out = task.dweight[v * task.dweight_row + c * task.dweight_column];
        out = convert<Out>(task.accumulates ? convert<A>(out) + sum : sum);
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

// The positions sorted by id; a stable sort, so those of one id stay in order.
struct SortedIds {
  Buffer keys, positions;

  SortedIds(const EmbeddingBackwardArgs& args, const ExecContext& ctx) {
    const std::int64_t n = args.ids.shape[0], V = args.dweight.shape[0];
    HEDDLE_CHECK(n <= std::numeric_limits<std::int32_t>::max() && V < std::numeric_limits<std::uint32_t>::max(),
                 "embedding: the gradient takes up to 2^31 ids and rows, got ", n, " and ", V);
    const Buffer unsorted_keys(n * 4, ctx.device), unsorted_positions(n * 4, ctx.device);
    keys = Buffer(n * 4, ctx.device);
    positions = Buffer(n * 4, ctx.device);
    const auto key_data = static_cast<std::uint32_t*>(unsorted_keys.data());
    const auto position_data = static_cast<std::int32_t*>(unsorted_positions.data());
    keys_kernel<<<grid_for(n, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(ids_of(args.ids), n, V, args.padding_idx, key_data, position_data);
    check_launch("embedding_backward");
    std::size_t scratch_bytes = 0;
    const auto sort = [&](void* scratch) {
      HEDDLE_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, key_data, static_cast<std::uint32_t*>(keys.data()),
                                                        position_data, static_cast<std::int32_t*>(positions.data()), static_cast<int>(n), 0,
                                                        std::bit_width(static_cast<std::uint32_t>(V)), stream_of(ctx)));
    };
    sort(nullptr);
    const Buffer scratch(static_cast<std::int64_t>(scratch_bytes), ctx.device);
    sort(scratch.data());
  }
};

template <typename T, typename Out>
void scatter(const EmbeddingBackwardArgs& args, const ExecContext& ctx) {
  const std::int64_t n = args.ids.shape[0], V = args.dweight.shape[0];
  const SortedIds sorted(args, ctx);
  const ScatterTask<T, Out> task{static_cast<const std::uint32_t*>(sorted.keys.data()), static_cast<const std::int32_t*>(sorted.positions.data()),
                                 n, V, args.dout.shape[1], args.dout.as<T>(), args.dout.strides[0], args.dout.strides[1],
                                 args.dweight.as<Out>(), args.dweight.strides[0], args.dweight.strides[1], args.write == Write::accumulate};
  scatter_kernel<<<grid_for(V, 1, ctx), kBlock, 0, stream_of(ctx)>>>(task);
  check_launch("embedding_backward");
}

}  // namespace

void embedding(const EmbeddingArgs& args, const ExecContext& ctx) {
  if (args.ids.numel() == 0) return;
  const std::int64_t n = args.ids.shape[0], V = args.weight.shape[0], C = args.weight.shape[1];
  dispatch_float(args.weight.dtype, "embedding", [&](auto tag) {
    using T = typename decltype(tag)::type;
    gather_kernel<<<grid_for(n, 1, ctx), kGatherBlock, 0, stream_of(ctx)>>>(
        ids_of(args.ids), n, V, C, args.weight.as<T>(), args.weight.strides[0], args.weight.strides[1], args.out.as<T>(), args.out.strides[0],
        args.out.strides[1], fault_slot(ctx.device.index), Fault{.describe = describe_id, .limit = V});
  });
  check_launch("embedding");
}

void embedding_backward(const EmbeddingBackwardArgs& args, const ExecContext& ctx) {
  if (args.dweight.numel() == 0) return;
  if (args.ids.numel() == 0) {
    if (args.write == Write::assign) cuda::fill({.out = args.dweight}, ctx);
    return;
  }
  dispatch_float(args.dout.dtype, "embedding_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (args.dweight.dtype == args.dout.dtype) scatter<T, T>(args, ctx);
    else scatter<T, float>(args, ctx);
  });
}

}  // namespace heddle::cuda
