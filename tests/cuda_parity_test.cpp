// Every op and its gradients: the GPU in each dtype against the CPU in float64 on the same rounded inputs.
//
// Bound: with e the error that the CPU makes in the same dtype, and m the largest value of the result, the GPU may be off by
// 3 e + 4 u m, u being the dtype's unit roundoff. Both sum in the accumulation type and round where the op's contract says so,
// in another order; 3 e allows for that, and 4 u m for results that the CPU happens to hit exactly. In float64 e is 0 by definition:
// there the bound is 2^-43 max(m, 1), the worst rounding of 1024 additions of terms of that size. Gradients are what is left of
// terms of size 1, and may be 0.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "autograd/random.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"

namespace heddle::test {
namespace {

using Inputs = std::vector<Tensor>;

struct OpCase {
  const char* name;
  std::vector<Shape> shapes;
  double low, high;  // inputs are uniform in between
  std::function<Tensor(const Inputs&)> fn;
};

Tensor ids_like(const Tensor& x, std::int64_t count, std::int64_t limit) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * i * 7 + i) % limit;
  return Tensor::from_vector(ids, {count}, x.device());
}

Tensor mask_like(const Tensor& x, const Shape& shape) {
  const Tensor mask = Tensor::empty(shape, DType::boolean);
  bool* values = mask.mutable_view().as<bool>();
  for (std::int64_t i = 0; i < mask.numel(); ++i) values[i] = i % 3 == 0;
  return mask.to(x.device());
}

