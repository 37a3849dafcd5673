#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"
#include "kernels/runtime/strided.cuh"

namespace heddle::cuda {
namespace {

template <typename T>
constexpr bool kFitsFloat = is_floating(dtype_of<T>()) && !std::is_same_v<T, double>;

template <typename To, typename From>
__device__ To sum_as(To a, From b) {
  using A = std::conditional_t<kFitsFloat<To> && kFitsFloat<From>, float, double>;
  return convert<To>(convert<A>(a) + convert<A>(b));
}

template <int V, typename To, typename From>
__global__ void copy_kernel(const __grid_constant__ Walk<2> walk, const From* source, bool is_splat, To* out, bool accumulates) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t item = first; item < walk.count; item += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t at[2];
    walk.locate(item, at);
    Pack<From, V> from;
    if (V > 1 && is_splat)
      for (int i = 0; i < V; ++i) from.at[i] = source[at[0]];
    else from = *reinterpret_cast<const Pack<From, V>*>(source + at[0]);
    Pack<To, V>& to = *reinterpret_cast<Pack<To, V>*>(out + at[1]);
    Pack<To, V> result;
    if (accumulates) {
      result = to;
      for (int i = 0; i < V; ++i) result.at[i] = sum_as(result.at[i], from.at[i]);
    } else {
      for (int i = 0; i < V; ++i) result.at[i] = convert<To>(from.at[i]);
    }
    to = result;
  }
}

template <typename To, typename From>
void copy_typed(const CopyArgs& args, const ExecContext& ctx) {
  const StridedLoop<2> loop(args.out.shape, {broadcast_strides(args.source.shape, args.source.strides, args.out.shape), args.out.strides});
  const bool accumulates = args.write == Write::accumulate;
  const From* source = args.source.as<From>();
  To* out = args.out.as<To>();
  const bool is_splat = loop.inner_stride(0) == 0;
  // Vectors only between floating dtypes, the pairs that training moves: 16 bytes of the wider of them.
  if constexpr (is_floating(dtype_of<To>()) && is_floating(dtype_of<From>())) {
    constexpr int kWide = 16 / std::max(sizeof(To), sizeof(From));
    if (loop.inner_stride(1) == 1 && fits_vectors(loop, 0, source, sizeof(From), kWide) && fits_vectors(loop, 1, out, sizeof(To), kWide)) {
      const Walk<2> walk(loop, kWide);
      copy_kernel<kWide><<<grid_for(walk.count, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(walk, source, is_splat, out, accumulates);
      return;
    }
  }
  const Walk<2> walk(loop);
  copy_kernel<1><<<grid_for(walk.count, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(walk, source, is_splat, out, accumulates);
}

std::size_t nbytes_of(const ConstView& view) { return static_cast<std::size_t>(view.numel()) * dtype_size(view.dtype); }

// Whether a copy moves bytes and does nothing else.
bool is_plain(const CopyArgs& args) {
  return args.write == Write::assign && args.source.dtype == args.out.dtype && args.source.shape == args.out.shape &&
         args.source.is_contiguous() && args.out.is_contiguous();
}

void copy_on_device(const CopyArgs& args, const ExecContext& ctx) {
  if (is_plain(args)) {
    HEDDLE_CUDA_CHECK(cudaMemcpyAsync(args.out.data, args.source.data, nbytes_of(args.source), cudaMemcpyDeviceToDevice, stream_of(ctx)));
    return;
  }
  dispatch_any(args.out.dtype, [&](auto to) {
    dispatch_any(args.source.dtype, [&](auto from) {
      copy_typed<typename decltype(to)::type, typename decltype(from)::type>(args, ctx);
    });
  });
  check_launch("copy");
}

MutView dense_view(const Buffer& memory, const ConstView& like) {
  return {memory.data(), like.dtype, memory.device(), like.shape, contiguous_strides(like.shape)};
}

// Across the bus go dense bytes of the source's dtype; strides, broadcasting and conversion are dealt with at either end.
// A copy to the host waits for it.
void copy_between(const CopyArgs& args, const ExecContext& ctx) {
  const ExecContext host;
  const auto copy_in = [&](const CopyArgs& part) { part.out.device.is_cpu() ? cpu::copy(part, host) : copy_on_device(part, ctx); };
  Buffer source_memory, out_memory;
  ConstView source = args.source;
  if (!source.is_contiguous()) {
    source_memory = Buffer(static_cast<std::int64_t>(nbytes_of(source)), source.device);
    const MutView dense = dense_view(source_memory, source);
    copy_in({.source = source, .out = dense});
    source = dense;
  }
  MutView target = args.out;
  const bool is_direct = is_plain({.source = source, .out = target, .write = args.write});
  if (!is_direct) {
    out_memory = Buffer(static_cast<std::int64_t>(nbytes_of(source)), target.device);
    target = dense_view(out_memory, source);
  }
  if (target.device.is_cuda()) {
    upload(target.data, source.data, static_cast<std::int64_t>(nbytes_of(source)), ctx.device.index);
  } else {
    HEDDLE_CUDA_CHECK(cudaMemcpyAsync(target.data, source.data, nbytes_of(source), cudaMemcpyDeviceToHost, stream_of(ctx)));
    synchronise(ctx.device.index);
  }
  if (!is_direct) copy_in({.source = target, .out = args.out, .write = args.write});
}

}  // namespace

void copy(const CopyArgs& args, const ExecContext& ctx) {
  if (args.out.numel() == 0) return;
  if (args.source.device == args.out.device) return copy_on_device(args, ctx);
  HEDDLE_CHECK(args.source.device.is_cpu() || args.out.device.is_cpu(), "copy: from ", args.source.device, " to ", args.out.device,
               " there is no direct way; copy to the cpu first");
  copy_between(args, ctx);
}

}  // namespace heddle::cuda
