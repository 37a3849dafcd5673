#include <algorithm>
#include <array>
#include <vector>

#include "kernels/reduce/reduce.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/strided.h"

namespace heddle::cpu {
namespace {

// Output elements one task works on: their sums stay in registers and L1 while the input streams past.
constexpr std::int64_t kBlock = 128;
// Additions that are worth a task of their own.
constexpr std::int64_t kTaskWork = std::int64_t{1} << 15;

// Sum of n elements in 32 interleaved partial sums, which the compiler turns into vector registers.
template <typename A, typename T>
A sum_run(const T* x, std::int64_t stride, std::int64_t n) {
  constexpr int kLanes = 32;
  std::array<A, kLanes> lanes{};
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= n; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<A>(x[i + lane]);
  } else {
    for (; i + kLanes <= n; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<A>(x[(i + lane) * stride]);
  }
  for (; i < n; ++i) lanes[0] += static_cast<A>(x[i * stride]);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// sums[c] += row[c * stride].
template <typename A, typename T>
void add_row(const T* row, std::int64_t stride, std::int64_t count, A* sums) {
  if (stride == 1) {
    for (std::int64_t c = 0; c < count; ++c) sums[c] += static_cast<A>(row[c]);
  } else {
    for (std::int64_t c = 0; c < count; ++c) sums[c] += static_cast<A>(row[c * stride]);
  }
}

// One sum, cut into the dimensions that stay (walked by `kept`: input, output) and those that go (`reduced`: input).
template <typename T>
class Summation {
  using A = accumulate_t<T>;

 public:
  explicit Summation(const SumArgs& args) : args_(args), kept_(kept_loop(args)), reduced_(reduced_loop(args)) {}

  void run() const {
    const std::int64_t outputs = kept_.shape.numel(), terms = reduced_.shape.numel();
    const std::int64_t blocks = (outputs + kBlock - 1) / kBlock;
    const std::int64_t splits =
        blocks >= kReductionChunks ? 1 : std::clamp<std::int64_t>(outputs * terms / kTaskWork, 1, kReductionChunks);
    std::vector<A> partial(static_cast<std::size_t>(outputs * splits));  // [splits, outputs]
    const std::int64_t grain = std::max<std::int64_t>(1, kTaskWork / (kBlock * (terms / splits + 1)));
    parallel_for(blocks * splits, grain, [&](std::int64_t task, std::int64_t last) {
      for (; task < last; ++task) {
        const std::int64_t split = task / blocks, first = task % blocks * kBlock;
        add_block(first, std::min(first + kBlock, outputs), terms * split / splits, terms * (split + 1) / splits,
                  partial.data() + split * outputs + first);
      }
    });
    write(partial, splits);
  }

 private:
  static bool is_reduced(const SumArgs& args, int d) { return args.out.shape[d] == 1 && args.x.shape[d] != 1; }

  static StridedLoop<2> kept_loop(const SumArgs& args) {
    Shape shape, from, to;
    for (int d = 0; d < args.x.shape.rank(); ++d) {
      if (is_reduced(args, d)) continue;
      shape.push_back(args.x.shape[d]), from.push_back(args.x.strides[d]), to.push_back(args.out.strides[d]);
    }
    return {shape, {from, to}};
  }

  static StridedLoop<1> reduced_loop(const SumArgs& args) {
    Shape shape, from;
    for (int d = 0; d < args.x.shape.rank(); ++d)
      if (is_reduced(args, d)) shape.push_back(args.x.shape[d]), from.push_back(args.x.strides[d]);
    return {shape, {from}};
  }

  // Adds terms [from, to) of outputs [first, last) to sums. The inner loop runs along the smaller stride.
  void add_block(std::int64_t first, std::int64_t last, std::int64_t from, std::int64_t to, A* sums) const {
    const T* x = args_.x.as<T>();
    const std::int64_t across = kept_.inner_stride(0), along = reduced_.inner_stride(0);
    const bool inner_is_reduced = reduced_.inner_size() > 1 && (kept_.inner_size() == 1 || along < across);
    kept_.walk(first, last, [&](const std::array<std::int64_t, 2>& kept, std::int64_t outputs) {
      reduced_.walk(from, to, [&](const std::array<std::int64_t, 1>& reduced, std::int64_t terms) {
        const T* start = x + kept[0] + reduced[0];
        if (inner_is_reduced)
          for (std::int64_t c = 0; c < outputs; ++c) sums[c] += sum_run<A>(start + c * across, along, terms);
        else
          for (std::int64_t r = 0; r < terms; ++r) add_row(start + r * along, across, outputs, sums);
      });
      sums += outputs;
    });
  }

  void write(std::vector<A>& partial, std::int64_t splits) const {
    const std::int64_t outputs = kept_.shape.numel();
    for (std::int64_t split = 1; split < splits; ++split) add_row(partial.data() + split * outputs, 1, outputs, partial.data());
    if (args_.out.dtype == dtype_of<T>()) write_as<T>(partial.data());
    else write_as<float>(partial.data());
  }

  template <typename Out>
  void write_as(const A* sums) const {
    const A factor = static_cast<A>(args_.factor);
    const std::int64_t stride = kept_.inner_stride(1);
    kept_.walk(0, kept_.shape.numel(), [&](const std::array<std::int64_t, 2>& offsets, std::int64_t count) {
      Out* out = args_.out.as<Out>() + offsets[1];
      for (std::int64_t i = 0; i < count; ++i) {
        const A before = args_.write == Write::accumulate ? static_cast<A>(out[i * stride]) : A(0);
        out[i * stride] = static_cast<Out>(before + factor * sums[i]);
      }
      sums += count;
    });
  }

  const SumArgs& args_;
  StridedLoop<2> kept_;
  StridedLoop<1> reduced_;
};

template <typename T>
void max_typed(const MaxArgs& args) {
  const std::int64_t n = args.x.shape[args.dim], along = args.x.strides[args.dim];
  const StridedLoop<3> loop(without_dim(args.x.shape, args.dim),
                            {without_dim(args.x.strides, args.dim), without_dim(args.out.strides, args.dim),
                             without_dim(args.index.strides, args.dim)});
  const std::int64_t across = loop.inner_stride(0);
  loop.run(
      [&](const std::array<std::int64_t, 3>& offsets, std::int64_t count) {
        for (std::int64_t c = 0; c < count; ++c) {
          const T* x = args.x.as<T>() + offsets[0] + c * across;
          std::int64_t best = 0;
          for (std::int64_t i = 1; i < n; ++i) {
            const T candidate = x[i * along], current = x[best * along];
            if (candidate > current || (candidate != candidate && current == current)) best = i;
          }
          args.out.as<T>()[offsets[1] + c * loop.inner_stride(1)] = x[best * along];
          args.index.as<std::int64_t>()[offsets[2] + c * loop.inner_stride(2)] = best;
        }
      },
      std::max<std::int64_t>(1, kTaskWork / n));
}

template <typename T>
void max_backward_typed(const MaxBackwardArgs& args) {
  const std::int64_t n = args.dx.shape[args.dim], along = args.dx.strides[args.dim];
  const StridedLoop<3> loop(without_dim(args.dx.shape, args.dim),
                            {without_dim(args.dx.strides, args.dim), without_dim(args.dout.strides, args.dim),
                             without_dim(args.index.strides, args.dim)});
  loop.run(
      [&](const std::array<std::int64_t, 3>& offsets, std::int64_t count) {
        for (std::int64_t c = 0; c < count; ++c) {
          T* dx = args.dx.as<T>() + offsets[0] + c * loop.inner_stride(0);
          const std::int64_t best = args.index.as<std::int64_t>()[offsets[2] + c * loop.inner_stride(2)];
          for (std::int64_t i = 0; i < n; ++i) dx[i * along] = T(0);
          dx[best * along] = args.dout.as<T>()[offsets[1] + c * loop.inner_stride(1)];
        }
      },
      std::max<std::int64_t>(1, kTaskWork / n));
}

}  // namespace

void sum(const SumArgs& args, const ExecContext&) {
  dispatch_float(args.x.dtype, "sum", [&](auto tag) { Summation<typename decltype(tag)::type>(args).run(); });
}

void max(const MaxArgs& args, const ExecContext&) {
  dispatch_float(args.x.dtype, "max", [&](auto tag) { max_typed<typename decltype(tag)::type>(args); });
}

void max_backward(const MaxBackwardArgs& args, const ExecContext&) {
  dispatch_float(args.dx.dtype, "max_backward", [&](auto tag) { max_backward_typed<typename decltype(tag)::type>(args); });
}

}  // namespace heddle::cpu
