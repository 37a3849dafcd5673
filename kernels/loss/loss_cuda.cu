#include "kernels/loss/loss.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/fault.cuh"
#include "kernels/runtime/group.cuh"

namespace heddle::cuda {
namespace {

std::string describe_label(const Fault& fault) {
  return concat_text("cross_entropy: label ", fault.value, " at position ", fault.position, " is outside [0, ", fault.limit,
                     ") and is not ignore_index ", fault.other);
}

template <typename T>
struct LossTask {
  std::int64_t rows, V;
  const T* logits;
  std::int64_t row, column;  // strides of logits
  const std::int64_t* labels;
  std::int64_t ignore_index;
  bool is_mean;

  __device__ bool is_inside(std::int64_t label) const { return label >= 0 && label < V; }
};

template <typename T>
LossTask<T> loss_task(const ConstView& logits, const ConstView& labels, std::int64_t ignore_index, bool is_mean) {
  return {logits.shape[0], logits.shape[1], logits.as<T>(), logits.strides[0], logits.strides[1], labels.as<std::int64_t>(), ignore_index, is_mean};
}

// Logits `width` at a time: whole packs of a dense, aligned matrix, or single elements of any other.
bool has_packs(const ConstView& logits, int width) {
  const auto size = static_cast<std::int64_t>(dtype_size(logits.dtype));
  return logits.strides[1] == 1 && logits.shape[1] % width == 0 && logits.strides[0] % width == 0 &&
         reinterpret_cast<std::uintptr_t>(logits.data) % (width * size) == 0;
}

// exp for values that end in T: the hardware's approximation, a few float32 roundings off, where T has 8 or 11 bits.
template <typename T, typename A>
__device__ A exp_for(A x) {
  if constexpr (sizeof(T) == 2) return __expf(x);
  else return exp(x);
}

// The largest logit and the sum of exp(logit - largest) of a row. Where every logit is -inf the sum is 0, and where one is NaN or
// +inf it is NaN: the maximum starts at the lowest finite number, so that no difference of infinities arises before.
template <int kThreads, int V, typename T>
__device__ MaxAndSum<accumulate_t<T>> max_and_sum_of_row(const T* row, std::int64_t packs, std::int64_t step, int lane) {
  using A = accumulate_t<T>;
  A largest = lowest<A>(), sum = 0;
#pragma unroll 4
  for (std::int64_t i = lane; i < packs; i += kThreads) {
    const auto pack = *reinterpret_cast<const Pack<T, V>*>(row + i * step);
    A x[V], top = largest;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      x[k] = convert<A>(pack.at[k]);
      top = x[k] > top ? x[k] : top;
    }
    if (top > largest) sum *= exp_for<T>(largest - top);
    largest = top;
#pragma unroll
    for (int k = 0; k < V; ++k) sum += exp_for<T>(x[k] - top);
  }
  const A top = reduce_group<kThreads>(largest, [](A a, A b) { return a > b ? a : b; });
  return {top, sum_group<kThreads>(sum * exp_for<T>(largest - top))};
}

// lse and loss of every row, a group a row. A label outside [0, V) gives NaN and a fault.
template <int kThreads, int V, typename T>
__global__ void row_losses_kernel(const LossTask<T> task, accumulate_t<T>* lse, double* losses, FaultSlot faults, Fault fault) {
  using A = accumulate_t<T>;
  const Group<kThreads> group;
  for (std::int64_t r = group.first; r < task.rows; r += group.stride) {
    const T* logits = task.logits + r * task.row;
    const auto all = max_and_sum_of_row<kThreads, V>(logits, task.V / V, task.column * V, group.lane);
    if (group.lane != 0) continue;
    const A row_lse = all.sum == A(0) ? -infinity<A>() : all.largest + log(all.sum);
    lse[r] = row_lse;
    const std::int64_t label = task.labels[r];
    if (label == task.ignore_index) {
      losses[r] = 0.0;
    } else if (!task.is_inside(label)) {
      losses[r] = nan("");
      fault.value = label;
      fault.position = r;
      report(faults, fault);
    } else {
      // -inf against an lse of -inf is a probability of 0 as well, not the NaN of their difference.
      const A chosen = convert<A>(logits[label * task.column]);
      losses[r] = chosen == -infinity<A>() ? infinity<double>() : static_cast<double>(row_lse) - static_cast<double>(chosen);
    }
  }
}

constexpr int kTotalThreads = 1024;

// One block: the sum of the rows' losses in float64 and the count of valid labels.
template <typename A>
__global__ void total_loss_kernel(const double* losses, const std::int64_t* labels, std::int64_t rows, std::int64_t ignore_index,
                                  bool is_mean, A* loss, std::int64_t* valid) {
  double total = 0.0;
  std::int64_t count = 0;
#pragma unroll 8
  for (std::int64_t r = threadIdx.x; r < rows; r += kTotalThreads) {
    total += losses[r];
    count += labels[r] != ignore_index ? 1 : 0;
  }
  total = sum_group<kTotalThreads>(total);
  count = sum_group<kTotalThreads>(count);
  if (threadIdx.x != 0) return;
  *valid = count;
  *loss = static_cast<A>(is_mean && count > 0 ? total / static_cast<double>(count) : total);
}

// A group a row. dlogits may be the memory of logits: a thread has read a pack before it writes it.
template <int kThreads, int V, typename T>
__global__ void loss_backward_kernel(const LossTask<T> task, const accumulate_t<T>* lse, const std::int64_t* valid,
                                     const accumulate_t<T>* dloss, T* dlogits, std::int64_t row, std::int64_t column) {
  using A = accumulate_t<T>;
  const Group<kThreads> group;
  const A factor = *dloss / (task.is_mean ? static_cast<A>(*valid > 1 ? *valid : 1) : A(1));
  for (std::int64_t r = group.first; r < task.rows; r += group.stride) {
    const std::int64_t label = task.labels[r];
    const A row_lse = lse[r];
    const bool is_ignored = label == task.ignore_index, has_no_mass = row_lse == -infinity<A>();
#pragma unroll 4
    for (std::int64_t i = group.lane; i < task.V / V; i += kThreads) {
      auto pack = *reinterpret_cast<const Pack<T, V>*>(task.logits + r * task.row + i * V * task.column);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        A d = is_ignored || has_no_mass ? A(0) : exp_for<T>(convert<A>(pack.at[k]) - row_lse) * factor;
        if (!is_ignored && i * V + k == label) d -= factor;
        pack.at[k] = convert<T>(d);
      }
      *reinterpret_cast<Pack<T, V>*>(dlogits + r * row + i * V * column) = pack;
    }
  }
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& args, const ExecContext& ctx) {
  dispatch_float(args.logits.dtype, "cross_entropy", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const LossTask<T> task = loss_task<T>(args.logits, args.labels, args.ignore_index, args.is_mean);
    const Buffer losses(task.rows * static_cast<std::int64_t>(sizeof(double)), ctx.device);
    const auto row_losses = static_cast<double*>(losses.data());
    if (task.rows > 0) {
      with_group(task.V, [&](auto threads) {
        const Fault fault{.describe = describe_label, .limit = task.V, .other = args.ignore_index};
        const int grid = grid_for(task.rows, Group<threads>::kInBlock, ctx);
        const auto launch = [&](auto width) {
          row_losses_kernel<threads, width><<<grid, kBlock, 0, stream_of(ctx)>>>(task, args.lse.as<A>(), row_losses,
                                                                                 fault_slot(ctx.device.index), fault);
        };
        if (has_packs(args.logits, kWide<T>)) launch(std::integral_constant<int, kWide<T>>{});
        else launch(std::integral_constant<int, 1>{});
      });
      check_launch("cross_entropy");
    }
    total_loss_kernel<A><<<1, kTotalThreads, 0, stream_of(ctx)>>>(row_losses, task.labels, task.rows, args.ignore_index, args.is_mean, args.loss.as<A>(),
                                                           args.valid.as<std::int64_t>());
    check_launch("cross_entropy");
  });
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecContext& ctx) {
  if (args.dlogits.numel() == 0) return;
  dispatch_float(args.logits.dtype, "cross_entropy_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const LossTask<T> task = loss_task<T>(args.logits, args.labels, args.ignore_index, args.is_mean);
    with_group(task.V, [&](auto threads) {
      const int grid = grid_for(task.rows, Group<threads>::kInBlock, ctx);
      const auto launch = [&](auto width) {
        loss_backward_kernel<threads, width><<<grid, kBlock, 0, stream_of(ctx)>>>(
            task, args.lse.as<A>(), args.valid.as<std::int64_t>(), args.dloss.as<A>(), args.dlogits.as<T>(), args.dlogits.strides[0],
            args.dlogits.strides[1]);
      };
      if (has_packs(args.logits, kWide<T>) && has_packs(args.dlogits, kWide<T>)) launch(std::integral_constant<int, kWide<T>>{});
      else launch(std::integral_constant<int, 1>{});
    });
  });
  check_launch("cross_entropy_backward");
}

}  // namespace heddle::cuda
