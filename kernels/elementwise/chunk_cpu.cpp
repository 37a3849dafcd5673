#include "kernels/elementwise/chunk_cpu.h"

namespace heddle::cpu {
namespace {

template <typename To, typename From>
To convert(From value) {
  if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else if constexpr (sizeof(To) == 2) {
    if constexpr (std::is_same_v<From, double>) return To(round_to_odd(value));
    else return To(value);
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace

template <typename A>
void load(A* chunk, const ConstView& view, std::int64_t offset, std::int64_t stride, std::int64_t count) {
  dispatch_any(view.dtype, [&](auto tag) {
    const auto* from = view.template as<typename decltype(tag)::type>() + offset;
    if (stride == 1) {
      for (std::int64_t i = 0; i < count; ++i) chunk[i] = static_cast<A>(from[i]);
    } else {
      for (std::int64_t i = 0; i < count; ++i) chunk[i] = static_cast<A>(from[i * stride]);
    }
  });
}

template <typename A>
void store(const A* chunk, const MutView& view, std::int64_t offset, std::int64_t stride, std::int64_t count) {
  dispatch_any(view.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = view.template as<T>() + offset;
    if (stride == 1) {
      for (std::int64_t i = 0; i < count; ++i) to[i] = convert<T>(chunk[i]);
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i * stride] = convert<T>(chunk[i]);
    }
  });
}

template void load(float*, const ConstView&, std::int64_t, std::int64_t, std::int64_t);
template void load(double*, const ConstView&, std::int64_t, std::int64_t, std::int64_t);
template void store(const float*, const MutView&, std::int64_t, std::int64_t, std::int64_t);
template void store(const double*, const MutView&, std::int64_t, std::int64_t, std::int64_t);

}  // namespace heddle::cpu
