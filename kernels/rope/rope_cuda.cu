#include "kernels/rope/rope.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/numeric.cuh"

namespace heddle::cuda {
namespace {

// Cosine and sine of every angle, [S, half] pairs: float64 once a position and frequency, not once a head and batch.
template <typename A>
__global__ void turns_kernel(std::int64_t S, std::int64_t half, const std::int64_t* positions, std::int64_t step, double theta,
                             double direction, Pack<A, 2>* turns) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t i = first; i < S * half; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const double frequency = pow(theta, -static_cast<double>(i % half) / static_cast<double>(half));
    double sine, cosine;
    sincos(direction * static_cast<double>(positions[i / half * step]) * frequency, &sine, &cosine);
    turns[i] = {static_cast<A>(cosine), static_cast<A>(sine)};
  }
}

template <typename T>
struct RopeTask {
  std::int64_t B, S, H, half;
  const T* x;
  std::int64_t in[4];
  T* out;
  std::int64_t to[4];
  const Pack<accumulate_t<T>, 2>* turns;
};

// A block a token, a thread a pair.
template <typename T>
__global__ void rope_kernel(const __grid_constant__ RopeTask<T> task) {
  using A = accumulate_t<T>;
  const auto half = static_cast<unsigned>(task.half), pairs = static_cast<unsigned>(task.H) * half;
  for (std::int64_t token = blockIdx.x; token < task.B * task.S; token += gridDim.x) {
    const std::int64_t b = token / task.S, s = token % task.S;
    const T* x = task.x + b * task.in[0] + s * task.in[1];
    T* out = task.out + b * task.to[0] + s * task.to[1];
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
      const std::int64_t h = pair / half, i = pair % half;
      const Pack<A, 2> turn = task.turns[s * half + i];
      const A a = convert<A>(x[h * task.in[2] + i * task.in[3]]), c = convert<A>(x[h * task.in[2] + (i + half) * task.in[3]]);
      out[h * task.to[2] + i * task.to[3]] = convert<T>(a * turn.at[0] - c * turn.at[1]);
      out[h * task.to[2] + (i + half) * task.to[3]] = convert<T>(c * turn.at[0] + a * turn.at[1]);
    }
  }
}

}  // namespace

void rope(const RopeArgs& args, const ExecContext& ctx) {
  if (args.x.numel() == 0) return;
  const std::int64_t B = args.x.shape[0], S = args.x.shape[1], H = args.x.shape[2], half = args.x.shape[3] / 2;
  dispatch_float(args.x.dtype, "rope", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Turn = Pack<accumulate_t<T>, 2>;
    const Buffer turns(S * half * static_cast<std::int64_t>(sizeof(Turn)), ctx.device);
    turns_kernel<accumulate_t<T>><<<grid_for(S * half, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(
        S, half, args.positions.as<std::int64_t>(), args.positions.strides[0], args.theta, args.is_inverse ? -1.0 : 1.0,
        static_cast<Turn*>(turns.data()));
    check_launch("rope");
    const Shape &in = args.x.strides, &to = args.out.strides;
    const RopeTask<T> task{B, S, H, half, args.x.as<T>(), {in[0], in[1], in[2], in[3]}, args.out.as<T>(), {to[0], to[1], to[2], to[3]},
                           static_cast<const Turn*>(turns.data())};
    rope_kernel<<<grid_for(B * S, 1, ctx), kBlock, 0, stream_of(ctx)>>>(task);
    check_launch("rope");
  });
}

}  // namespace heddle::cuda
