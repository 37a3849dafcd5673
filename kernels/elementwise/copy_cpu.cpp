#include "kernels/elementwise/chunk_cpu.h"
#include "kernels/elementwise/elementwise_backends.h"

// Kernels that move values: every dtype, not only the floating ones.

namespace heddle::cpu {
namespace {

// Bit for bit, within one dtype.
void copy_same(const CopyArgs& args) {
  const StridedLoop<2> loop(args.out.shape, {broadcast_strides(args.source.shape, args.source.strides, args.out.shape), args.out.strides});
  const std::int64_t from_stride = loop.inner_stride(0), to_stride = loop.inner_stride(1);
  dispatch_any(args.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    loop.run([&](const std::array<std::int64_t, 2>& offsets, std::int64_t count) {
      const T* from = args.source.as<T>() + offsets[0];
      T* to = args.out.as<T>() + offsets[1];
      if (from_stride == 1 && to_stride == 1) std::copy_n(from, count, to);
      else for (std::int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
    });
  });
}

template <typename A>
void copy_converted(const CopyArgs& args) {
  if (args.write == Write::assign)
    map_chunks<A, 1, 1>({args.source}, {args.out}, [](const auto& in, auto& out) { out[0] = in[0]; });
  else
    map_chunks<A, 2, 1>({args.source, args.out}, {args.out}, [](const auto& in, auto& out) { out[0] = in[1] + in[0]; });
}

bool fits_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }

}  // namespace

void copy(const CopyArgs& args, const ExecContext&) {
  if (args.write == Write::assign && args.source.dtype == args.out.dtype) copy_same(args);
  else if (fits_float(args.source.dtype) && fits_float(args.out.dtype)) copy_converted<float>(args);
  else copy_converted<double>(args);
}

void fill(const FillArgs& args, const ExecContext&) {
  const StridedLoop<1> loop(args.out.shape, {args.out.strides});
  const std::int64_t stride = loop.inner_stride(0);
  dispatch_any(args.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T value;
    store(&args.value, {&value, args.out.dtype, kCpu, {}, {}}, 0, 1, 1);
    loop.run([&](const std::array<std::int64_t, 1>& offsets, std::int64_t count) {
      T* to = args.out.as<T>() + offsets[0];
      for (std::int64_t i = 0; i < count; ++i) to[i * stride] = value;
    });
  });
}

void select(const SelectArgs& args, const ExecContext&) {
  const auto strides_of = [&](const ConstView& view) { return broadcast_strides(view.shape, view.strides, args.out.shape); };
  const StridedLoop<4> loop(args.out.shape,
                            {strides_of(args.condition), strides_of(args.a), strides_of(args.b), args.out.strides});
  dispatch_any(args.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    loop.run([&](const std::array<std::int64_t, 4>& offsets, std::int64_t count) {
      const bool* condition = args.condition.as<bool>() + offsets[0];
      const T* a = args.a.as<T>() + offsets[1];
      const T* b = args.b.as<T>() + offsets[2];
      T* out = args.out.as<T>() + offsets[3];
      for (std::int64_t i = 0; i < count; ++i) {
        const bool chosen = condition[i * loop.inner_stride(0)];
        out[i * loop.inner_stride(3)] = chosen ? a[i * loop.inner_stride(1)] : b[i * loop.inner_stride(2)];
      }
    });
  });
}

}  // namespace heddle::cpu
