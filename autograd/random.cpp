#include "autograd/random.h"

#include <cmath>
#include <numbers>

#include "kernels/runtime/parallel.h"
#include "kernels/runtime/random.h"

namespace heddle {
namespace {

// Fills a tensor from pairs of unit-interval draws; fn turns (u0, u1) into two values.
template <typename Fn>
Tensor draw(const Shape& shape, Generator& generator, DType dtype, Device device, const Fn& fn) {
  const Tensor host = Tensor::empty(shape, DType::f64, kCpu);
  double* out = host.mutable_view().as<double>();
  const std::int64_t count = host.numel();
  const std::uint64_t first = generator.reserve(count, 2);
  constexpr std::int64_t kGrain = 1 << 12;  // pairs that a thread draws at least
  parallel_for((count + 1) / 2, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t pair = begin; pair < end; ++pair) {
      const auto words = philox(generator.seed, first + static_cast<std::uint64_t>(pair), 0);
      const auto [a, b] = fn(unit_interval(words[0], words[1]), unit_interval(words[2], words[3]));
      out[2 * pair] = a;
      if (2 * pair + 1 < count) out[2 * pair + 1] = b;
    }
  });
  const Tensor result = Tensor::empty(shape, dtype, device);
  result.copy_(host);
  return result;
}

}  // namespace

std::uint64_t Generator::reserve(std::int64_t count, int per_block) {
  const std::uint64_t first = offset;
  offset += static_cast<std::uint64_t>((count + per_block - 1) / per_block);
  return first;
}

Tensor uniform(const Shape& shape, double low, double high, Generator& generator, DType dtype, Device device) {
  return draw(shape, generator, dtype, device,
              [&](double u, double v) { return std::pair{low + (high - low) * u, low + (high - low) * v}; });
}

// Box and Muller 1958.
Tensor normal(const Shape& shape, double mean, double stddev, Generator& generator, DType dtype, Device device) {
  if (stddev == 0) {  // as a model's weights are that are to be loaded: the same numbers without the work
    generator.reserve(shape.numel(), 2);
    return Tensor::full(shape, mean, dtype, device);
  }
  return draw(shape, generator, dtype, device, [&](double u, double v) {
    const double radius = stddev * std::sqrt(-2.0 * std::log1p(-u));
    const double angle = 2.0 * std::numbers::pi * v;
    return std::pair{mean + radius * std::cos(angle), mean + radius * std::sin(angle)};
  });
}

}  // namespace heddle
