#include <cmath>
#include <vector>

#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/tensor_table.cuh"
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
  void* rounded;        // null where there is none
  bool is_bf16;         // dtype of rounded, else float16
  A keep_weight;
  std::int64_t count;
};

template <typename A>
struct AdamWNumbers {
  A keep1, take1, keep2, take2, rate, root, eps;
};

template <typename A>
__global__ void adamw_kernel(const __grid_constant__ TensorTable<AdamWItem<A>> table, const AdamWNumbers<A> numbers) {
  const TablePart part = table_part(table);
  const AdamWItem<A> item = table.items[part.index];
  const auto& [keep1, take1, keep2, take2, rate, root, eps] = numbers;
#pragma unroll 4
  for (std::int64_t i = part.begin + threadIdx.x; i < part.end; i += kBlock) {
    const A g = item.grad[i];
    const A m = keep1 * item.first[i] + take1 * g;
    const A v = keep2 * item.second[i] + take2 * g * g;
    const A weight = item.keep_weight * item.weight[i] - rate * m / (sqrt(v) * root + eps);
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
void adamw_typed(const AdamWArgs& args, const ExecContext& ctx) {
  std::vector<AdamWItem<A>> items;
  for (const AdamWParameter& parameter : args.parameters) {
    if (parameter.weight.dtype != dtype_of<A>()) continue;
    const DType rounded = parameter.rounded.dtype;
    HEDDLE_CHECK(!parameter.rounded.defined() || rounded == DType::bf16 || rounded == DType::f16,
                 "adamw: the rounded copy must be bfloat16 or float16, got ", rounded);
    items.push_back({parameter.weight.as<A>(), parameter.grad.as<A>(), parameter.first_moment.as<A>(), parameter.second_moment.as<A>(),
                     parameter.rounded.data, rounded == DType::bf16, static_cast<A>(1.0 - args.learning_rate * parameter.weight_decay),
                     parameter.weight.numel()});
  }
  const auto t = static_cast<double>(args.step);
  const double correction1 = 1.0 - std::pow(args.beta1, t), correction2 = 1.0 - std::pow(args.beta2, t);
  const AdamWNumbers<A> numbers{static_cast<A>(args.beta1), static_cast<A>(1.0 - args.beta1),
                                static_cast<A>(args.beta2), static_cast<A>(1.0 - args.beta2),
                                static_cast<A>(args.learning_rate / correction1), static_cast<A>(1.0 / std::sqrt(correction2)),
                                static_cast<A>(args.eps)};
  for_each_table<AdamWItem<A>>(items, [&](const auto& table) {
    adamw_kernel<<<table.blocks(), kBlock, 0, stream_of(ctx)>>>(table, numbers);
    check_launch("adamw");
  });
}

struct ListItem {
  void* data;
  DType dtype;
  std::int64_t count;
};

ListItem list_item(const char* op, const ConstView& view) {
  HEDDLE_CHECK(is_floating(view.dtype), op, ": needs floating-point tensors, got ", view.dtype);
  return {const_cast<void*>(view.data), view.dtype, view.numel()};
}

// fn(T*) with the element type of the item; the same branch for a whole block.
template <typename Fn>
__device__ void with_elements(const ListItem& item, const Fn& fn) {
  switch (item.dtype) {
    case DType::f64: return fn(static_cast<double*>(item.data));
    case DType::f32: return fn(static_cast<float*>(item.data));
    case DType::bf16: return fn(static_cast<bfloat16*>(item.data));
    default: return fn(static_cast<float16*>(item.data));
  }
}

__global__ void sum_of_squares_kernel(const __grid_constant__ TensorTable<ListItem> table, double* partial) {
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
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void norm_of_parts_kernel(const double* partial, std::int64_t parts, double* out) {
  double own = 0.0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < parts; i += kBlock) own += partial[i];
  const double total = sum_group<kBlock>(own);
  if (threadIdx.x == 0) *out = sqrt(total);
}

__global__ void scale_kernel(const __grid_constant__ TensorTable<ListItem> table, double factor) {
  const TablePart part = table_part(table);
  with_elements(table.items[part.index], [&](auto* x) {
    using T = std::remove_pointer_t<decltype(x)>;
    using A = accumulate_t<T>;
#pragma unroll 4
    for (std::int64_t i = part.begin + threadIdx.x; i < part.end; i += kBlock) x[i] = convert<T>(static_cast<A>(factor) * convert<A>(x[i]));
  });
}

}  // namespace

void adamw(const AdamWArgs& args, const ExecContext& ctx) {
  adamw_typed<float>(args, ctx);
  adamw_typed<double>(args, ctx);
}

void global_norm(const GlobalNormArgs& args, const ExecContext& ctx) {
  std::vector<ListItem> items;
  std::int64_t parts = 0;
  for (const ConstView& tensor : args.tensors) {
    items.push_back(list_item("global_norm", tensor));
    parts += (tensor.numel() + kTableChunk - 1) / kTableChunk;
  }
  const Buffer memory(parts * static_cast<std::int64_t>(sizeof(double)), ctx.device);
  const auto partial = static_cast<double*>(memory.data());
  std::int64_t done = 0;
  for_each_table<ListItem>(items, [&](const auto& table) {
    sum_of_squares_kernel<<<table.blocks(), kBlock, 0, stream_of(ctx)>>>(table, partial + done);
    check_launch("global_norm");
    done += table.blocks();
  });
  norm_of_parts_kernel<<<1, kBlock, 0, stream_of(ctx)>>>(partial, parts, args.out.as<double>());
  check_launch("global_norm");
}

void scale_all(const ScaleAllArgs& args, const ExecContext& ctx) {
  std::vector<ListItem> items;
  for (const MutView& tensor : args.tensors) items.push_back(list_item("scale_all", tensor));
  for_each_table<ListItem>(items, [&](const auto& table) {
    scale_kernel<<<table.blocks(), kBlock, 0, stream_of(ctx)>>>(table, args.factor);
    check_launch("scale_all");
  });
}

}  // namespace heddle::cuda
