#include <algorithm>

#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_rows_cuda.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/group.cuh"

namespace heddle::cuda {
namespace {

// A view of rank 1 or 2 on the device; `data` is null for an optional one that is absent.
template <typename T>
struct Matrix {
  T* data = nullptr;
  std::int64_t row = 0, column = 0;  // strides

  __device__ T& at(std::int64_t r, std::int64_t c) const { return data[r * row + c * column]; }
};

template <typename T>
Matrix<const T> matrix(const ConstView& view) {
  if (!view.defined()) return {};
  return {view.as<T>(), view.shape.rank() == 2 ? view.strides[0] : 0, view.strides[view.shape.rank() - 1]};
}

template <typename T>
Matrix<T> matrix(const MutView& view) {
  if (!view.defined()) return {};
  return {view.as<T>(), view.shape.rank() == 2 ? view.strides[0] : 0, view.strides[view.shape.rank() - 1]};
}

template <typename T>
struct NormTask {
  using A = accumulate_t<T>;
  bool is_layer;
  std::int64_t rows, N;
  Matrix<const T> x, weight, bias;
  Matrix<T> out;
  A* mean;
  A* rstd;
  A eps;
};

// A group a row, which is read three times: once from memory, then from the cache.
template <int kThreads, typename T>
__global__ void norm_kernel(const NormTask<T> task) {
  using A = accumulate_t<T>;
  const Group<kThreads> group;
  for (std::int64_t r = group.first; r < task.rows; r += group.stride) {
    const auto x = [&](std::int64_t c) { return convert<A>(task.x.at(r, c)); };
    A mean = 0, square = 0;
    if (task.is_layer) {
      for (std::int64_t c = group.lane; c < task.N; c += kThreads) mean += x(c);
      mean = sum_group<kThreads>(mean) / static_cast<A>(task.N);
    }
    for (std::int64_t c = group.lane; c < task.N; c += kThreads) square += (x(c) - mean) * (x(c) - mean);
    const A rstd = A(1) / sqrt(sum_group<kThreads>(square) / static_cast<A>(task.N) + task.eps);
    for (std::int64_t c = group.lane; c < task.N; c += kThreads) {
      const A weight = task.weight.data != nullptr ? convert<A>(task.weight.at(0, c)) : A(1);
      const A bias = task.bias.data != nullptr ? convert<A>(task.bias.at(0, c)) : A(0);
      task.out.at(r, c) = convert<T>((x(c) - mean) * rstd * weight + bias);
    }
    if (group.lane != 0) continue;
    task.rstd[r] = rstd;
    if (task.is_layer) task.mean[r] = mean;
  }
}

template <typename T>
struct NormBackwardTask {
  using A = accumulate_t<T>;
  bool is_layer;
  std::int64_t rows, N;
  Matrix<const T> x, weight, dout, dsum;
  const A* mean;
  const A* rstd;
  Matrix<T> dx;

