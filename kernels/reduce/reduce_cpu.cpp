#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "kernels/reduce/reduce.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/strided.h"

namespace heddle::cpu {
namespace {

// Output elements one task works on. Along columns their sums stay in L1 while the input streams past in long runs; along
// rows few are enough.
constexpr std::int64_t kColumnBlock = 512;
constexpr std::int64_t kRowBlock = 16;
// Additions that are worth a task of their own.
constexpr std::int64_t kTaskWork = std::int64_t{1} << 15;

// A stride known to be 1, for the loops that are to be vectorised.
using UnitStride = std::integral_constant<std::int64_t, 1>;

// Sum of n elements in 32 interleaved partial sums, which the compiler keeps in vector registers.
template <typename A, typename T, typename Stride>
A sum_run(const T* x, Stride stride, std::int64_t n) {
  constexpr int kLanes = 32;
  std::array<A, kLanes> lanes{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<A>(x[(i + lane) * stride]);
  for (; i < n; ++i) lanes[0] += static_cast<A>(x[i * stride]);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// sums[c] += the sum of column c of `rows` rows, four rows at a time so that sums pass through memory a fourth as often.
template <typename A, typename T, typename Stride>
void add_columns(const T* x, std::int64_t row_stride, std::int64_t rows, Stride stride, std::int64_t columns, A* __restrict sums) {
  const auto at = [=](std::int64_t r, std::int64_t c) { return static_cast<A>(x[r * row_stride + c * stride]); };
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    for (std::int64_t c = 0; c < columns; ++c) sums[c] += (at(r, c) + at(r + 1, c)) + (at(r + 2, c) + at(r + 3, c));
  for (; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) sums[c] += at(r, c);
}

// One sum, cut into the dimensions that stay (walked by `kept`: input, output) and those that go (`reduced`: input).
template <typename T>
class Summation {
  using A = accumulate_t<T>;

 public:
  explicit Summation(const SumArgs& args) : args_(args), kept_(kept_loop(args)), reduced_(reduced_loop(args)) {
    // The inner loop runs along the smaller stride.
    sums_rows_ = reduced_.inner_size() > 1 && (kept_.inner_size() == 1 || reduced_.inner_stride(0) < kept_.inner_stride(0));
  }

  void run() const {
    const std::int64_t outputs = kept_.shape.numel(), terms = reduced_.shape.numel();
    const std::int64_t block = sums_rows_ ? kRowBlock : kColumnBlock;
    const std::int64_t blocks = (outputs + block - 1) / block;
    const std::int64_t splits =
        blocks >= kReductionChunks ? 1 : std::clamp<std::int64_t>(outputs * terms / kTaskWork, 1, kReductionChunks);
    std::vector<A> partial(static_cast<std::size_t>(outputs * splits));  // [splits, outputs]
    const std::int64_t grain = std::max<std::int64_t>(1, kTaskWork / (block * (terms / splits + 1)));
    parallel_for(blocks * splits, grain, [&](std::int64_t task, std::int64_t last) {
      for (; task < last; ++task) {
        const std::int64_t split = task / blocks, first = task % blocks * block;
        add_block(first, std::min(first + block, outputs), terms * split / splits, terms * (split + 1) / splits,
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

  // Adds terms [from, to) of outputs [first, last) to sums.
  void add_block(std::int64_t first, std::int64_t last, std::int64_t from, std::int64_t to, A* sums) const {
    const std::int64_t across = kept_.inner_stride(0), along = reduced_.inner_stride(0);
    kept_.walk(first, last, [&](const std::array<std::int64_t, 2>& kept, std::int64_t outputs) {
      reduced_.walk(from, to, [&](const std::array<std::int64_t, 1>& reduced, std::int64_t terms) {
        const T* x = args_.x.as<T>() + kept[0] + reduced[0];
        if (sums_rows_)
          for (std::int64_t c = 0; c < outputs; ++c)
            sums[c] += along == 1 ? sum_run<A>(x + c * across, UnitStride{}, terms) : sum_run<A>(x + c * across, along, terms);
        else if (across == 1) add_columns(x, along, terms, UnitStride{}, outputs, sums);
        else add_columns(x, along, terms, across, outputs, sums);
      });
      sums += outputs;
    });
  }

  void write(std::vector<A>& partial, std::int64_t splits) const {
    const std::int64_t outputs = kept_.shape.numel();
    add_columns(partial.data() + outputs, outputs, splits - 1, UnitStride{}, outputs, partial.data());
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
  bool sums_rows_;
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
