#pragma once

#include <cstring>
#include <iostream>
#include <map>

#include "tests/support/attention_tensors.h"

// What the tests of the GPU's attention kernels share: which variants run, and how their results are judged.
namespace heddle::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline double default_scale(std::int64_t D) { return 1.0 / std::sqrt(static_cast<double>(D)); }

inline std::string describe(const AttentionSizes& s, DType dtype) {
  return concat_text(dtype, " B", s.B, " Sq", s.Sq, " Sk", s.Sk, " Hq", s.Hq, " Hkv", s.Hkv, " D", s.D, s.is_causal ? " causal" : " full");
}

inline double largest(const Tensor& x) {
  double most = 0;
  for (double value : x.to_doubles())
    if (std::isfinite(value)) most = std::max(most, std::abs(value));
  return most;
}

// The largest difference and where it is; infinite where exactly one side is not finite or the infinities differ.
struct Difference {
  double value = 0;
  std::size_t index = 0;
};
inline Difference worst_difference(const std::vector<double>& x, const std::vector<double>& y) {
  Difference worst;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;
    const double difference = std::abs(x[i] - y[i]);
    if (!(difference <= worst.value)) worst = {std::isnan(difference) ? kInfinity : difference, i};
  }
  return worst;
}

inline bool has_same_bits(const Guarded& a, const Guarded& b) {
  const Tensor x = contiguous(a.part.to(kCpu)), y = contiguous(b.part.to(kCpu));
  return std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(x.nbytes())) == 0;
}

inline bool has_same_bits(const Forward& a, const Forward& b) { return has_same_bits(a.out, b.out) && has_same_bits(a.lse, b.lse); }
inline bool has_same_bits(const Backward& a, const Backward& b) {
  return has_same_bits(a.dq, b.dq) && has_same_bits(a.dk, b.dk) && has_same_bits(a.dv, b.dv);
}

// The variants that run on the GPU, and how often each pass of each ran or was refused.
inline std::vector<std::string_view> gpu_variants() {
  std::vector<std::string_view> names;
  for (const AttentionVariant& variant : attention_variants())
    if (variant.name != "cpu") names.push_back(variant.name);
  return names;
}

inline bool can_run(std::string_view name, AttentionPass pass, DType dtype) {
  const AttentionProblem problem{
      .B = 1, .Sq = 128, .Sk = 128, .Hq = 2, .Hkv = 2, .D = 64, .dtype = dtype, .is_causal = true, .device = kCuda};
  const auto runs = [&](const AttentionVariant& variant) { return variant.name == name && variant.supports(problem, pass).ok; };
  return std::ranges::any_of(attention_variants(), runs);
}

// The dtypes that some variant runs on this device.
inline std::vector<DType> tested_dtypes() {
  std::vector<DType> dtypes;
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (std::string_view name : gpu_variants())
      if ((dtypes.empty() || dtypes.back() != dtype) && can_run(name, AttentionPass::forward, dtype)) dtypes.push_back(dtype);
  return dtypes;
}

struct Tally {
  std::map<std::string, int> ran, refused;

  bool count(std::string_view variant, std::string_view pass, DType dtype, const std::string& refusal) {
    ++(refusal.empty() ? ran : refused)[concat_text(variant, ' ', pass, ' ', dtype)];
    return refusal.empty();
  }
  void print() const {
    for (const auto& [name, count] : ran) std::cout << "  " << name << ": ran " << count << '\n';
    for (const auto& [name, count] : refused) std::cout << "  " << name << ": refused " << count << '\n';
  }
  // Fails for a pass that the device has but no case ran.
  void expect_all_ran() const {
    print();
    for (std::string_view name : gpu_variants())
      for (DType dtype : {DType::bf16, DType::f16, DType::f32})
        for (const auto& [pass, pass_name] : {std::pair{AttentionPass::forward, "forward"}, {AttentionPass::backward, "backward"}}) {
          const std::string what = concat_text(name, ' ', pass_name, ' ', dtype);
          EXPECT_TRUE(ran.contains(what) || !can_run(name, pass, dtype)) << what;
        }
  }
};

