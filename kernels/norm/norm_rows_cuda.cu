#include "kernels/norm/norm_rows_cuda.h"

#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cstddef>
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

// Rows on their way from memory to shared memory: kAhead of them are loaded while one is worked on, which no number of registers
// would allow. A thread reads what it loaded itself, and the statistics that the first lanes of its warp loaded.
constexpr int kAhead = 2;

template <typename T>
class RowQueue {
 public:
  using Packs = Pack<T, kWide<T>>;

  static int bytes(int threads) { return kSlots * (threads * 3 * int{sizeof(Packs)} + threads / kWarp * int{sizeof(float2)}); }

  __device__ RowQueue(const NormBackwardRowsTask<T>& task, std::byte* memory, int column)
      : task_(task), packs_(reinterpret_cast<Packs*>(memory)), column_(column) {
    statistics_ = reinterpret_cast<float2*>(packs_ + kSlots * 3 * blockDim.x);
  }

  // Starts the load of row r.
  __device__ void push(std::int64_t r) {
    const int slot = pushed_++ % kSlots;
    if (r < task_.rows) {
      if (column_ < task_.N) {
        __pipeline_memcpy_async(at(slot, 0), task_.x.at(r, column_), sizeof(Packs));
        __pipeline_memcpy_async(at(slot, 1), task_.dout.at(r, column_), sizeof(Packs));
        if (task_.dsum) __pipeline_memcpy_async(at(slot, 2), task_.dsum.at(r, column_), sizeof(Packs));
      }
      float2* to = statistics(slot);
      if (threadIdx.x % kWarp == 0) __pipeline_memcpy_async(&to->x, task_.rstd + r, sizeof(float));
      if (threadIdx.x % kWarp == 1 && task_.is_layer) __pipeline_memcpy_async(&to->y, task_.mean + r, sizeof(float));
    }
    __pipeline_commit();
  }

  // Waits for the oldest row. Every thread of the warp must call it.
  __device__ void next() {
    slot_ = popped_++ % kSlots;
    __pipeline_wait_prior(kAhead);
    __syncwarp();
  }
  __device__ Packs x() const { return *at(slot_, 0); }
  __device__ Packs dout() const { return *at(slot_, 1); }
  __device__ Packs dsum() const { return *at(slot_, 2); }
  __device__ float rstd() const { return statistics(slot_)->x; }
  __device__ float mean() const { return task_.is_layer ? statistics(slot_)->y : 0.0f; }

 private:
  // One more than are loaded ahead or read: a slow lane may still read the slot before.
  static constexpr int kSlots = kAhead + 2;

  __device__ Packs* at(int slot, int which) const { return packs_ + (slot * 3 + which) * blockDim.x + threadIdx.x; }
  __device__ float2* statistics(int slot) const { return statistics_ + slot * (blockDim.x / kWarp) + threadIdx.x / kWarp; }

  const NormBackwardRowsTask<T>& task_;
  Packs* packs_;
  float2* statistics_;
  int column_, pushed_ = 0, popped_ = 0, slot_ = 0;
};

// Sums of the block's groups for every column, [N]. Every thread of the block must call it.
template <int V>
__device__ void write_columns(const float (&own)[V], int lanes, int N, float* shared, float* out) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < V; ++i) shared[threadIdx.x * V + i] = own[i];
  __syncthreads();
  for (int c = threadIdx.x; c < N; c += blockDim.x) {
    float total = 0;
    for (int first = 0; first < static_cast<int>(blockDim.x); first += lanes) total += shared[first * V + c];
    out[c] = total;
  }
}

template <typename T>
__global__ void __launch_bounds__(kMostLanes) norm_backward_rows_kernel(const __grid_constant__ NormBackwardRowsTask<T> task, int lanes) {
  constexpr int V = kWide<T>;
  __shared__ float2 sums[2 * kMostLanes / kWarp];
  extern __shared__ __align__(16) std::byte memory[];
  const int in_block = blockDim.x / lanes, group = threadIdx.x / lanes, column = threadIdx.x % lanes * V;
  const bool is_inside = column < task.N;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * in_block;
  std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * in_block + group;
  RowQueue<T> queue(task, memory, column);
  for (int i = 0; i < kAhead; ++i) queue.push(r + i * stride);
  Pack<T, V> weight;
  if (is_inside) weight = load_or(task.weight, column, 1.0f);
  float dweight[V] = {}, dbias[V] = {};
  for (int turn = 0; r - group < task.rows; r += stride, ++turn) {
    queue.push(r + kAhead * stride);
    queue.next();
    const bool is_used = is_inside && r < task.rows;
    float g[V] = {}, xhat[V] = {};
    const float rstd = queue.rstd(), mean = queue.mean();
    float2 sum = {0, 0};
    if (is_used) {
      const Pack<T, V> x = queue.x(), dout = queue.dout();
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float d = convert<float>(dout.at[i]);
        xhat[i] = (convert<float>(x.at[i]) - mean) * rstd;
        g[i] = d * convert<float>(weight.at[i]);
        sum.x += g[i];
        sum.y += g[i] * xhat[i];
        dweight[i] += d * xhat[i];
        dbias[i] += d;
      }
    }
    if (!task.dx) continue;
    sum = sum_row(sum, lanes, turn, sums);
    const float mean_g = task.is_layer ? sum.x / static_cast<float>(task.N) : 0.0f, mean_gx = sum.y / static_cast<float>(task.N);
    if (!is_used) continue;
    Pack<T, V> dsum, dx;
    if (task.dsum) dsum = queue.dsum();
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float own = rstd * (g[i] - mean_g - xhat[i] * mean_gx);
      dx.at[i] = convert<T>(task.dsum ? convert<float>(dsum.at[i]) + own : own);
    }
    store(task.dx.at(r, column), dx);
  }
  if (task.parts == nullptr) return;
  float* part = task.parts + static_cast<std::int64_t>(blockIdx.x) * 2 * task.N;
  write_columns(dweight, lanes, task.N, reinterpret_cast<float*>(memory), part);
  write_columns(dbias, lanes, task.N, reinterpret_cast<float*>(memory), part + task.N);
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
    const int shared = RowQueue<T>::bytes(shape.threads);
    HEDDLE_CUDA_CHECK(cudaFuncSetAttribute(norm_backward_rows_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    norm_backward_rows_kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shared, stream_of(ctx)>>>(task, shape.lanes);
  };
  if (args.x.dtype == DType::f32) launch(std::type_identity<float>{});
  else launch(std::type_identity<bfloat16>{});
  check_launch("norm_backward");
}

}  // namespace heddle::cuda