Tensor labels_like(const Tensor& x, std::int64_t rows, std::int64_t V) {
  std::vector<std::int64_t> labels(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = i % 4 == 1 ? -100 : static_cast<std::int64_t>(i * 13) % V;
  return Tensor::from_vector(labels, {rows}, x.device());
}

std::vector<OpCase> op_cases() {
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  const Shape cube{3, 5, 16};
  return {
      {"neg", {cube}, -2, 2, [](const Inputs& x) { return neg(x[0]); }},
      {"scale", {cube}, -2, 2, [](const Inputs& x) { return scale(x[0], -1.75); }},
      {"add_scalar", {cube}, -2, 2, [](const Inputs& x) { return add_scalar(x[0], 0.375); }},
      {"pow", {cube}, 0.5, 2, [](const Inputs& x) { return pow(x[0], 2.5); }},
      {"exp", {cube}, -2, 2, [](const Inputs& x) { return exp(x[0]); }},
      {"log", {cube}, 0.25, 4, [](const Inputs& x) { return log(x[0]); }},
      {"sqrt", {cube}, 0.25, 4, [](const Inputs& x) { return sqrt(x[0]); }},
      {"relu", {cube}, -2, 2, [](const Inputs& x) { return relu(x[0]); }},
      {"gelu", {cube}, -4, 4, [](const Inputs& x) { return gelu(x[0]); }},
      {"gelu_tanh", {cube}, -4, 4, [](const Inputs& x) { return gelu_tanh(x[0]); }},
      {"silu", {cube}, -4, 4, [](const Inputs& x) { return silu(x[0]); }},
      {"add", {cube, cube}, -2, 2, [](const Inputs& x) { return add(x[0], x[1]); }},
      {"sub_last_dim", {cube, {16}}, -2, 2, [](const Inputs& x) { return sub(x[0], x[1]); }},
      {"mul_middle_dim", {cube, {5, 1}}, -2, 2, [](const Inputs& x) { return mul(x[0], x[1]); }},
      {"div_outer", {{5, 1}, {1, 16}}, 0.5, 2, [](const Inputs& x) { return div(x[0], x[1]); }},
      {"add_expanded", {{1, 16}, {7, 16}}, -2, 2, [](const Inputs& x) { return add(expand(x[0], {7, 16}), x[1]); }},
      {"swiglu", {cube, cube}, -3, 3, [](const Inputs& x) { return swiglu(x[0], x[1]); }},
      {"where", {cube, {16}}, -2, 2, [](const Inputs& x) { return where(mask_like(x[0], {5, 16}), x[0], x[1]); }},
      {"masked_fill", {cube}, -2, 2, [=](const Inputs& x) { return masked_fill(x[0], mask_like(x[0], {5, 1}), kMinusInfinity); }},
      {"cast", {cube}, -2, 2, [](const Inputs& x) { return cast(x[0], DType::f32); }},
      {"dropout", {cube}, -2, 2, [](const Inputs& x) { Generator g{.seed = 11}; return dropout(x[0], 0.3, g); }},
      {"sum_all", {cube}, -2, 2, [](const Inputs& x) { return sum(x[0]); }},
      {"sum_first", {{700, 33}}, -2, 2, [](const Inputs& x) { return sum(x[0], {0}); }},
      {"sum_last", {{7, 1500}}, -2, 2, [](const Inputs& x) { return sum(x[0], {1}); }},
      {"sum_outer_dims", {{6, 40, 9}}, -2, 2, [](const Inputs& x) { return sum(x[0], {0, 2}, /*keepdim=*/true); }},
      {"mean_middle", {{6, 40, 9}}, -2, 2, [](const Inputs& x) { return mean(x[0], {1}); }},
      {"max_last", {{6, 100}}, -2, 2, [](const Inputs& x) { return max(x[0], 1); }},
      {"max_first", {{6, 10}}, -2, 2, [](const Inputs& x) { return max(x[0], 0, /*keepdim=*/true); }},
      {"matmul", {{37, 24}, {24, 19}}, -1, 1, [](const Inputs& x) { return matmul(x[0], x[1]); }},
      {"matmul_vectors", {{1, 24}, {24, 1}}, -1, 1, [](const Inputs& x) { return matmul(x[0], x[1]); }},
      {"matmul_batched", {{2, 3, 17, 8}, {2, 3, 8, 12}}, -1, 1, [](const Inputs& x) { return matmul(x[0], x[1]); }},
      {"matmul_broadcast", {{2, 3, 17, 8}, {3, 8, 12}}, -1, 1, [](const Inputs& x) { return matmul(x[0], x[1]); }},
      {"matmul_permuted", {{2, 9, 3, 8}, {2, 3, 8, 7}}, -1, 1, [](const Inputs& x) { return matmul(permute(x[0], {0, 2, 1, 3}), x[1]); }},
      {"linear", {{5, 9, 24}, {40, 24}}, -1, 1, [](const Inputs& x) { return linear(x[0], x[1]); }},
      {"linear_bias", {{5, 9, 24}, {40, 24}, {40}}, -1, 1, [](const Inputs& x) { return linear(x[0], x[1], x[2]); }},
      {"gelu_mlp", {{5, 9, 24}, {40, 24}, {40}, {16, 40}, {16}}, -1, 1, [](const Inputs& x) { return gelu_mlp(x[0], x[1], x[2], x[3], x[4]); }},
      {"gelu_mlp_odd", {{3, 13}, {11, 13}, {7, 11}}, -1, 1, [](const Inputs& x) { return gelu_mlp(x[0], x[1], {}, x[2], {}); }},
      {"linear_of_one_input", {{5, 9, 24}, {40, 24}, {40, 24}}, -1, 1,
       [](const Inputs& x) { return add(linear(x[0], x[1]), linear(x[0], x[2])); }},
      {"add_low_rank", {{5, 9, 24}, {56, 24}, {12, 24}, {40, 4}, {8, 6}}, -1, 1,
       [](const Inputs& x) {
         const std::vector<Tensor> as = split(x[2], {4, 6, 2}, 0);  // one after another in memory, as the results are side by side
         std::vector<Tensor> ys = linears(x[0], split(x[1], {40, 8, 8}, 0), {Tensor(), Tensor(), Tensor()});
         return concat(add_low_rank(std::move(ys), x[0], {{as[0], x[3], 2}, {as[1], x[4], 0.5}, {}}), 2);
       }},
      {"add_low_rank_one_a", {{5, 9, 24}, {56, 24}, {4, 24}, {56, 4}}, -1, 1,
       [](const Inputs& x) {
         const std::vector<Tensor> bs = split(x[3], {40, 8, 8}, 0);
         std::vector<Tensor> ys = linears(x[0], split(x[1], {40, 8, 8}, 0), {Tensor(), Tensor(), Tensor()});
         return concat(add_low_rank(std::move(ys), x[0], {{x[2], bs[0], 2}, {x[2], bs[1], 2}, {x[2], bs[2], 2}}), 2);
       }},
      {"linears_joined", {{5, 9, 24}, {56, 24}}, -1, 1,
       [](const Inputs& x) { return concat(linears(x[0], split(x[1], {40, 8, 8}, 0), {Tensor(), Tensor(), Tensor()}), 2); }},
      {"linear_odd", {{3, 7, 13}, {11, 13}, {11}}, -1, 1, [](const Inputs& x) { return linear(x[0], x[1], x[2]); }},
      {"softmax_last", {{6, 40}}, -4, 4, [](const Inputs& x) { return softmax(x[0]); }},
      {"softmax_long", {{3, 3000}}, -4, 4, [](const Inputs& x) { return softmax(x[0]); }},
      {"softmax_middle", {cube}, -4, 4, [](const Inputs& x) { return softmax(x[0], 1); }},
      {"log_softmax", {cube}, -4, 4, [](const Inputs& x) { return log_softmax(x[0]); }},
      {"softmax_masked", {cube}, -4, 4, [=](const Inputs& x) { return softmax(masked_fill(x[0], mask_like(x[0], {5, 1}), kMinusInfinity)); }},
      {"layer_norm", {cube, {16}, {16}}, -2, 2, [](const Inputs& x) { return layer_norm(x[0], x[1], x[2], 1e-5); }},
      {"layer_norm_long", {{150, 1300}, {1300}, {1300}}, -2, 2, [](const Inputs& x) { return layer_norm(x[0], x[1], x[2], 1e-5); }},
      // Rows of each kind: in the registers of a warp, of a block, and too long for either.
      {"layer_norm_warp", {{70, 256}, {256}, {256}}, -2, 2, [](const Inputs& x) { return layer_norm(x[0], x[1], x[2], 1e-5); }},
      {"layer_norm_warp_of_packs", {{70, 768}, {768}, {768}}, -2, 2, [](const Inputs& x) { return layer_norm(x[0], x[1], x[2], 1e-5); }},
      {"rms_norm_block", {{37, 2048}, {2048}}, -2, 2, [](const Inputs& x) { return rms_norm(x[0], x[1], 1e-6); }},
      {"rms_norm_very_long", {{5, 4808}, {4808}}, -2, 2, [](const Inputs& x) { return rms_norm(x[0], x[1], 1e-6); }},
      {"add_layer_norm", {{40, 1280}, {40, 1280}, {1280}, {1280}}, -2, 2,
       [](const Inputs& x) {
         const auto [sum, y] = add_layer_norm(x[0], x[1], x[2], x[3], 1e-5);
         return concat({sum, y}, 0);
       }},
      {"add_rms_norm", {{33, 41}, {33, 41}, {41}}, -2, 2,
       [](const Inputs& x) {
         const auto [sum, y] = add_rms_norm(x[0], x[1], x[2], 1e-6);
         return concat({sum, y}, 0);
       }},
      {"layer_norm_plain", {cube}, -2, 2, [](const Inputs& x) { return layer_norm(x[0], {}, {}, 1e-5); }},
      {"rms_norm", {{150, 40}, {40}}, -2, 2, [](const Inputs& x) { return rms_norm(x[0], x[1], 1e-6); }},
      {"embedding", {{11, 40}}, -2, 2, [](const Inputs& x) { return embedding(x[0], ids_like(x[0], 300, 11)); }},
      {"embedding_padded", {{50, 7}}, -2, 2, [](const Inputs& x) { return embedding(x[0], ids_like(x[0], 60, 50), /*padding_idx=*/8); }},
      {"rope", {{2, 5, 3, 8}}, -2, 2, [](const Inputs& x) { return rope(x[0], ids_like(x[0], 5, 1000)); }},
      {"cross_entropy", {{33, 50}}, -4, 4, [](const Inputs& x) { return cross_entropy(x[0], labels_like(x[0], 33, 50)); }},
      {"cross_entropy_packs", {{33, 2048}}, -4, 4, [](const Inputs& x) { return cross_entropy(x[0], labels_like(x[0], 33, 2048)); }},
      {"cross_entropy_short_packs", {{33, 256}}, -4, 4, [](const Inputs& x) { return cross_entropy(x[0], labels_like(x[0], 33, 256)); }},
      {"cross_entropy_long", {{9, 5003}}, -4, 4,
       [](const Inputs& x) { return cross_entropy(x[0], labels_like(x[0], 9, 5003), {.reduction = LossReduction::sum}); }},
      {"concat", {{3, 5}, {3, 4}}, -2, 2, [](const Inputs& x) { return concat({x[0], x[1]}, 1); }},
      {"reshape_permuted", {cube}, -2, 2, [](const Inputs& x) { return reshape(permute(x[0], {2, 0, 1}), {-1}); }},
  };
}

enum class Layout { dense, strided, odd_offset };

// The same values in other memory: along the other dimension first, or every other element; or from an odd address.
Tensor laid_out(const Tensor& x, Layout layout) {
  if (layout == Layout::strided && x.rank() >= 2) return transpose(contiguous(transpose(x, -1, -2)), -1, -2);
  if (layout == Layout::strided) return select_index(concat({unsqueeze(x, 1), unsqueeze(neg(x), 1)}, 1), 1, 0);
  if (layout == Layout::odd_offset) return slice(concat({slice(x, -1, 0, 1), x}, -1), -1, 1, x.size(-1) + 1);
  return x;
}

struct Setting {
  DType dtype;
  Layout layout;
  bool is_uniform;  // the gradient of the output is one number, with strides 0
};

// The output and the gradients of the inputs.
std::vector<Tensor> run(const OpCase& op, const Inputs& values, DType dtype, Device device, const Setting& setting) {
  Inputs inputs;
  {
    const NoGradGuard no_grad;
    for (const Tensor& value : values) inputs.push_back(laid_out(cast(value, dtype).to(device).clone(), setting.layout));
  }
  for (Tensor& input : inputs) input.set_requires_grad(true);
  const Tensor out = op.fn(inputs);
  Generator generator{.seed = 5};
  const Tensor random = cast(uniform(out.shape(), -1, 1, generator, DType::f64), setting.dtype);
  const Tensor dout = setting.is_uniform ? expand(Tensor::full({}, 0.75, out.dtype(), device), out.shape()) : cast(random, out.dtype()).to(device);
  out.backward(dout);
  std::vector<Tensor> results = {out.detach()};
  for (const Tensor& input : inputs) results.push_back(input.grad());
  return results;
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (double value : values)
    if (std::isfinite(value)) most = std::max(most, std::abs(value));
  return most;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]))) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