  __device__ A xhat(std::int64_t r, std::int64_t c) const {
    return (convert<A>(x.at(r, c)) - (is_layer ? mean[r] : A(0))) * rstd[r];
  }
  __device__ A g(std::int64_t r, std::int64_t c) const {
    return convert<A>(dout.at(r, c)) * (weight.data != nullptr ? convert<A>(weight.at(0, c)) : A(1));
  }
};

template <int kThreads, typename T>
__global__ void norm_dx_kernel(const NormBackwardTask<T> task) {
  using A = accumulate_t<T>;
  const Group<kThreads> group;
  for (std::int64_t r = group.first; r < task.rows; r += group.stride) {
    A mean_g = 0, mean_gx = 0;
    for (std::int64_t c = group.lane; c < task.N; c += kThreads) {
      const A g = task.g(r, c);
      mean_g += g;
      mean_gx += g * task.xhat(r, c);
    }
    mean_g = task.is_layer ? sum_group<kThreads>(mean_g) / static_cast<A>(task.N) : A(0);
    mean_gx = sum_group<kThreads>(mean_gx) / static_cast<A>(task.N);
    for (std::int64_t c = group.lane; c < task.N; c += kThreads) {
      const A before = task.dsum.data != nullptr ? convert<A>(task.dsum.at(r, c)) : A(0);
      task.dx.at(r, c) = convert<T>(before + task.rstd[r] * (task.g(r, c) - mean_g - task.xhat(r, c) * mean_gx));
    }
  }
}

// First stage of dweight and dbias: chunk blockIdx.y of the rows, a thread a column, the block's threads of one column sharing its
// rows. parts: [chunks, 2, N]. The second stage is add_up_kernel.
template <typename T>
__global__ void norm_columns_kernel(const NormBackwardTask<T> task, accumulate_t<T>* parts) {
  using A = accumulate_t<T>;
  constexpr int kRows = kBlock / kWarp;
  __shared__ A sums[2][kRows][kWarp];
  const int column = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  const std::int64_t chunk = blockIdx.y, chunks = gridDim.y;
  const std::int64_t from = task.rows * chunk / chunks, to = task.rows * (chunk + 1) / chunks;
  for (std::int64_t tile = blockIdx.x; tile * kWarp < task.N; tile += gridDim.x) {
    const std::int64_t c = tile * kWarp + column;
    A weight_sum = 0, bias_sum = 0;
    if (c < task.N) {
#pragma unroll 4
      for (std::int64_t r = from + row; r < to; r += kRows) {
        const A dout = convert<A>(task.dout.at(r, c));
        weight_sum += dout * task.xhat(r, c);
        bias_sum += dout;
      }
    }
    sums[0][row][column] = weight_sum;
    sums[1][row][column] = bias_sum;
    __syncthreads();
    if (row == 0 && c < task.N) {
      for (int other = 1; other < kRows; ++other) {
        weight_sum += sums[0][other][column];
        bias_sum += sums[1][other][column];
      }
      parts[2 * chunk * task.N + c] = weight_sum;
      parts[(2 * chunk + 1) * task.N + c] = bias_sum;
    }
    __syncthreads();
  }
}

// dweight or dbias: dtype T, or float32.
template <typename T>
struct VectorTarget {
  void* data = nullptr;
  std::int64_t stride = 0;
  bool is_float32 = false, accumulates = false;

  VectorTarget(const MutView& view, Write write) {
    if (!view.defined()) return;
    data = view.data;
    stride = view.strides[0];
    is_float32 = view.dtype == DType::f32;
    accumulates = write == Write::accumulate;
  }

