#include <algorithm>
#include <array>

#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/reduce/reduce.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/group.cuh"
#include "kernels/runtime/strided.cuh"

namespace heddle::cuda {
namespace {

// Terms worth a task of their own, tasks that fill the card, and the most tasks that one sum is cut into.
constexpr std::int64_t kTaskTerms = 512;
constexpr std::int64_t kEnoughTasks = 2048;
constexpr std::int64_t kMostSplits = 512;
// Rows a block of column sums reads at once.
constexpr int kColumnRows = kBlock / kWarp;

// Sums over `reduced` for every element of `kept`, which walks input and output. Split s of S sums the terms
// [terms s / S, terms (s + 1) / S) of every output; with S > 1 the sums go to partial [S, outputs] instead of to out.
// The dtype of the outputs is a run-time value: there is one write for many reads, and a kernel for each pair of dtypes would cost
// minutes to compile.
template <typename T>
struct SumTask {
  using A = accumulate_t<T>;
  const T* x;
  Walk<2> kept;
  Walk<1> reduced;
  std::int64_t splits;
  A* partial;
  void* out;
  DType out_dtype;
  A factor;
  bool accumulates;

  __device__ std::int64_t first_term(std::int64_t split) const { return reduced.count * split / splits; }

  // Terms from, from + step, ... below `to`, in eight interleaved sums so that eight loads are under way.
  template <typename Read>
  __device__ static A sum_terms(std::int64_t from, std::int64_t to, int step, const Read& term) {
    constexpr int kLanes = 8;
    A lanes[kLanes] = {};
    std::int64_t i = from;
    for (; i + (kLanes - 1) * step < to; i += kLanes * step)
#pragma unroll
      for (int k = 0; k < kLanes; ++k) lanes[k] += term(i + k * step);
    for (; i < to; i += step) lanes[0] += term(i);
#pragma unroll
    for (int width = kLanes / 2; width > 0; width /= 2)
#pragma unroll
      for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
    return lanes[0];
  }

  __device__ A sum_terms(std::int64_t base, std::int64_t from, std::int64_t to, int step) const {
    const T* start = x + base;
    const std::int64_t stride = reduced.step[0][0];
    if (reduced.rank == 1) return sum_terms(from, to, step, [=](std::int64_t i) { return convert<A>(start[i * stride]); });
    A sum = 0;
#pragma unroll 1
    for (std::int64_t i = from; i < to; i += step) {
      std::int64_t at[1];
      reduced.locate(i, at);
      sum += convert<A>(start[at[0]]);
    }
    return sum;
  }

  __device__ void finish(std::int64_t output, std::int64_t split, std::int64_t offset, A sum) const {
    if (partial != nullptr) {
      partial[split * kept.count + output] = sum;
      return;
    }
    switch (out_dtype) {
      case DType::f64: return put<double>(offset, sum);
      case DType::f32: return put<float>(offset, sum);
      case DType::bf16: return put<bfloat16>(offset, sum);
      default: return put<float16>(offset, sum);
    }
  }

