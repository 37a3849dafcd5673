#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/elementwise/map.cuh"

namespace heddle::cuda {
namespace {

template <typename A>
struct Binary {
  BinaryOp op;

  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    switch (op) {
      case BinaryOp::add: out[0] = in[0] + in[1]; break;
      case BinaryOp::sub: out[0] = in[0] - in[1]; break;
      case BinaryOp::mul: out[0] = in[0] * in[1]; break;
      case BinaryOp::div: out[0] = in[0] / in[1]; break;
    }
  }
};

template <typename A>
struct Swiglu {
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const { out[0] = in[0] * sigmoid(in[0]) * in[1]; }
};

template <typename A>
struct SwigluBackward {
  __device__ void operator()(const A (&in)[3], A (&out)[2]) const {
    const A s = sigmoid(in[0]);
    out[0] = in[2] * in[1] * s * (A(1) + in[0] * (A(1) - s));
    out[1] = in[2] * in[0] * s;
  }
};

// An element of 1, 2, 4 or 8 bytes that is moved and never computed with.
template <typename Fn>
void dispatch_bits(DType dtype, const Fn& fn) {
  switch (dtype_size(dtype)) {
    case 1: return fn(std::uint8_t{});
    case 2: return fn(std::uint16_t{});
    case 4: return fn(std::uint32_t{});
    default: return fn(std::uint64_t{});
  }
}

template <typename Bits>
__global__ void fill_kernel(const __grid_constant__ Walk<1> walk, Bits* out, Bits value) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t item = first; item < walk.count; item += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t at[1];
    walk.locate(item, at);
    out[at[0]] = value;
  }
}

template <typename Bits>
__global__ void select_kernel(const __grid_constant__ Walk<4> walk, const bool* condition, const Bits* a, const Bits* b, Bits* out) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t item = first; item < walk.count; item += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t at[4];
    walk.locate(item, at);
    out[at[3]] = condition[at[0]] ? a[at[1]] : b[at[2]];
  }
}

}  // namespace

void fill(const FillArgs& args, const ExecContext& ctx) {
  const std::int64_t count = args.out.numel();
  if (count == 0) return;
  std::uint64_t bits = 0;  // the value's bytes, made by the CPU's own conversion
  cpu::fill({.out = {&bits, args.out.dtype, kCpu, {}, {}}, .value = args.value}, ExecContext{});
  if (bits == 0 && args.out.is_contiguous()) {
    HEDDLE_CUDA_CHECK(cudaMemsetAsync(args.out.data, 0, static_cast<std::size_t>(count) * dtype_size(args.out.dtype), stream_of(ctx)));
    return;
  }
  const Walk<1> walk(StridedLoop<1>(args.out.shape, {args.out.strides}));
  dispatch_bits(args.out.dtype, [&](auto tag) {
    using Bits = decltype(tag);
    fill_kernel<<<grid_for(count, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(walk, static_cast<Bits*>(args.out.data), static_cast<Bits>(bits));
  });
  check_launch("fill");
}

void binary(const BinaryArgs& args, const ExecContext& ctx) {
  dispatch_float(args.a.dtype, "binary", [&](auto tag) {
    using T = typename decltype(tag)::type;
    map<T, 2, 1>("binary", {args.a, args.b}, {args.out}, Binary<accumulate_t<T>>{args.op}, ctx);
  });
}

void swiglu(const SwigluArgs& args, const ExecContext& ctx) {
  dispatch_float(args.gate.dtype, "swiglu", [&](auto tag) {
    using T = typename decltype(tag)::type;
    map<T, 2, 1>("swiglu", {args.gate, args.up}, {args.out}, Swiglu<accumulate_t<T>>{}, ctx);
  });
}

void swiglu_backward(const SwigluBackwardArgs& args, const ExecContext& ctx) {
  dispatch_float(args.gate.dtype, "swiglu_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    map<T, 3, 2>("swiglu_backward", {args.gate, args.up, args.dout}, {args.dgate, args.dup}, SwigluBackward<accumulate_t<T>>{}, ctx);
  });
}

void select(const SelectArgs& args, const ExecContext& ctx) {
  if (args.out.numel() == 0) return;
  const auto strides_of = [&](const ConstView& view) { return broadcast_strides(view.shape, view.strides, args.out.shape); };
  const Walk<4> walk(StridedLoop<4>(args.out.shape,
                                    {strides_of(args.condition), strides_of(args.a), strides_of(args.b), args.out.strides}));
  dispatch_bits(args.out.dtype, [&](auto tag) {
    using Bits = decltype(tag);
    select_kernel<<<grid_for(walk.count, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(
        walk, args.condition.as<bool>(), static_cast<const Bits*>(args.a.data), static_cast<const Bits*>(args.b.data),
        static_cast<Bits*>(args.out.data));
  });
  check_launch("where");
}

}  // namespace heddle::cuda
