#include "kernels/norm/norm_rows_cuda.h"

#include <algorithm>
#include <initializer_list>

#include "kernels/runtime/group.cuh"

namespace heddle::cuda {
namespace {

// Calls fn(p, column) for the packs of a row that are this thread's: the p-th starts at `column`.
template <int kThreads, int kPacks, typename T, typename Fn>
__device__ void for_packs(int N, int lane, const Fn& fn) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (p * kThreads + lane) * kWide<T>;
    if (column < N) fn(p, column);
  }
}

template <typename T>
__device__ Pack<T, kWide<T>> load(const T* from) {
  return *reinterpret_cast<const Pack<T, kWide<T>>*>(from);
}

template <typename T>
__device__ void store(T* to, const Pack<T, kWide<T>>& pack) {
  *reinterpret_cast<Pack<T, kWide<T>>*>(to) = pack;
}

// Part of an optional vector; `absent` throughout where there is none.
template <typename T>
__device__ Pack<T, kWide<T>> load_or(const T* vector, int column, float absent) {
  if (vector != nullptr) return load(vector + column);
  Pack<T, kWide<T>> pack;
#pragma unroll
  for (int i = 0; i < kWide<T>; ++i) pack.at[i] = convert<T>(absent);
  return pack;
}

// A matrix with dense rows; null where an optional one is absent.
template <typename T>
struct Rows {
  T* data = nullptr;
  std::int64_t stride = 0;

  __device__ T* at(std::int64_t r, int column) const { return data + r * stride + column; }
  __device__ explicit operator bool() const { return data != nullptr; }
};

template <typename T, typename View>
Rows<T> rows_of(const View& view) {
  if (!view.defined()) return {};
  return {view.template as<std::remove_const_t<T>>(), view.strides[0]};
}

template <typename T>
const T* data_of(const ConstView& vector) {
  return vector.defined() ? vector.as<T>() : nullptr;
}

template <typename T>
struct NormRowsTask {
  bool is_layer;
  std::int64_t rows;
  int N;
  Rows<const T> x, residual;
  Rows<T> sum, out;
  const T* weight;
  const T* bias;
  float* mean;
  float* rstd;
  float eps;
};

template <int kThreads, int kPacks, typename T>
__global__ void __launch_bounds__(kBlock) norm_rows_kernel(const __grid_constant__ NormRowsTask<T> task) {
  constexpr int V = kWide<T>;
  const Group<kThreads> group;
  const auto for_row = [&](const auto& fn) { for_packs<kThreads, kPacks, T>(task.N, group.lane, fn); };
  for (std::int64_t r = group.first; r < task.rows; r += group.stride) {
    float x[kPacks][V], total = 0, square = 0;
    for_row([&](int p, int column) {
      Pack<T, V> pack = load(task.x.at(r, column));
      if (task.residual) {
        const Pack<T, V> other = load(task.residual.at(r, column));
#pragma unroll
        for (int i = 0; i < V; ++i) pack.at[i] = convert<T>(convert<float>(pack.at[i]) + convert<float>(other.at[i]));
        store(task.sum.at(r, column), pack);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) total += x[p][i] = convert<float>(pack.at[i]);
    });
    const float mean = task.is_layer ? sum_group<kThreads>(total) / static_cast<float>(task.N) : 0.0f;
    for_row([&](int p, int) {
#pragma unroll
      for (int i = 0; i < V; ++i) square += (x[p][i] - mean) * (x[p][i] - mean);
    });
    const float rstd = 1.0f / sqrtf(sum_group<kThreads>(square) / static_cast<float>(task.N) + task.eps);
    for_row([&](int p, int column) {
      const Pack<T, V> weight = load_or(task.weight, column, 1.0f), bias = load_or(task.bias, column, 0.0f);
      Pack<T, V> out;
#pragma unroll
      for (int i = 0; i < V; ++i)
        out.at[i] = convert<T>((x[p][i] - mean) * rstd * convert<float>(weight.at[i]) + convert<float>(bias.at[i]));
      store(task.out.at(r, column), out);
    });
    if (group.lane != 0) continue;
    task.rstd[r] = rstd;
    if (task.is_layer) task.mean[r] = mean;
  }
}

template <typename T>
struct NormBackwardRowsTask {
  bool is_layer;
  std::int64_t rows;
  int N;
  Rows<const T> x, dout, dsum;
  Rows<T> dx;
  const T* weight;
  const float* mean;
  const float* rstd;
  float* parts;
};

// A row is `lanes` threads, whole warps, with one pack each; a block has blockDim.x / lanes rows at a time.
constexpr int kMostLanes = 512;  // leaves a thread 128 registers
constexpr int kBackwardBlock = 256;  // threads of a block whose rows are short