  template <typename Out>
  __device__ void put(std::int64_t offset, A sum) const {
    Out& to = static_cast<Out*>(out)[offset];
    const A before = accumulates ? convert<A>(to) : A(0);
    to = convert<Out>(before + factor * sum);
  }
};

// A group an output and split: for terms that lie along the smaller stride.
template <int kThreads, typename T>
__global__ void sum_rows_kernel(const __grid_constant__ SumTask<T> task) {
  const Group<kThreads> group;
  for (std::int64_t i = group.first; i < task.kept.count * task.splits; i += group.stride) {
    const std::int64_t output = i % task.kept.count, split = i / task.kept.count;
    std::int64_t at[2];
    task.kept.locate(output, at);
    const auto own = task.sum_terms(at[0], task.first_term(split) + group.lane, task.first_term(split + 1), kThreads);
    const auto sum = sum_group<kThreads>(own);
    if (group.lane == 0) task.finish(output, split, at[1], sum);
  }
}

// A thread an output, kColumnRows threads sharing its terms: for outputs that lie along the smaller stride.
template <typename T>
__global__ void sum_columns_kernel(const __grid_constant__ SumTask<T> task) {
  using A = accumulate_t<T>;
  __shared__ A sums[kColumnRows][kWarp];
  const int column = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  const std::int64_t split = blockIdx.y;
  for (std::int64_t tile = blockIdx.x; tile * kWarp < task.kept.count; tile += gridDim.x) {
    const std::int64_t output = tile * kWarp + column;
    const bool is_inside = output < task.kept.count;
    std::int64_t at[2] = {};
    if (is_inside) {
      task.kept.locate(output, at);
      sums[row][column] = task.sum_terms(at[0], task.first_term(split) + row, task.first_term(split + 1), kColumnRows);
    }
    __syncthreads();
    if (row == 0 && is_inside) {
      A sum = sums[0][column];
      for (int r = 1; r < kColumnRows; ++r) sum += sums[r][column];
      task.finish(output, split, at[1], sum);
    }
    __syncthreads();
  }
}

// The same for columns of a dense, aligned matrix: a thread has kWide neighbouring outputs, one load a term.
template <typename T>
__global__ void sum_wide_columns_kernel(const __grid_constant__ SumTask<T> task) {
  using A = accumulate_t<T>;
  constexpr int V = kWide<T>, kTile = kWarp * V;
  __shared__ A sums[kColumnRows][kTile];
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  const std::int64_t split = blockIdx.y, first = static_cast<std::int64_t>(blockIdx.x) * kTile, own = first + lane * V;
  A sum[V] = {};
  if (own < task.kept.count) {
    const T* x = task.x + own;
    const std::int64_t stride = task.reduced.step[0][0], to = task.first_term(split + 1);
#pragma unroll 8
    for (std::int64_t i = task.first_term(split) + row; i < to; i += kColumnRows) {
      const auto pack = *reinterpret_cast<const Pack<T, V>*>(x + i * stride);
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] += convert<A>(pack.at[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < V; ++k) sums[row][lane * V + k] = sum[k];
  __syncthreads();
  for (int c = threadIdx.x; c < kTile && first + c < task.kept.count; c += kBlock) {
    A total = sums[0][c];
    for (int r = 1; r < kColumnRows; ++r) total += sums[r][c];
    task.finish(first + c, split, (first + c) * task.kept.step[1][0], total);
  }
}

// Terms worth a task of their own there.
constexpr std::int64_t kWideTaskTerms = 128;

template <typename T>
bool has_wide_columns(const T* x, const StridedLoop<2>& kept, const StridedLoop<1>& reduced) {
  if (!std::is_same_v<T, float> && !std::is_same_v<T, bfloat16>) return false;
  return kept.shape.rank() == 1 && reduced.shape.rank() == 1 && kept.inner_stride(0) == 1 && kept.inner_size() % kWide<T> == 0 &&
         reduced.inner_stride(0) % kWide<T> == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
}

// Runs one sum; where the outputs alone do not fill the card, in two stages.
template <typename T>
void sum_over(const T* x, const StridedLoop<2>& kept, const StridedLoop<1>& reduced, const SumArgs& args, bool may_split, const ExecContext& ctx) {
  using A = accumulate_t<T>;
  const std::int64_t outputs = kept.shape.numel(), terms = reduced.shape.numel();
  const bool is_rows = reduced.inner_size() > 1 && (kept.inner_size() == 1 || reduced.inner_stride(0) < kept.inner_stride(0));
  const bool is_wide = !is_rows && has_wide_columns(x, kept, reduced);
  const std::int64_t tile = is_rows ? 1 : (is_wide ? kWarp * kWide<T> : kWarp), tasks = (outputs + tile - 1) / tile;
  const std::int64_t most = std::clamp<std::int64_t>(terms / (is_wide ? kWideTaskTerms : kTaskTerms), 1, kMostSplits);
  const std::int64_t splits = may_split ? std::clamp<std::int64_t>(kEnoughTasks / tasks, 1, most) : 1;
  Buffer partial;
  if (splits > 1) partial = Buffer(splits * outputs * static_cast<std::int64_t>(sizeof(A)), ctx.device);
  const SumTask<T> task{x, Walk<2>(kept), Walk<1>(reduced), splits, static_cast<A*>(partial.data()), args.out.data, args.out.dtype,
                        static_cast<A>(args.factor), args.write == Write::accumulate};
  if (is_rows) {
    with_group(terms / splits, [&](auto threads) {
      const int grid = grid_for(outputs * splits, Group<threads>::kInBlock, ctx);
      sum_rows_kernel<threads><<<grid, kBlock, 0, stream_of(ctx)>>>(task);
    });
  } else if (is_wide) {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, bfloat16>) {
      const dim3 grid(static_cast<unsigned>(tasks), static_cast<unsigned>(splits));
      sum_wide_columns_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(task);
    }
  } else {
    const dim3 grid(grid_for(tasks, 1, ctx), static_cast<unsigned>(splits));
    sum_columns_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(task);
  }
  check_launch("sum");
  if (splits == 1) return;
  const StridedLoop<2> kept_partial(kept.shape, {contiguous_strides(kept.shape), kept.strides[1]});
  const StridedLoop<1> over_splits({splits}, {Shape{outputs}});
  sum_over<A>(task.partial, kept_partial, over_splits, args, /*may_split=*/false, ctx);
}

template <typename T>
void sum_typed(const SumArgs& args, const ExecContext& ctx) {
  Shape kept, kept_from, kept_to, reduced, reduced_from;
  for (int d = 0; d < args.x.shape.rank(); ++d) {
    if (args.out.shape[d] == 1 && args.x.shape[d] != 1) {
      reduced.push_back(args.x.shape[d]), reduced_from.push_back(args.x.strides[d]);
    } else {
      kept.push_back(args.x.shape[d]), kept_from.push_back(args.x.strides[d]), kept_to.push_back(args.out.strides[d]);
    }
  }
  sum_over<T>(args.x.as<T>(), {kept, {kept_from, kept_to}}, {reduced, {reduced_from}}, args, /*may_split=*/true, ctx);
}

// A value of a slice and where it is. The largest wins, NaN above all, and the first of equals.
template <typename A>
struct Best {
  A value;
  std::int64_t index;

  __device__ bool beats(const Best& other) const {
    const bool is_nan = value != value, other_is_nan = other.value != other.value;
    if (is_nan != other_is_nan) return is_nan;
    if (value > other.value) return true;
    return (is_nan || value == other.value) && index < other.index;
  }
};

// A warp a slice.
template <typename T>
__global__ void max_kernel(const __grid_constant__ Walk<3> walk, const T* x, std::int64_t size, std::int64_t along, T* out,
                           std::int64_t* index) {
  using A = accumulate_t<T>;
  const Group<kWarp> group;
  for (std::int64_t slice = group.first; slice < walk.count; slice += group.stride) {
    std::int64_t at[3];
    walk.locate(slice, at);
    // A lane beyond the slice starts from its first element, which changes nothing.
    const std::int64_t start = group.lane < size ? group.lane : 0;
    Best<A> best{convert<A>(x[at[0] + start * along]), start};
    for (std::int64_t i = start + kWarp; i < size; i += kWarp) {
      const Best<A> candidate{convert<A>(x[at[0] + i * along]), i};
      if (candidate.beats(best)) best = candidate;
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const Best<A> other{__shfl_xor_sync(0xFFFFFFFFu, best.value, step), __shfl_xor_sync(0xFFFFFFFFu, best.index, step)};
      if (other.beats(best)) best = other;
    }
    if (group.lane != 0) continue;
    out[at[1]] = x[at[0] + best.index * along];
    index[at[2]] = best.index;
  }
}

template <typename T>
__global__ void max_backward_kernel(const __grid_constant__ Walk<3> walk, const T* dout, const std::int64_t* index, std::int64_t along,
                                    T* dx) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t slice = first; slice < walk.count; slice += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t at[3];
    walk.locate(slice, at);
    dx[at[0] + index[at[2]] * along] = dout[at[1]];
  }
}

}  // namespace