// What the results of one problem are held against: at most `factor` times the naive code's error, one rounding of the stored
// result, and what three float32 roundings of the largest score do to every probability (of its sum, of the product with the
// scale, and of lse). A gradient of keys or values adds that up over the queries that see them.
class Bounds {
 public:
  Bounds(const AttentionSizes& sizes, const AttentionValues& values, DType dtype, const AttentionOutputs& truth)
      : label_(describe(sizes, dtype)) {
    const NaiveAttention naive = naive_attention(sizes, values, dtype, kCuda);
    const double root = std::sqrt(static_cast<double>(sizes.D)), store = unit_roundoff(dtype), float_store = unit_roundoff(DType::f32);
    const double q = largest(values.q), k = largest(values.k), v = largest(values.v), dout = largest(values.dout);
    const double step = 3 * float_store * (1 + std::max(sizes.scale * root * q * k, largest(truth.lse)));
    const double dp = root * v * dout + (values.dlse.defined() ? largest(values.dlse) : 0);
    out_ = {"out", truth.out, naive.out, 2, store, step * v};
    lse_ = {"lse", truth.lse, naive.lse, 2, float_store, step};
    dq_ = {"dq", truth.dq, naive.dq, 3, store, step * sizes.scale * dp * k};
    dk_ = {"dk", truth.dk, naive.dk, 3, store, step * sizes.scale * dp * q * naive.most_seen};
    dv_ = {"dv", truth.dv, naive.dv, 3, store, step * dout * naive.most_seen};
  }

  void check_values(const Forward& f, const std::string& who) const { check(out_, f.out, who), check(lse_, f.lse, who); }
  void check_values(const Backward& b, const std::string& who) const {
    check(dq_, b.dq, who), check(dk_, b.dk, who), check(dv_, b.dv, who);
  }
  // Also that nothing around the results was written.
  void check(const Forward& f, const std::string& who) const {
    check_values(f, who);
    EXPECT_TRUE(f.out.is_intact() && f.lse.is_intact()) << who << " wrote outside its outputs, " << label_;
  }
  void check(const Backward& b, const std::string& who) const {
    check_values(b, who);
    EXPECT_TRUE(b.dq.is_intact() && b.dk.is_intact() && b.dv.is_intact()) << who << " wrote outside its outputs, " << label_;
  }

 private:
  struct Expected {
    const char* name = "";
    std::vector<double> truth;
    double bound = 0;

    Expected() = default;
    Expected(const char* name_of, const Tensor& exact, const Tensor& naive, double factor, double store, double absolute)
        : name(name_of), truth(exact.to_doubles()) {
      bound = factor * worst_difference(naive.to_doubles(), truth).value + store * largest(exact) + absolute;
    }
  };

  void check(const Expected& expected, const Guarded& got, const std::string& who) const {
    const Difference worst = worst_difference(got.part.to_doubles(), expected.truth);
    EXPECT_LE(worst.value, expected.bound) << expected.name << " of " << who << ", " << label_ << ", flat index " << worst.index << " of "
                                           << got.part.shape();
  }

  std::string label_;
  Expected out_, lse_, dq_, dk_, dv_;
};

inline Forward moved(const Forward& f, Device device, const Layout& layout) {
  const auto to = [&](const Guarded& x) { return guarded(x.part.to(device), x.part.dtype(), device, layout); };
  return {"", to(f.out), to(f.lse)};
}

// Asks for the same bits in every run while it lives.
class DeterministicGuard {
 public:
  DeterministicGuard() { device_context(kCuda).deterministic = true; }
  ~DeterministicGuard() { device_context(kCuda).deterministic = false; }
};

}  // namespace heddle::test
