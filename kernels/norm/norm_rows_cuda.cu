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

// Adds up what the warps of a block hold for the same columns, and writes it. Every thread of the block must call it.
template <int kThreads, int kPacks, int V>
__device__ void write_part(const float (&sums)[kPacks][V], int N, float* part) {
  constexpr int kGroups = kBlock / kThreads;
  if constexpr (kGroups == 1) {
    for (int p = 0; p < kPacks; ++p)
      for (int i = 0; i < V; ++i)
        if (const int column = (p * kThreads + static_cast<int>(threadIdx.x)) * V + i; column < N) part[column] = sums[p][i];
  } else {
    __shared__ float shared[kGroups][kThreads * V];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < V; ++i) shared[threadIdx.x / kThreads][threadIdx.x % kThreads * V + i] = sums[p][i];
      __syncthreads();
      const int column = p * kThreads * V + static_cast<int>(threadIdx.x);
      if (threadIdx.x >= kThreads * V || column >= N) continue;
      float total = 0;
#pragma unroll
      for (int other = 0; other < kGroups; ++other) total += shared[other][threadIdx.x];
      part[column] = total;
    }
  }
}

// Blocks a multiprocessor, so that a thread has the registers for its packs: 128, or 255 where there are more than 3.
constexpr int blocks_per_multiprocessor(int packs) { return packs <= 3 ? 2 : 1; }

template <int kThreads, int kPacks, typename T>
__global__ void __launch_bounds__(kBlock, blocks_per_multiprocessor(kPacks))
    norm_backward_rows_kernel(const __grid_constant__ NormBackwardRowsTask<T> task) {
  constexpr int V = kWide<T>;
  const Group<kThreads> group;
  const auto for_row = [&](const auto& fn) { for_packs<kThreads, kPacks, T>(task.N, group.lane, fn); };
  float dweight[kPacks][V] = {}, dbias[kPacks][V] = {};
  for (std::int64_t r = group.first; r < task.rows; r += group.stride) {
    const float rstd = task.rstd[r], mean = task.is_layer ? task.mean[r] : 0.0f;
    const auto xhat = [&](T x) { return (convert<float>(x) - mean) * rstd; };
    Pack<T, V> x[kPacks], dout[kPacks];
    float sum_g = 0, sum_gx = 0;
    for_row([&](int p, int column) {
      x[p] = load(task.x.at(r, column));
      dout[p] = load(task.dout.at(r, column));
      const Pack<T, V> weight = load_or(task.weight, column, 1.0f);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float d = convert<float>(dout[p].at[i]), g = d * convert<float>(weight.at[i]), normal = xhat(x[p].at[i]);
        sum_g += g;
        sum_gx += g * normal;
        dweight[p][i] += d * normal;
        dbias[p][i] += d;
      }
    });
    if (!task.dx) continue;
    const float mean_g = task.is_layer ? sum_group<kThreads>(sum_g) / static_cast<float>(task.N) : 0.0f;
    const float mean_gx = sum_group<kThreads>(sum_gx) / static_cast<float>(task.N);
    for_row([&](int p, int column) {
      const Pack<T, V> weight = load_or(task.weight, column, 1.0f);
      Pack<T, V> before, dx;
      if (task.dsum) before = load(task.dsum.at(r, column));
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float g = convert<float>(dout[p].at[i]) * convert<float>(weight.at[i]);
        float value = rstd * (g - mean_g - xhat(x[p].at[i]) * mean_gx);
        if (task.dsum) value += convert<float>(before.at[i]);
        dx.at[i] = convert<T>(value);
      }
      store(task.dx.at(r, column), dx);
    });
  }
  if (task.parts == nullptr) return;
  float* part = task.parts + static_cast<std::int64_t>(blockIdx.x) * 2 * task.N;
  write_part<kThreads, kPacks, V>(dweight, task.N, part);
  write_part<kThreads, kPacks, V>(dbias, task.N, part + task.N);
}

bool has_wide_rows(const ConstView& view) {
  if (!view.defined()) return true;
  const auto size = static_cast<std::int64_t>(dtype_size(view.dtype));
  const int rank = view.shape.rank();
  if (view.strides[rank - 1] != 1 || reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  return rank == 1 || view.strides[0] * size % 16 == 0;
}

// The longest row, in packs of a thread of a warp and of a block.
constexpr int kWarpPacks = 6;  // with 8 the backward spills 80 bytes (ptxas 13.0)
constexpr int kBlockPacks = 4;

bool fits(std::initializer_list<ConstView> views) {
  const ConstView& x = *views.begin();
  if (x.dtype != DType::f32 && x.dtype != DType::bf16) return false;
  const std::int64_t nbytes = x.shape[1] * static_cast<std::int64_t>(dtype_size(x.dtype));
  return nbytes % 16 == 0 && nbytes <= 16 * kBlock * kBlockPacks && std::all_of(views.begin(), views.end(), has_wide_rows);
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
  std::int64_t chunks = 0;
  with_rows(args.x, [&](auto threads, auto packs, auto) {
    const std::int64_t most = std::int64_t{blocks_per_multiprocessor(packs)} * device_info(ctx.device.index).multiprocessors;
    chunks = std::min((args.x.shape[0] + Group<threads>::kInBlock - 1) / Group<threads>::kInBlock, most);
  });
  return chunks;
}

void norm_backward_rows(const NormBackwardArgs& args, const NormParts& parts, const ExecContext& ctx) {
  with_rows(args.x, [&](auto threads, auto packs, auto tag) {
    using T = typename decltype(tag)::type;
    const bool is_layer = args.kind == NormKind::layer;
    const NormBackwardRowsTask<T> task{is_layer, args.x.shape[0], static_cast<int>(args.x.shape[1]), rows_of<const T>(args.x),
                                       rows_of<const T>(args.dout), rows_of<const T>(args.dsum), rows_of<T>(args.dx),
                                       data_of<T>(args.weight), is_layer ? args.mean.as<float>() : nullptr, args.rstd.as<float>(),
                                       parts.data};
    norm_backward_rows_kernel<threads, packs><<<static_cast<unsigned>(parts.chunks), kBlock, 0, stream_of(ctx)>>>(task);
  });
  check_launch("norm_backward");
}

}  // namespace heddle::cuda
