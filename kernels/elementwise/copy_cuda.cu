#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"
#include "kernels/runtime/strided.cuh"

namespace heddle::cuda {
namespace {

template <typename To, typename From>
__device__ To sum_as(To a, From b) {
  using A = std::conditional_t<std::is_same_v<To, double> || std::is_same_v<From, double>, double, float>;
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
void copy_floats(const CopyArgs& args, const StridedLoop<2>& loop, const ExecContext& ctx) {
  const bool accumulates = args.write == Write::accumulate, is_splat = loop.inner_stride(0) == 0;
  const From* source = args.source.as<From>();
  To* out = args.out.as<To>();
  const auto launch = [&](auto width) {
    const Walk<2> walk(loop, width);
    copy_kernel<width><<<grid_for(walk.count, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(walk, source, is_splat, out, accumulates);
  };
  constexpr int kPair = 16 / std::max(sizeof(To), sizeof(From));  // 16 bytes of the wider
  if (loop.inner_stride(1) == 1 && fits_vectors(loop, 0, source, sizeof(From), kPair) && fits_vectors(loop, 1, out, sizeof(To), kPair))
    launch(std::integral_constant<int, kPair>{});
  else launch(std::integral_constant<int, 1>{});
}

// An element that is moved and never computed with.
template <typename Bits>
__global__ void move_kernel(const __grid_constant__ Walk<2> walk, const Bits* source, Bits* out) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t item = first; item < walk.count; item += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t at[2];
    walk.locate(item, at);
    out[at[1]] = source[at[0]];
  }
}

// Calls fn(T*) with the element type of `dtype`.
template <typename Fn>
__device__ void with_elements(void* data, DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::f64: return fn(static_cast<double*>(data));
    case DType::f32: return fn(static_cast<float*>(data));
    case DType::bf16: return fn(static_cast<bfloat16*>(data));
    case DType::f16: return fn(static_cast<float16*>(data));
    case DType::i64: return fn(static_cast<std::int64_t*>(data));
    case DType::i32: return fn(static_cast<std::int32_t*>(data));
    case DType::u8: return fn(static_cast<std::uint8_t*>(data));
    case DType::boolean: return fn(static_cast<bool*>(data));
  }
}

// The pairs with an integer or a bool in them, through float64: their dtypes are run-time values, because kernels for each of 48
// pairs that no training step uses would be most of this file's time to compile.
__global__ void convert_kernel(const __grid_constant__ Walk<2> walk, void* source, DType from, void* out, DType to, bool accumulates) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t item = first; item < walk.count; item += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t at[2];
    walk.locate(item, at);
    double value = 0;
    with_elements(source, from, [&](const auto* elements) { value = convert<double>(elements[at[0]]); });
    with_elements(out, to, [&](auto* elements) {
      using To = std::remove_pointer_t<decltype(elements)>;
      elements[at[1]] = accumulates ? convert<To>(convert<double>(elements[at[1]]) + value) : convert<To>(value);
    });
  }
}

void convert(const CopyArgs& args, const StridedLoop<2>& loop, const ExecContext& ctx) {
  const Walk<2> walk(loop);
  const int grid = grid_for(walk.count, kBlock, ctx);
  const auto move = [&](auto bits) {
    using Bits = decltype(bits);
    move_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(walk, static_cast<const Bits*>(args.source.data), static_cast<Bits*>(args.out.data));
  };
  if (args.source.dtype == args.out.dtype && args.write == Write::assign) {
    switch (dtype_size(args.out.dtype)) {
      case 1: return move(std::uint8_t{});
      case 4: return move(std::uint32_t{});
      default: return move(std::uint64_t{});
    }
  }
  convert_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(walk, const_cast<void*>(args.source.data), args.source.dtype, args.out.data,
                                                      args.out.dtype, args.write == Write::accumulate);
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
  const StridedLoop<2> loop(args.out.shape, {broadcast_strides(args.source.shape, args.source.strides, args.out.shape), args.out.strides});
  if (is_floating(args.out.dtype) && is_floating(args.source.dtype)) {
    dispatch_float(args.out.dtype, "copy", [&](auto to) {
      dispatch_float(args.source.dtype, "copy", [&](auto from) {
        copy_floats<typename decltype(to)::type, typename decltype(from)::type>(args, loop, ctx);
      });
    });
  } else {
    convert(args, loop, ctx);
  }
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
