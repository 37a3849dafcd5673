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

// lse and loss of every row, a group a row. A label outside [0, V) gives NaN and a fault.
template <int kThreads, typename T>
__global__ void row_losses_kernel(const LossTask<T> task, accumulate_t<T>* lse, double* losses, FaultSlot faults, Fault fault) {
  using A = accumulate_t<T>;
  const Group<kThreads> group;
  for (std::int64_t r = group.first; r < task.rows; r += group.stride) {
    const T* logits = task.logits + r * task.row;
    const MaxAndSum<A> all = max_and_sum<kThreads, A>(task.V, group.lane, [&](std::int64_t v) { return convert<A>(logits[v * task.column]); });
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

// One block: the sum of the rows' losses in float64 and the count of valid labels.
template <typename A>
__global__ void total_loss_kernel(const double* losses, const std::int64_t* labels, std::int64_t rows, std::int64_t ignore_index,
                                  bool is_mean, A* loss, std::int64_t* valid) {
  double total = 0.0;
  std::int64_t count = 0;
  for (std::int64_t r = threadIdx.x; r < rows; r += kBlock) {
    total += losses[r];
    count += labels[r] != ignore_index ? 1 : 0;
  }
  total = sum_group<kBlock>(total);
  count = sum_group<kBlock>(count);
  if (threadIdx.x != 0) return;
  *valid = count;
  *loss = static_cast<A>(is_mean && count > 0 ? total / static_cast<double>(count) : total);
}

// A block a row.
template <typename T>
__global__ void loss_backward_kernel(const LossTask<T> task, const accumulate_t<T>* lse, const std::int64_t* valid,
                                     const accumulate_t<T>* dloss, T* dlogits, std::int64_t row, std::int64_t column) {
  using A = accumulate_t<T>;
  const A factor = *dloss / (task.is_mean ? static_cast<A>(*valid > 1 ? *valid : 1) : A(1));
  for (std::int64_t r = blockIdx.x; r < task.rows; r += gridDim.x) {
    const std::int64_t label = task.labels[r];
    const A row_lse = lse[r];
    const bool is_ignored = label == task.ignore_index, has_no_mass = row_lse == -infinity<A>();
    for (std::int64_t v = threadIdx.x; v < task.V; v += blockDim.x) {
      const A x = convert<A>(task.logits[r * task.row + v * task.column]);
      A d = is_ignored || has_no_mass ? A(0) : exp(x - row_lse) * factor;
      if (!is_ignored && v == label) d -= factor;
      dlogits[r * row + v * column] = convert<T>(d);
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
        row_losses_kernel<threads><<<grid_for(task.rows, Group<threads>::kInBlock, ctx), kBlock, 0, stream_of(ctx)>>>(
            task, args.lse.as<A>(), row_losses, fault_slot(ctx.device.index),
            Fault{.describe = describe_label, .limit = task.V, .other = args.ignore_index});
      });
      check_launch("cross_entropy");
    }
    total_loss_kernel<A><<<1, kBlock, 0, stream_of(ctx)>>>(row_losses, task.labels, task.rows, args.ignore_index, args.is_mean, args.loss.as<A>(),
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
    loss_backward_kernel<<<grid_for(task.rows, 1, ctx), kBlock, 0, stream_of(ctx)>>>(
        task, args.lse.as<A>(), args.valid.as<std::int64_t>(), args.dloss.as<A>(), args.dlogits.as<T>(), args.dlogits.strides[0],
        args.dlogits.strides[1]);
  });
  check_launch("cross_entropy_backward");
}

}  // namespace heddle::cuda