// Sums of two values over the threads of a row. `shared` [2][warps of the block]; which half it uses alternates with `turn`, so that
// one barrier is enough. Every thread of the block must call it.
__device__ float2 sum_row(float2 value, int lanes, int turn, float2* shared) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value.x += __shfl_xor_sync(0xFFFFFFFFu, value.x, step);
    value.y += __shfl_xor_sync(0xFFFFFFFFu, value.y, step);
  }
  if (lanes == kWarp) return value;
  float2* sums = shared + turn % 2 * (kMostLanes / kWarp);
  const int warp = threadIdx.x / kWarp, warps = lanes / kWarp, first = warp / warps * warps;
  if (threadIdx.x % kWarp == 0) sums[warp] = value;
  __syncthreads();
  value = sums[first];
  for (int i = 1; i < warps; ++i) {
    value.x += sums[first + i].x;
    value.y += sums[first + i].y;
  }
  return value;
}

// The packs of one row that a thread needs.
template <typename T>
struct BackwardPacks {
  Pack<T, kWide<T>> x, dout, dsum;
  float mean = 0, rstd = 0;

  __device__ void load_row(const NormBackwardRowsTask<T>& task, std::int64_t r, int column) {
    if (r >= task.rows || column >= task.N) return;
    x = load(task.x.at(r, column));
    dout = load(task.dout.at(r, column));
    if (task.dsum) dsum = load(task.dsum.at(r, column));
    rstd = task.rstd[r];
    if (task.is_layer) mean = task.mean[r];
  }
};

// The next row is loaded while this one is worked on.
template <typename T>
__global__ void __launch_bounds__(kMostLanes) norm_backward_rows_kernel(const __grid_constant__ NormBackwardRowsTask<T> task, int lanes) {
  constexpr int V = kWide<T>;
  __shared__ float2 shared[2 * kMostLanes / kWarp];
  extern __shared__ float columns[];
  const int in_block = blockDim.x / lanes, group = threadIdx.x / lanes, column = threadIdx.x % lanes * V;
  const bool is_inside = column < task.N;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * in_block;
  Pack<T, V> weight;
  if (is_inside) weight = load_or(task.weight, column, 1.0f);
  float dweight[V] = {}, dbias[V] = {};
  BackwardPacks<T> row, next;
  std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * in_block;
  next.load_row(task, first + group, column);
  for (int turn = 0; first < task.rows; first += stride, ++turn) {
    const std::int64_t r = first + group;
    const bool is_used = is_inside && r < task.rows;
    row = next;
    next.load_row(task, r + stride, column);
    float g[V], xhat[V];
    float2 sums = {0, 0};
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float d = is_used ? convert<float>(row.dout.at[i]) : 0.0f;
      xhat[i] = is_used ? (convert<float>(row.x.at[i]) - row.mean) * row.rstd : 0.0f;
      g[i] = is_used ? d * convert<float>(weight.at[i]) : 0.0f;
      sums.x += g[i];
      sums.y += g[i] * xhat[i];
      dweight[i] += d * xhat[i];
      dbias[i] += d;
    }
    if (!task.dx) continue;
    sums = sum_row(sums, lanes, turn, shared);
    const float mean_g = task.is_layer ? sums.x / static_cast<float>(task.N) : 0.0f, mean_gx = sums.y / static_cast<float>(task.N);
    if (!is_used) continue;
    Pack<T, V> dx;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float own = row.rstd * (g[i] - mean_g - xhat[i] * mean_gx);
      dx.at[i] = convert<T>(task.dsum ? convert<float>(row.dsum.at[i]) + own : own);
    }
    store(task.dx.at(r, column), dx);
  }
  if (task.parts == nullptr) return;
  float* part = task.parts + static_cast<std::int64_t>(blockIdx.x) * 2 * task.N;
  const auto write = [&](const float (&own)[V], float* to) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; ++i) columns[threadIdx.x * V + i] = own[i];
    __syncthreads();
    for (int c = threadIdx.x; c < task.N; c += blockDim.x) {
      float total = 0;
      for (int other = 0; other < in_block; ++other) total += columns[other * lanes * V + c];
      to[c] = total;
    }
  };
  write(dweight, part);
  write(dbias, part + task.N);
}

// The shape of that launch.
struct BackwardLaunch {
  int lanes, threads;
  std::int64_t blocks;

  BackwardLaunch(const ConstView& x, const ExecContext& ctx) {
    const std::int64_t nbytes = x.shape[1] * static_cast<std::int64_t>(dtype_size(x.dtype)), warp_bytes = 16 * kWarp;
    lanes = static_cast<int>((nbytes + warp_bytes - 1) / warp_bytes) * kWarp;
    const int in_block = std::max(1, kBackwardBlock / lanes);
    threads = in_block * lanes;
    // Up to 4 blocks a multiprocessor: enough loads under way, and few parts to add up.
    const std::int64_t most = std::int64_t{std::clamp(1024 / threads, 1, 4)} * device_info(ctx.device.index).multiprocessors;
    blocks = std::min((x.shape[0] + in_block - 1) / in_block, most);
  }
};

