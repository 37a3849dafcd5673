#include <vector>

#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/tensor_table.cuh"
#include "kernels/optimizer/update_numbers.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/group.cuh"

namespace heddle::cuda {
namespace {

template <typename A>
struct AdamWItem {
  A* weight;
  const A* grad;
  A* first;
  A* second;
  void* rounded;  // null where there is none
  bool is_bf16;   // dtype of rounded, else float16
  double weight_decay, rate_scale;
  std::int64_t count;
};

// Where the numbers of an update lie on the device, and its constants.
struct PrepareTask {
  double beta1, beta2, max_grad_norm;
  const double* learning_rate;
  const double* grad_scale;
  const double* grad_norm;
  const double* loss;  // null where there is none
  std::int64_t* step;
  UpdateNumbers* out;
};

// One thread.
__global__ void prepare_kernel(const PrepareTask task) {
  const UpdateInputs inputs{task.beta1, task.beta2, task.max_grad_norm, *task.learning_rate, *task.grad_scale, *task.grad_norm,
                            task.loss != nullptr ? *task.loss : 0.0};
  *task.out = update_numbers(inputs, *task.step + 1);
  if (task.out->applies) *task.step += 1;
}

template <typename A>
struct AdamWConstants {
  A keep1, take1, keep2, take2, eps;
};

template <typename A>
__global__ void adamw_kernel(const __grid_constant__ TensorTable<AdamWItem<A>> table, const AdamWConstants<A> constants,
                             const UpdateNumbers* update) {
  const UpdateNumbers numbers = *update;
  if (!numbers.applies) return;
  const TablePart part = table_part(table);
  const AdamWItem<A> item = table.items[part.index];
  const auto& [keep1, take1, keep2, take2, eps] = constants;
  const A rate = static_cast<A>(numbers.rate * item.rate_scale), root = static_cast<A>(numbers.root), factor = static_cast<A>(numbers.factor);
  const A keep_weight = static_cast<A>(1.0 - numbers.learning_rate * item.rate_scale * item.weight_decay);
#pragma unroll 4
  for (std::int64_t i = part.begin + threadIdx.x; i < part.end; i += kBlock) {
    const A g = factor * item.grad[i];
    const A m = keep1 * item.first[i] + take1 * g;
    const A v = keep2 * item.second[i] + take2 * g * g;
    const A weight = keep_weight * item.weight[i] - rate * m / (sqrt(v) * root + eps);
    item.first[i] = m;
    item.second[i] = v;
    item.weight[i] = weight;
    if (item.rounded == nullptr) continue;
    if (item.is_bf16) static_cast<bfloat16*>(item.rounded)[i] = convert<bfloat16>(weight);
    else static_cast<float16*>(item.rounded)[i] = convert<float16>(weight);
  }
}

// Steps the parameters whose master weights have dtype A.
template <typename A>
void adamw_typed(const AdamWArgs& args, const UpdateNumbers* numbers, const ExecContext& ctx) {
  std::vector<AdamWItem<A>> items;
  for (const AdamWParameter& parameter : args.parameters) {
    if (parameter.weight.dtype != dtype_of<A>()) continue;
    const DType rounded = parameter.rounded.dtype;
    HEDDLE_CHECK(!parameter.rounded.defined() || rounded == DType::bf16 || rounded == DType::f16,
                 "adamw: the rounded copy must be bfloat16 or float16, got ", rounded);
    items.push_back({parameter.weight.as<A>(), parameter.grad.as<A>(), parameter.first_moment.as<A>(), parameter.second_moment.as<A>(),
                     parameter.rounded.data, rounded == DType::bf16, parameter.weight_decay, parameter.rate_scale, parameter.weight.numel()});
  }
  const AdamWConstants<A> constants{static_cast<A>(args.beta1), static_cast<A>(1.0 - args.beta1), static_cast<A>(args.beta2),
                                    static_cast<A>(1.0 - args.beta2), static_cast<A>(args.eps)};
  for_each_table<AdamWItem<A>>(items, [&](const auto& table) {
    adamw_kernel<<<table.blocks(), kBlock, 0, stream_of(ctx)>>>(table, constants, numbers);
    check_launch("adamw");
  });
}

struct ListItem {
  const void* data;
  DType dtype;
  unsigned number;  // in the caller's list
  std::int64_t count;
};

// fn(T*) with the element type of the item; the same branch for a whole block.
template <typename Fn>
__device__ void with_elements(const ListItem& item, const Fn& fn) {
  switch (item.dtype) {
    case DType::f64: return fn(static_cast<const double*>(item.data));
    case DType::f32: return fn(static_cast<const float*>(item.data));
    case DType::bf16: return fn(static_cast<const bfloat16*>(item.data));
    default: return fn(static_cast<const float16*>(item.data));
  }
}

// `first_nonfinite` ends as the least number of an item whose sum is not finite.
__global__ void sum_of_squares_kernel(const __grid_constant__ TensorTable<ListItem> table, double* partial, unsigned* first_nonfinite) {
  const TablePart part = table_part(table);
  double own = 0.0;
  with_elements(table.items[part.index], [&](const auto* x) {
#pragma unroll 4
    for (std::int64_t i = part.begin + threadIdx.x; i < part.end; i += kBlock) {
      const auto value = convert<double>(x[i]);
      own += value * value;
    }
  });
  const double total = sum_group<kBlock>(own);
  if (threadIdx.x != 0) return;
  partial[blockIdx.x] = total;
  if (!isfinite(total)) atomicMin(first_nonfinite, table.items[part.index].number);
}

constexpr int kNormThreads = 1024;
constexpr unsigned kNone = 0xFFFFFFFFu;

__global__ void norm_of_parts_kernel(const double* partial, std::int64_t parts, const unsigned* first_nonfinite, double* out, double* index) {
  double own = 0.0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < parts; i += kNormThreads) own += partial[i];
  const double total = sum_group<kNormThreads>(own);
  if (threadIdx.x != 0) return;
  *out = sqrt(total);
  if (index != nullptr) *index = *first_nonfinite == kNone ? -1.0 : static_cast<double>(*first_nonfinite);
}

}  // namespace

