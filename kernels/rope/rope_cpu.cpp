#include "kernels/rope/rope.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/runtime/parallel.h"

namespace heddle::cpu {
namespace {

// Cosine and sine of every angle, [S, half] each.
template <typename A>
struct Turns {
  std::vector<A> cosine, sine;

  Turns(const RopeArgs& args, std::int64_t half) {
    const std::int64_t S = args.x.shape[1];
    cosine.resize(static_cast<std::size_t>(S * half));
    sine.resize(cosine.size());
    std::vector<double> frequency(static_cast<std::size_t>(half));
    for (std::int64_t i = 0; i < half; ++i)
      frequency[static_cast<std::size_t>(i)] = std::pow(args.theta, -static_cast<double>(i) / static_cast<double>(half));
    const double direction = args.is_inverse ? -1.0 : 1.0;
    parallel_for(S, std::max<std::int64_t>(1, 512 / std::max<std::int64_t>(half, 1)), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t s = begin; s < end; ++s) {
        const double position = direction * static_cast<double>(args.positions.as<std::int64_t>()[s * args.positions.strides[0]]);
        for (std::int64_t i = 0; i < half; ++i) {
          const auto at = static_cast<std::size_t>(s * half + i);
          const double angle = position * frequency[static_cast<std::size_t>(i)];
          cosine[at] = static_cast<A>(std::cos(angle));
          sine[at] = static_cast<A>(std::sin(angle));
        }
      }
    });
  }
};

// Turns the pairs of one head vector.
template <typename A, typename T>
void turn(const T* x, std::int64_t x_step, T* out, std::int64_t out_step, const A* cosine, const A* sine, std::int64_t half) {
  for (std::int64_t i = 0; i < half; ++i) {
    const A a = static_cast<A>(x[i * x_step]), b = static_cast<A>(x[(i + half) * x_step]);
    out[i * out_step] = static_cast<T>(a * cosine[i] - b * sine[i]);
    out[(i + half) * out_step] = static_cast<T>(b * cosine[i] + a * sine[i]);
  }
}

template <typename T>
void rope_typed(const RopeArgs& args) {
  using A = accumulate_t<T>;
  const std::int64_t B = args.x.shape[0], S = args.x.shape[1], H = args.x.shape[2], half = args.x.shape[3] / 2;
  const Shape& in = args.x.strides;
  const Shape& to = args.out.strides;
  const Turns<A> turns(args, half);
  const std::int64_t grain = std::max<std::int64_t>(1, 8192 / std::max<std::int64_t>(H * half, 1));
  parallel_for(B * S, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int64_t b = token / S, s = token % S;
      const A* cosine = turns.cosine.data() + s * half;
      const A* sine = turns.sine.data() + s * half;
      for (std::int64_t h = 0; h < H; ++h) {
        const T* x = args.x.as<T>() + b * in[0] + s * in[1] + h * in[2];
        T* out = args.out.as<T>() + b * to[0] + s * to[1] + h * to[2];
        if (in[3] == 1 && to[3] == 1) turn(x, 1, out, 1, cosine, sine, half);
        else turn(x, in[3], out, to[3], cosine, sine, half);
      }
    }
  });
}

}  // namespace

void rope(const RopeArgs& args, const ExecContext&) {
  dispatch_float(args.x.dtype, "rope", [&](auto tag) { rope_typed<typename decltype(tag)::type>(args); });
}

}  // namespace heddle::cpu
