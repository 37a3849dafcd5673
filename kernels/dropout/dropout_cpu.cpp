#include "kernels/dropout/dropout.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/runtime/random.h"
#include "kernels/runtime/strided.h"

namespace heddle::cpu {
namespace {

constexpr std::int64_t kWords = 128;

// The words of elements [first, first + count), count <= kWords; returns where the first one is.
const std::uint32_t* draw(const DropoutArgs& args, std::int64_t first, std::int64_t count, std::array<std::uint32_t, kWords + 4>& words) {
  const std::int64_t first_block = first / 4, last_block = (first + count + 3) / 4;
  for (std::int64_t block = first_block; block < last_block; ++block) {
    const auto four = philox(args.seed, args.offset + static_cast<std::uint64_t>(block), 0);
    std::copy(four.begin(), four.end(), words.begin() + (block - first_block) * 4);
  }
  return words.data() + first % 4;
}

template <typename T>
void dropout_typed(const DropoutArgs& args) {
  using A = accumulate_t<T>;
  const StridedLoop<2> loop(args.x.shape, {args.x.strides, args.out.strides});
  const auto dropped_below = static_cast<std::uint64_t>(std::llround(std::ldexp(args.p, 32)));
  const A factor = static_cast<A>(1.0 / (1.0 - args.p));
  const std::int64_t from_step = loop.inner_stride(0), to_step = loop.inner_stride(1);
  parallel_for(args.x.numel(), 8192, [&](std::int64_t begin, std::int64_t end) {
    std::array<std::uint32_t, kWords + 4> words;
    std::int64_t element = begin;
    loop.walk(begin, end, [&](const std::array<std::int64_t, 2>& offsets, std::int64_t run) {
      const T* x = args.x.as<T>() + offsets[0];
      T* out = args.out.as<T>() + offsets[1];
      for (std::int64_t done = 0; done < run; done += kWords) {
        const std::int64_t count = std::min(kWords, run - done);
        const std::uint32_t* word = draw(args, element + done, count, words);
        for (std::int64_t i = 0; i < count; ++i) {
          const A kept = static_cast<A>(x[(done + i) * from_step]) * factor;
          out[(done + i) * to_step] = static_cast<T>(word[i] < dropped_below ? A(0) : kept);
        }
      }
      element += run;
    });
  });
}

}  // namespace

void dropout(const DropoutArgs& args, const ExecContext&) {
  dispatch_float(args.x.dtype, "dropout", [&](auto tag) { dropout_typed<typename decltype(tag)::type>(args); });
}

}  // namespace heddle::cpu