void sum(const SumArgs& args, const ExecContext& ctx) {
  if (args.out.numel() == 0) return;
  dispatch_float(args.x.dtype, "sum", [&](auto tag) { sum_typed<typename decltype(tag)::type>(args, ctx); });
}

void max(const MaxArgs& args, const ExecContext& ctx) {
  if (args.out.numel() == 0) return;
  dispatch_float(args.x.dtype, "max", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Walk<3> walk(StridedLoop<3>(without_dim(args.x.shape, args.dim),
                                      {without_dim(args.x.strides, args.dim), without_dim(args.out.strides, args.dim),
                                       without_dim(args.index.strides, args.dim)}));
    max_kernel<<<grid_for(walk.count, Group<kWarp>::kInBlock, ctx), kBlock, 0, stream_of(ctx)>>>(
        walk, args.x.as<T>(), args.x.shape[args.dim], args.x.strides[args.dim], args.out.as<T>(), args.index.as<std::int64_t>());
  });
  check_launch("max");
}

void max_backward(const MaxBackwardArgs& args, const ExecContext& ctx) {
  if (args.dx.numel() == 0) return;
  cuda::fill({.out = args.dx}, ctx);
  const Walk<3> walk(StridedLoop<3>(without_dim(args.dx.shape, args.dim),
                                    {without_dim(args.dx.strides, args.dim), without_dim(args.dout.strides, args.dim),
                                     without_dim(args.index.strides, args.dim)}));
  dispatch_float(args.dx.dtype, "max_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    max_backward_kernel<<<grid_for(walk.count, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(
        walk, args.dout.as<T>(), args.index.as<std::int64_t>(), args.dx.strides[args.dim], args.dx.as<T>());
  });
  check_launch("max_backward");
}

}  // namespace heddle::cuda
