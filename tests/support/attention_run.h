#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "kernels/attention/attention_cpu.h"
#include "kernels/runtime/allocator.h"
#include "tests/support/reference_attention.h"

// Runs the attention kernels on plain memory in any layout.
namespace heddle::test {

// Which dimension is outermost in memory, and so on; kRows is [B, S, H, D] itself.
using MemoryOrder = std::array<int, 4>;
inline constexpr MemoryOrder kRows{0, 1, 2, 3}, kHeads{0, 2, 1, 3}, kSequenceFirst{1, 0, 2, 3}, kColumns{0, 2, 3, 1};

// A [B, S, H, D] tensor in memory of its own that is NaN wherever the tensor is not: between the innermost runs, before
// the first and after the last element.
template <typename E>
class TestTensor {
 public:
  TestTensor(Shape shape, MemoryOrder order = kRows) : shape_(shape), strides_(Shape::filled(4, 0)) {
    std::int64_t stride = 1;
    for (int i = 3; i >= 0; --i) {
      strides_[order[i]] = stride;
      stride = stride * shape[order[i]] + (i == 3 ? kGap : 0);
    }
    memory_.assign(stride + 2 * kGap, static_cast<E>(std::numeric_limits<float>::quiet_NaN()));
  }
  TestTensor(Shape shape, const std::vector<double>& values, MemoryOrder order = kRows) : TestTensor(shape, order) {
    for_each([&](std::size_t index, E& element) { element = static_cast<E>(values[index]); });
  }

  MutView mut() { return {memory_.data() + kGap, dtype_of<E>(), kCpu, shape_, strides_}; }
  ConstView view() { return mut(); }

  std::vector<double> values() {
    std::vector<double> out(shape_.numel());
    for_each([&](std::size_t index, E& element) { out[index] = static_cast<double>(element); });
    return out;
  }
  // Whether everything outside the tensor still is NaN.
  bool gaps_untouched() {
    std::vector<E> copy = memory_;
    copy.swap(memory_);
    for_each([&](std::size_t, E& element) { element = static_cast<E>(std::numeric_limits<float>::quiet_NaN()); });
    copy.swap(memory_);
    for (const E& element : copy)
      if (!std::isnan(static_cast<double>(element))) return false;
    return true;
  }

 private:
  static constexpr std::int64_t kGap = 3;

  template <typename Fn>
  void for_each(const Fn& fn) {
    std::size_t index = 0;
    for (std::int64_t b = 0; b < shape_[0]; ++b)
      for (std::int64_t s = 0; s < shape_[1]; ++s)
        for (std::int64_t h = 0; h < shape_[2]; ++h)
          for (std::int64_t d = 0; d < shape_[3]; ++d)
            fn(index++, memory_[kGap + b * strides_[0] + s * strides_[1] + h * strides_[2] + d * strides_[3]]);
  }

