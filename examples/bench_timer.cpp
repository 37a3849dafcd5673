#include "examples/bench_timer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "autograd/ops.h"
#include "autograd/random.h"
#include "kernels/gemm/gemm.h"
#include "kernels/runtime/timing.h"

namespace heddle::examples {
namespace {

constexpr double kGraphBelow = 50e-6;  // seconds
constexpr double kBudget = 0.1;        // seconds that the timed calls of one piece of work take together

// The value at a fraction of a sorted list, between its neighbours.
double quantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

}  // namespace

Timing measure(const std::function<void()>& work, int runs, const ExecContext& ctx) {
  std::vector<double> seconds;
  time_runs({.work = work, .runs = ctx.device.is_cuda() ? 3 : 1, .launch = Launch::stream, .seconds = seconds}, ctx);
  const double estimate = std::ranges::min(seconds);
  const bool in_graph = ctx.device.is_cuda() && estimate < kGraphBelow;
  if (runs == 0) runs = static_cast<int>(std::clamp(kBudget / estimate, 10.0, 50.0));
  time_runs({.work = work, .runs = runs, .launch = in_graph ? Launch::graph : Launch::stream, .seconds = seconds}, ctx);
  std::ranges::sort(seconds);
  return {quantile(seconds, 0.5), quantile(seconds, 0.25), quantile(seconds, 0.75), runs, in_graph};
}

double gemm_ceiling(DType dtype, const ExecContext& ctx) {
  double best = 0;
  RandomTable random(dtype, ctx.device);
  const std::vector<std::int64_t> widths = ctx.device.is_cuda() ? std::vector<std::int64_t>{4096, 8192} : std::vector<std::int64_t>{1024};
  for (const std::int64_t N : widths) {
    const Tensor a = random.tensor({N, N}), b = random.tensor({N, N}), c = Tensor::empty({N, N}, dtype, ctx.device);
    const Timing timing = measure([&] { gemm({.a = a.view(), .b = b.view(), .c = c.mutable_view()}, ctx); }, /*runs=*/0, ctx);
    const auto width = static_cast<double>(N);
    best = std::max(best, 2 * width * width * width / timing.median);
  }
  return best;
}

RandomTable::RandomTable(DType dtype, Device device) {
  constexpr std::int64_t kSize = 4194301;  // prime, so that repeats never line up with rows or heads
  Generator generator{.seed = 1};
  table_ = normal({kSize}, 0, 1, generator, dtype, device);
}

Tensor RandomTable::tensor(const Shape& shape) {
  const Tensor out = Tensor::empty(shape, table_.dtype(), table_.device()), flat = reshape(out, {out.numel()});
  for (std::int64_t done = 0; done < flat.numel();) {
    const std::int64_t count = std::min(table_.numel() - position_, flat.numel() - done);
    slice(flat, 0, done, done + count).copy_(slice(table_, 0, position_, position_ + count));
    done += count;
    position_ = (position_ + count) % table_.numel();
  }
  return out;
}

}  // namespace heddle::examples