void adamw(const AdamWArgs& args, const ExecContext& ctx) {
  const Buffer memory(sizeof(UpdateNumbers), ctx.device);
  const auto numbers = static_cast<UpdateNumbers*>(memory.data());
  prepare_kernel<<<1, 1, 0, stream_of(ctx)>>>({args.beta1, args.beta2, args.max_grad_norm, args.learning_rate.as<double>(),
                                               args.grad_scale.as<double>(), args.grad_norm.as<double>(),
                                               args.loss.defined() ? args.loss.as<double>() : nullptr, args.step.as<std::int64_t>(), numbers});
  check_launch("adamw");
  adamw_typed<float>(args, numbers, ctx);
  adamw_typed<double>(args, numbers, ctx);
}

void global_norm(const GlobalNormArgs& args, const ExecContext& ctx) {
  std::vector<ListItem> items;
  std::int64_t parts = 0;
  for (const ConstView& tensor : args.tensors) {
    HEDDLE_CHECK(is_floating(tensor.dtype), "global_norm: needs floating-point tensors, got ", tensor.dtype);
    items.push_back({tensor.data, tensor.dtype, static_cast<unsigned>(items.size()), tensor.numel()});
    parts += (tensor.numel() + kTableChunk - 1) / kTableChunk;
  }
  const Buffer memory(parts * static_cast<std::int64_t>(sizeof(double)), ctx.device), first(sizeof(unsigned), ctx.device);
  const auto partial = static_cast<double*>(memory.data());
  const auto first_nonfinite = static_cast<unsigned*>(first.data());
  HEDDLE_CUDA_CHECK(cudaMemsetAsync(first_nonfinite, 0xFF, sizeof(unsigned), stream_of(ctx)));  // kNone
  std::int64_t done = 0;
  for_each_table<ListItem>(items, [&](const auto& table) {
    sum_of_squares_kernel<<<table.blocks(), kBlock, 0, stream_of(ctx)>>>(table, partial + done, first_nonfinite);
    check_launch("global_norm");
    done += table.blocks();
  });
  norm_of_parts_kernel<<<1, kNormThreads, 0, stream_of(ctx)>>>(partial, parts, first_nonfinite, args.out.as<double>(),
                                                               args.first_nonfinite.defined() ? args.first_nonfinite.as<double>() : nullptr);
  check_launch("global_norm");
}

}  // namespace heddle::cuda