// Leaves NaN in the memory that the pool will hand out next.
void poison_pool() {
  std::vector<Tensor> tensors;
  for (std::int64_t nbytes = 512; nbytes <= 1 << 20; nbytes *= 2)
    for (int i = 0; i < 4; ++i) tensors.push_back(Tensor::full({nbytes / 4}, std::nan(""), DType::f32, kCuda));
}

void check_parity(const OpCase& op, const Setting& setting) {
  Generator generator{.seed = 3};
  Inputs values;
  {
    const NoGradGuard no_grad;
    for (const Shape& shape : op.shapes)
      values.push_back(cast(cast(uniform(shape, op.low, op.high, generator, DType::f64), setting.dtype), DType::f64));
  }
  const auto truth = run(op, values, DType::f64, kCpu, setting);
  const auto cpu = run(op, values, setting.dtype, kCpu, setting);
  poison_pool();
  const auto gpu = run(op, values, setting.dtype, kCuda, setting);
  ASSERT_EQ(gpu.size(), truth.size());
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const std::vector<double> expected = truth[i].to_doubles();
    const double bound = setting.dtype == DType::f64
                             ? 0x1p-43 * std::max(largest(expected), 1.0)
                             : 3 * largest_difference(cpu[i].to_doubles(), expected) + 4 * unit_roundoff(setting.dtype) * largest(expected);
    EXPECT_EQ(gpu[i].dtype(), cpu[i].dtype());
    EXPECT_EQ(gpu[i].shape(), cpu[i].shape());
    EXPECT_TRUE(all_close(gpu[i], expected, bound)) << (i == 0 ? "output" : "gradient of input ") << i;
  }
}

using Parameter = std::tuple<std::size_t, DType>;

class CudaParity : public NeedsCuda<::testing::TestWithParam<Parameter>> {};

TEST_P(CudaParity, DenseMatchesFloat64) {
  const auto& [index, dtype] = GetParam();
  check_parity(op_cases()[index], {dtype, Layout::dense, /*is_uniform=*/false});
}

TEST_P(CudaParity, StridedMatchesFloat64) {
  const auto& [index, dtype] = GetParam();
  check_parity(op_cases()[index], {dtype, Layout::strided, /*is_uniform=*/false});
}

TEST_P(CudaParity, OddOffsetWithStrideZeroGradientMatchesFloat64) {
  const auto& [index, dtype] = GetParam();
  check_parity(op_cases()[index], {dtype, Layout::odd_offset, /*is_uniform=*/true});
}

INSTANTIATE_TEST_SUITE_P(Ops, CudaParity,
                         ::testing::Combine(::testing::Range<std::size_t>(0, op_cases().size()),
                                            ::testing::Values(DType::f64, DType::f32, DType::bf16, DType::f16)),
                         [](const auto& info) {
                           return std::string(op_cases()[std::get<0>(info.param)].name) + "_" + std::string(dtype_name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace heddle::test