bool has_wide_rows(const ConstView& view) {
  if (!view.defined()) return true;
  const auto size = static_cast<std::int64_t>(dtype_size(view.dtype));
  const int rank = view.shape.rank();
  if (view.strides[rank - 1] != 1 || reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  return rank == 1 || view.strides[0] * size % 16 == 0;
}

// The longest row, in packs of a thread, where a warp or a block has it.
constexpr int kWarpPacks = 6;
constexpr int kBlockPacks = kMostLanes / kBlock;

bool fits(std::initializer_list<ConstView> views) {
  const ConstView& x = *views.begin();
  if (x.dtype != DType::f32 && x.dtype != DType::bf16) return false;
  const std::int64_t nbytes = x.shape[1] * static_cast<std::int64_t>(dtype_size(x.dtype));
  return nbytes % 16 == 0 && nbytes <= 16 * kMostLanes && std::all_of(views.begin(), views.end(), has_wide_rows);
}

// Calls fn(kThreads, kPacks, T) as types for rows like those of x.
template <typename Fn>
void with_rows(const ConstView& x, const Fn& fn) {
  const auto with_type = [&](auto tag) {
    const std::int64_t packs = (x.shape[1] / kWide<typename decltype(tag)::type> + kWarp - 1) / kWarp;
    const auto call = [&](auto threads, auto count) { fn(threads, count, tag); };
    if (packs <= 1) call(std::integral_constant<int, kWarp>{}, std::integral_constant<int, 1>{});
    else if (packs <= 3) call(std::integral_constant<int, kWarp>{}, std::integral_constant<int, 3>{});
    else if (packs <= kWarpPacks) call(std::integral_constant<int, kWarp>{}, std::integral_constant<int, kWarpPacks>{});
    else call(std::integral_constant<int, kBlock>{}, std::integral_constant<int, kBlockPacks>{});
  };
  if (x.dtype == DType::f32) with_type(std::type_identity<float>{});
  else with_type(std::type_identity<bfloat16>{});
}

}  // namespace

bool norm_rows(const NormArgs& args, const ExecContext& ctx) {
  if (!fits({args.x, args.residual, args.sum, args.out, args.weight, args.bias})) return false;
  with_rows(args.x, [&](auto threads, auto packs, auto tag) {
    using T = typename decltype(tag)::type;
    const bool is_layer = args.kind == NormKind::layer;
    const NormRowsTask<T> task{is_layer, args.x.shape[0], static_cast<int>(args.x.shape[1]), rows_of<const T>(args.x),
                               rows_of<const T>(args.residual), rows_of<T>(args.sum), rows_of<T>(args.out), data_of<T>(args.weight),
                               data_of<T>(args.bias), is_layer ? args.mean.as<float>() : nullptr, args.rstd.as<float>(),
                               static_cast<float>(args.eps)};
    const int grid = grid_for(task.rows, Group<threads>::kInBlock, ctx);
    norm_rows_kernel<threads, packs><<<grid, kBlock, 0, stream_of(ctx)>>>(task);
  });
  check_launch("norm");
  return true;
}

std::int64_t norm_row_chunks(const NormBackwardArgs& args, const ExecContext& ctx) {
  if (args.x.numel() == 0 || !fits({args.x, args.dout, args.dsum, args.dx, args.weight})) return 0;
  return BackwardLaunch(args.x, ctx).blocks;
}

void norm_backward_rows(const NormBackwardArgs& args, float* parts, const ExecContext& ctx) {
  const BackwardLaunch shape(args.x, ctx);
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool is_layer = args.kind == NormKind::layer;
    const NormBackwardRowsTask<T> task{is_layer, args.x.shape[0], static_cast<int>(args.x.shape[1]), rows_of<const T>(args.x),
                                       rows_of<const T>(args.dout), rows_of<const T>(args.dsum), rows_of<T>(args.dx),
                                       data_of<T>(args.weight), is_layer ? args.mean.as<float>() : nullptr, args.rstd.as<float>(), parts};
    const std::size_t shared = static_cast<std::size_t>(shape.threads) * kWide<T> * sizeof(float);
    norm_backward_rows_kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shared, stream_of(ctx)>>>(task, shape.lanes);
  };
  if (args.x.dtype == DType::f32) launch(std::type_identity<float>{});
  else launch(std::type_identity<bfloat16>{});
  check_launch("norm_backward");
}

}  // namespace heddle::cuda
