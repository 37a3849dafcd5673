#include "kernels/optimizer/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/elementwise/elementwise.h"
#include "kernels/optimizer/update_numbers.h"
#include "kernels/runtime/parallel.h"

namespace heddle::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;

template <typename A>
void adamw_typed(const AdamWArgs& args, const AdamWParameter& parameter, const UpdateNumbers& numbers) {
  A* weight = parameter.weight.as<A>();
  A* first = parameter.first_moment.as<A>();
  A* second = parameter.second_moment.as<A>();
  const A* grad = parameter.grad.as<A>();
  const A keep1 = static_cast<A>(args.beta1), take1 = static_cast<A>(1.0 - args.beta1);
  const A keep2 = static_cast<A>(args.beta2), take2 = static_cast<A>(1.0 - args.beta2);
  const A keep_weight = static_cast<A>(1.0 - numbers.learning_rate * parameter.rate_scale * parameter.weight_decay);
  const A rate = static_cast<A>(numbers.rate * parameter.rate_scale);
  const A root = static_cast<A>(numbers.root), factor = static_cast<A>(numbers.factor);
  const A eps = static_cast<A>(args.eps);
  parallel_for(parameter.weight.numel(), kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const A g = factor * grad[i];
      const A m = keep1 * first[i] + take1 * g;
      const A v = keep2 * second[i] + take2 * g * g;
      first[i] = m;
      second[i] = v;
      weight[i] = keep_weight * weight[i] - rate * m / (std::sqrt(v) * root + eps);
    }
  });
}

// Sum of squares in 16 interleaved float64 partial sums.
template <typename T>
double sum_of_squares(const T* x, std::int64_t size) {
  std::array<double, 16> lanes{};
  std::int64_t i = 0;
  for (; i + 16 <= size; i += 16)
    for (int lane = 0; lane < 16; ++lane) {
      const auto value = static_cast<double>(static_cast<accumulate_t<T>>(x[i + lane]));
      lanes[lane] += value * value;
    }
  for (; i < size; ++i) {
    const auto value = static_cast<double>(static_cast<accumulate_t<T>>(x[i]));
    lanes[0] += value * value;
  }
  double total = 0.0;
  for (double lane : lanes) total += lane;
  return total;
}

double sum_of_squares(const ConstView& tensor) {
  const std::int64_t size = tensor.numel();
  std::array<double, kReductionChunks> partial{};
  dispatch_float(tensor.dtype, "global_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t grain = std::max<std::int64_t>(1, kReductionChunks * kGrain / std::max<std::int64_t>(size, 1));
    parallel_for(kReductionChunks, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        const std::int64_t from = size * chunk / kReductionChunks, to = size * (chunk + 1) / kReductionChunks;
        partial[static_cast<std::size_t>(chunk)] = sum_of_squares(tensor.as<T>() + from, to - from);
      }
    });
  });
  double total = 0.0;
  for (double part : partial) total += part;
  return total;
}

}  // namespace

void adamw(const AdamWArgs& args, const ExecContext& ctx) {
  const UpdateInputs inputs = {args.beta1, args.beta2, args.max_grad_norm, *args.learning_rate.as<double>(),
                               *args.grad_scale.as<double>(), *args.grad_norm.as<double>(),
                               args.loss.defined() ? *args.loss.as<double>() : 0.0};
  std::int64_t& step = *args.step.as<std::int64_t>();
  const UpdateNumbers numbers = update_numbers(inputs, step + 1);
  if (!numbers.applies) return;
  step += 1;
  for (const AdamWParameter& parameter : args.parameters) {
    if (parameter.weight.dtype == DType::f64) adamw_typed<double>(args, parameter, numbers);
    else adamw_typed<float>(args, parameter, numbers);
    if (parameter.rounded.defined()) heddle::copy({.source = parameter.weight, .out = parameter.rounded}, ctx);
  }
}

void global_norm(const GlobalNormArgs& args, const ExecContext&) {
  double total = 0.0, first_nonfinite = -1.0;
  for (std::size_t i = 0; i < args.tensors.size(); ++i) {
    const double squares = sum_of_squares(args.tensors[i]);
    if (!std::isfinite(squares) && first_nonfinite < 0) first_nonfinite = static_cast<double>(i);
    total += squares;
  }
  *args.out.as<double>() = std::sqrt(total);
  if (args.first_nonfinite.defined()) *args.first_nonfinite.as<double>() = first_nonfinite;
}

}  // namespace heddle::cpu