  Shape shape_, strides_;
  std::vector<E> memory_;
};

struct Layouts {
  MemoryOrder q = kRows, k = kRows, v = kRows, out = kRows, dout = kRows, dq = kRows, dk = kRows, dv = kRows;
};

// How to run: with the variant's own tile sizes unless `tile` is given; with ends, the rows of a batch of 1 are sequences.
struct AttentionRun {
  std::optional<AttentionTile> tile = {};
  Layouts layouts = {};
  std::vector<std::int32_t> ends_q = {}, ends_k = {};
};

inline std::int64_t longest(const std::vector<std::int32_t>& ends) {
  std::int32_t longest = 0;
  for (std::size_t i = 1; i < ends.size(); ++i) longest = std::max(longest, ends[i] - ends[i - 1]);
  return longest;
}

// Forward, and backward if there is a dout. Outputs start as NaN; writes outside them show as NaN in the results.
template <typename E>
AttentionResults run_attention(const AttentionSizes& sizes, const AttentionInputs& inputs, const AttentionRun& run = {}) {
  using L = accumulate_t<E>;
  const auto& [B, Sq, Sk, Hq, Hkv, D, is_causal, scale] = sizes;
  const Layouts& at = run.layouts;
  const Shape like_q{B, Sq, Hq, D}, like_k{B, Sk, Hkv, D}, like_lse{B, Hq, Sq};
  const AttentionTile forward_tile = run.tile.value_or(cpu::kForwardTile);
  const AttentionTile backward_tile = run.tile.value_or(cpu::kBackwardTile);
  const AttentionProblem problem{B, Sq, Sk, Hq, Hkv, D, dtype_of<E>(), is_causal, scale, false, kCpu};
  TestTensor<E> q(like_q, inputs.q, at.q), k(like_k, inputs.k, at.k), v(like_k, inputs.v, at.v), out(like_q, at.out);
  std::vector<L> lse(B * Hq * Sq, std::numeric_limits<L>::quiet_NaN()), dlse(inputs.dlse.begin(), inputs.dlse.end());
  const auto rows = [&](std::vector<L>& values) {
    return MutView{values.data(), dtype_of<L>(), kCpu, like_lse, contiguous_strides(like_lse)};
  };
  const auto ends = [](const std::vector<std::int32_t>& values) {
    return values.empty() ? ConstView{} : ConstView{values.data(), DType::i32, kCpu, {static_cast<std::int64_t>(values.size())}, {1}};
  };
  const AttentionForwardArgs forward{q.view(), k.view(), v.view(), out.mut(), rows(lse), is_causal, scale,
                                     ends(run.ends_q), ends(run.ends_k), longest(run.ends_q), longest(run.ends_k)};
  if (run.tile) {
    const Buffer workspace(cpu::attention_forward_workspace(problem, forward_tile), kCpu);
    cpu::attention_forward(forward, forward_tile, workspace.data());
  } else {
    attention_forward(forward, "auto", ExecContext{});
  }
  AttentionResults results{out.values(), {lse.begin(), lse.end()}, {}, {}, {}};
  bool intact = out.gaps_untouched();
  if (!inputs.dout.empty()) {
    TestTensor<E> dout(like_q, inputs.dout, at.dout), dq(like_q, at.dq), dk(like_k, at.dk), dv(like_k, at.dv);
    const AttentionBackwardArgs args{q.view(), k.view(), v.view(), out.view(), rows(lse), dout.view(),
                                     dlse.empty() ? ConstView{} : ConstView(rows(dlse)),
                                     dq.mut(), dk.mut(), dv.mut(), is_causal, scale,
                                     ends(run.ends_q), ends(run.ends_k), longest(run.ends_q), longest(run.ends_k)};
    if (run.tile) {
      const Buffer workspace(cpu::attention_backward_workspace(problem, backward_tile), kCpu);
      cpu::attention_backward(args, backward_tile, workspace.data());
    } else {
      attention_backward(args, "auto", ExecContext{});
    }
    results.dq = dq.values(), results.dk = dk.values(), results.dv = dv.values();
    intact = intact && dq.gaps_untouched() && dk.gaps_untouched() && dv.gaps_untouched();
  }
  if (!intact) throw Error("run_attention: a kernel wrote outside its output");
  return results;
}

// Standard normal values that E can hold.
template <typename E>
std::vector<double> random_values(std::int64_t count, unsigned seed, double scale = 1.0) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& value : values) value = static_cast<double>(static_cast<E>(scale * normal(generator)));
  return values;
}

template <typename E>
AttentionInputs random_inputs(const AttentionSizes& s, unsigned seed) {
  return {random_values<E>(s.B * s.Sq * s.Hq * s.D, seed), random_values<E>(s.B * s.Sk * s.Hkv * s.D, seed + 1),
          random_values<E>(s.B * s.Sk * s.Hkv * s.D, seed + 2), random_values<E>(s.B * s.Sq * s.Hq * s.D, seed + 3),
          random_values<accumulate_t<E>>(s.B * s.Hq * s.Sq, seed + 4)};
}

}  // namespace heddle::test