  template <typename Out, typename A>
  __device__ void put_as(std::int64_t i, A value) const {
    Out& out = static_cast<Out*>(data)[i * stride];
    out = convert<Out>(accumulates ? convert<A>(out) + value : value);
  }
  template <typename A>
  __device__ void put(std::int64_t i, A value) const {
    if (is_float32) put_as<float>(i, value);
    else put_as<T>(i, value);
  }
};

constexpr int kAddRows = 1024 / kWarp;

// Second stage: a thread a column, kAddRows of them sharing its chunks; dweight for blockIdx.y 0, dbias for 1.
template <typename T>
__global__ void add_up_kernel(const accumulate_t<T>* parts, std::int64_t chunks, std::int64_t N, const VectorTarget<T> dweight,
                              const VectorTarget<T> dbias) {
  using A = accumulate_t<T>;
  __shared__ A sums[kAddRows][kWarp];
  const VectorTarget<T>& to = blockIdx.y == 0 ? dweight : dbias;
  if (to.data == nullptr) return;
  const int column = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  for (std::int64_t tile = blockIdx.x; tile * kWarp < N; tile += gridDim.x) {
    const std::int64_t c = tile * kWarp + column;
    A sum = 0;
    if (c < N) {
#pragma unroll 8
      for (std::int64_t chunk = row; chunk < chunks; chunk += kAddRows) sum += parts[(2 * chunk + blockIdx.y) * N + c];
    }
    sums[row][column] = sum;
    __syncthreads();
    if (row == 0 && c < N) {
      for (int other = 1; other < kAddRows; ++other) sum += sums[other][column];
      to.put(c, sum);
    }
    __syncthreads();
  }
}

template <typename T>
void add_up(const accumulate_t<T>* parts, std::int64_t chunks, const NormBackwardArgs& args, const ExecContext& ctx) {
  const std::int64_t N = args.x.shape[1];
  const dim3 grid(grid_for(N, kWarp, ctx), 2);
  add_up_kernel<T><<<grid, kAddRows * kWarp, 0, stream_of(ctx)>>>(parts, chunks, N, VectorTarget<T>(args.dweight, args.write_dweight),
                                                                  VectorTarget<T>(args.dbias, args.write_dbias));
  check_launch("norm_backward");
}

// Rows a chunk has at least, and the most chunks.
constexpr std::int64_t kChunkRows = 32;
constexpr std::int64_t kMostChunks = 128;

template <typename T>
void norm_columns(const NormBackwardTask<T>& task, const NormBackwardArgs& args, const ExecContext& ctx) {
  using A = accumulate_t<T>;
  const std::int64_t chunks = std::clamp<std::int64_t>(task.rows / kChunkRows, 1, kMostChunks);
  const Buffer parts(chunks * 2 * task.N * std::int64_t{sizeof(A)}, ctx.device);
  const dim3 grid(grid_for(task.N, kWarp, ctx), static_cast<unsigned>(chunks));
  norm_columns_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(task, static_cast<A*>(parts.data()));
  check_launch("norm_backward");
  add_up<T>(static_cast<const A*>(parts.data()), chunks, args, ctx);
}

}  // namespace

void norm(const NormArgs& args, const ExecContext& ctx) {
  if (args.x.numel() == 0 || norm_rows(args, ctx)) return;
  if (args.residual.defined()) {
    cuda::binary({.op = BinaryOp::add, .a = args.x, .b = args.residual, .out = args.sum}, ctx);
    NormArgs of_sum = args;
    of_sum.x = args.sum;
    of_sum.residual = {};
    return cuda::norm(of_sum, ctx);
  }
  dispatch_float(args.x.dtype, "norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const bool is_layer = args.kind == NormKind::layer;
    const NormTask<T> task{is_layer, args.x.shape[0], args.x.shape[1], matrix<T>(args.x), matrix<T>(args.weight), matrix<T>(args.bias),
                           matrix<T>(args.out), is_layer ? args.mean.as<A>() : nullptr, args.rstd.as<A>(), static_cast<A>(args.eps)};
    with_group(task.N, [&](auto threads) {
      norm_kernel<threads><<<grid_for(task.rows, Group<threads>::kInBlock, ctx), kBlock, 0, stream_of(ctx)>>>(task);
    });
  });
  check_launch("norm");
}

void norm_backward(const NormBackwardArgs& args, const ExecContext& ctx) {
  const bool wants_columns = args.dweight.defined() || args.dbias.defined();
  if (const std::int64_t chunks = norm_row_chunks(args, ctx); chunks > 0) {
    const Buffer parts(wants_columns ? chunks * 2 * args.x.shape[1] * std::int64_t{sizeof(float)} : 0, ctx.device);
    norm_backward_rows(args, static_cast<float*>(parts.data()), ctx);
    if (!wants_columns) return;
    if (args.x.dtype == DType::f32) add_up<float>(static_cast<const float*>(parts.data()), chunks, args, ctx);
    else add_up<bfloat16>(static_cast<const float*>(parts.data()), chunks, args, ctx);
    return;
  }
  dispatch_float(args.x.dtype, "norm_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const bool is_layer = args.kind == NormKind::layer;
    const NormBackwardTask<T> task{is_layer, args.x.shape[0], args.x.shape[1], matrix<T>(args.x), matrix<T>(args.weight),
                                   matrix<T>(args.dout), matrix<T>(args.dsum), is_layer ? args.mean.as<A>() : nullptr, args.rstd.as<A>(), matrix<T>(args.dx)};
    if (args.dx.defined() && task.rows > 0) {
      with_group(task.N, [&](auto threads) {
        norm_dx_kernel<threads><<<grid_for(task.rows, Group<threads>::kInBlock, ctx), kBlock, 0, stream_of(ctx)>>>(task);
      });
      check_launch("norm_backward");
    }
    if (wants_columns) norm_columns(task, args, ctx);
  });
}

}  // namespace heddle::cuda
