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

template <typename T>
struct GatherTask {
  Ids ids;
  std::int64_t n, V, C;
  const T* weight;
  std::int64_t weight_row, weight_column;
  T* out;
  std::int64_t out_row, out_column;
};

// A block a row, `width` elements a thread at a time. An id outside [0, V) gives a row of NaN and a fault.
template <int width, typename T>
__global__ void gather_kernel(const __grid_constant__ GatherTask<T> task, FaultSlot faults, Fault fault) {
  for (std::int64_t i = blockIdx.x; i < task.n; i += gridDim.x) {
    const std::int64_t id = task.ids.at(i);
    const bool is_inside = id >= 0 && id < task.V;
    if (!is_inside && threadIdx.x == 0) {
      fault.value = id;
      fault.position = i;
      report(faults, fault);
    }
    const T* from = task.weight + (is_inside ? id : 0) * task.weight_row;
    T* to = task.out + i * task.out_row;
    for (std::int64_t c = width * threadIdx.x; c < task.C; c += width * kGatherBlock) {
      Pack<T, width> pack;
      if (is_inside) pack = *reinterpret_cast<const Pack<T, width>*>(from + c * task.weight_column);
      else
        for (T& value : pack.at) value = convert<T>(nanf(""));
      *reinterpret_cast<Pack<T, width>*>(to + c * task.out_column) = pack;
    }
  }
}

// Whether the rows of a matrix are made of packs: dense, and aligned to them.
bool has_packs(const ConstView& matrix, int width) {
  return matrix.strides[1] == 1 && matrix.shape[1] % width == 0 && matrix.strides[0] % width == 0 &&
         reinterpret_cast<std::uintptr_t>(matrix.data) % (width * dtype_size(matrix.dtype)) == 0;
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

// Where the run of keys equal to keys[from] ends: most runs are short, so the next few keys are looked at first.
__device__ std::int64_t end_of_run(const std::uint32_t* keys, std::int64_t from, std::int64_t n) {
  constexpr int kNear = 8;
  const std::uint32_t key = keys[from];
  std::int64_t to = from + 1;
  for (; to < n && keys[to] == key; ++to) {
    if (to < from + kNear) continue;
    std::int64_t end = n;
    while (to < end) {
      const std::int64_t middle = (to + end) / 2;
      if (keys[middle] == key) to = middle + 1;
      else end = middle;
    }
    return end;
  }
  return to;
}

constexpr int kColumns = 32;
constexpr int kRows = kBlock / kColumns;
// Places of the sorted list that a block looks at.
constexpr int kPlaces = 8;

template <typename T, typename Out>
struct ScatterTask {
  const std::uint32_t* keys;      // [n], ascending
  const std::int32_t* positions;  // [n], ascending where keys are equal
  std::int64_t n, V, C;
  const T* dout;
  std::int64_t dout_row, dout_column;
  Out* dweight;
  std::int64_t dweight_row, dweight_column;
};

// Adds to the row of every id whose run of equal keys starts at one of a block's places. blockIdx.y chooses kColumns columns of
// `width` elements; kRows threads share the run.
template <int width, typename T, typename Out>
__global__ void scatter_kernel(const __grid_constant__ ScatterTask<T, Out> task) {
  using A = accumulate_t<T>;
  __shared__ A sums[kRows][kColumns * width];
  const int column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  const std::int64_t tile = std::int64_t{blockIdx.y} * kColumns * width, c = tile + column * width;
  const std::int64_t last = min((static_cast<std::int64_t>(blockIdx.x) + 1) * kPlaces, task.n);
  for (std::int64_t from = static_cast<std::int64_t>(blockIdx.x) * kPlaces; from < last; ++from) {
    const std::uint32_t id = task.keys[from];
    if (id >= task.V || (from > 0 && task.keys[from - 1] == id)) continue;
    const std::int64_t to = end_of_run(task.keys, from, task.n);
    A sum[width] = {};
    if (c < task.C) {
#pragma unroll 4
      for (std::int64_t i = from + row; i < to; i += kRows) {
        const auto pack = *reinterpret_cast<const Pack<T, width>*>(task.dout + task.positions[i] * task.dout_row + c * task.dout_column);
#pragma unroll
        for (int k = 0; k < width; ++k) sum[k] += convert<A>(pack.at[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < width; ++k) sums[row][column * width + k] = sum[k];
    __syncthreads();
    for (int k = threadIdx.x; k < kColumns * width && tile + k < task.C; k += kBlock) {
      A total = 0;
      for (int other = 0; other < kRows; ++other) total += sums[other][k];
      Out& out = task.dweight[id * task.dweight_row + (tile + k) * task.dweight_column];
      out = convert<Out>(convert<A>(out) + total);
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
  if (args.write == Write::assign) cuda::fill({.out = args.dweight}, ctx);
  const ScatterTask<T, Out> task{static_cast<const std::uint32_t*>(sorted.keys.data()), static_cast<const std::int32_t*>(sorted.positions.data()),
                                 n, V, args.dout.shape[1], args.dout.as<T>(), args.dout.strides[0], args.dout.strides[1],
                                 args.dweight.as<Out>(), args.dweight.strides[0], args.dweight.strides[1]};
  const auto launch = [&](auto width) {
    const std::int64_t tile = kColumns * width;
    const dim3 grid(static_cast<unsigned>((n + kPlaces - 1) / kPlaces), static_cast<unsigned>((task.C + tile - 1) / tile));
    scatter_kernel<width><<<grid, kBlock, 0, stream_of(ctx)>>>(task);
  };
  if (has_packs(args.dout, kWide<T>)) launch(std::integral_constant<int, kWide<T>>{});
  else launch(std::integral_constant<int, 1>{});
  check_launch("embedding_backward");
}

}  // namespace

void embedding(const EmbeddingArgs& args, const ExecContext& ctx) {
  if (args.ids.numel() == 0) return;
  const std::int64_t n = args.ids.shape[0], V = args.weight.shape[0], C = args.weight.shape[1];
  dispatch_float(args.weight.dtype, "embedding", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GatherTask<T> task{ids_of(args.ids), n, V, C, args.weight.as<T>(), args.weight.strides[0], args.weight.strides[1],
                             args.out.as<T>(), args.out.strides[0], args.out.strides[1]};
    const FaultSlot faults = fault_slot(ctx.device.index);
    const Fault fault{.describe = describe_id, .limit = V};
    const int grid = grid_for(n, 1, ctx);
    if (has_packs(args.weight, kWide<T>) && has_packs(args.out, kWide<T>))
      gather_kernel<kWide<T>><<<grid, kGatherBlock, 0, stream_of(ctx)>>>(task, faults, fault);
    else gather_kernel<1><<<grid, kGatherBlock, 0, stream_of(ctx)>>>(task, faults, fault);
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
