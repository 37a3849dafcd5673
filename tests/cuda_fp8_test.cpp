// Linear layers trained in FP8 against float64 products of what their codes read as, and the codes against the CPU's.

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "quant/fp8_linear.h"
#include "quant/fp8_training.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"
#include "tests/support/quantized.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace heddle::test {
namespace {

using quant::Fp8Projections;
using CudaFp8 = NeedsCuda<>;
using Bytes = std::vector<std::uint8_t>;
using Values = std::vector<double>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

Tensor one_float(double value) { return Tensor::full({1}, value, DType::f32, kCuda); }

// What fp8_quantize writes, into memory that held other bytes.
struct Codes {
  Tensor codes, turned, scale;

  Codes(const Tensor& x, QuantFormat format, const Tensor& expected, const Tensor& fallback = {}, const Tensor& seen = {})
      : codes(Tensor::full({x.size(0), x.size(1)}, 0xFF, DType::u8, kCuda)),
        turned(Tensor::full({x.size(1), fp8_padded(x.size(0))}, 0xFF, DType::u8, kCuda)), scale(one_float(-1)) {
    fp8_quantize({.x = x.view(),
                  .format = format,
                  .expected = expected.view(),
                  .fallback = fallback.defined() ? fallback.view() : ConstView{},
                  .codes = codes.mutable_view(),
                  .turned = turned.mutable_view(),
                  .scale = scale.mutable_view(),
                  .seen = seen.defined() ? seen.mutable_view() : MutView{}},
                 device_context(kCuda));
  }
};

Tensor half(const Shape& shape, std::uint64_t seed, double factor = 1) { return cast(scale(random_tensor(shape, DType::f32, seed), factor), DType::bf16); }

Tensor largest_of(const Tensor& x) {
  const Tensor out = one_float(0);
  amax({.x = x.view(), .out = out.mutable_view()}, device_context(kCuda));
  return out;
}

Bytes transposed(const Bytes& codes, std::int64_t rows, std::int64_t columns) {
  const std::int64_t width = fp8_padded(rows);
  Bytes out(static_cast<std::size_t>(columns * width), 0);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) out[static_cast<std::size_t>(c * width + r)] = codes[static_cast<std::size_t>(r * columns + c)];
  return out;
}

TEST_F(CudaFp8, CodesAreTheCpusAndThoseOfTheTranspose) {
  for (const QuantFormat format : {QuantFormat::fp8_e4m3, QuantFormat::fp8_e5m2})
    for (const Shape& shape : {Shape{1, 16}, Shape{3, 48}, Shape{128, 128}, Shape{130, 272}, Shape{257, 144}, Shape{16, 400}}) {
      const Tensor x = half(shape, 3), on_gpu = x.to(kCuda);
      const Quantized cpu = quantized(x, {.format = format});
      const Codes found(on_gpu, format, largest_of(on_gpu));

      EXPECT_EQ(found.scale.item(), cpu.scales.item());
      EXPECT_TRUE(found.codes.to_vector<std::uint8_t>() == cpu.code_bytes()) << name_of(format) << ' ' << shape;
      EXPECT_TRUE(found.turned.to_vector<std::uint8_t>() == transposed(cpu.code_bytes(), shape[0], shape[1])) << name_of(format) << ' ' << shape;
    }
}

TEST_F(CudaFp8, RowsMayLieApart) {
  const Tensor part = slice(half({70, 96}, 4).to(kCuda), 1, 16, 64);
  const Codes found(part, QuantFormat::fp8_e4m3, largest_of(part)), dense(part.clone(), QuantFormat::fp8_e4m3, largest_of(part));

  EXPECT_EQ(found.codes.to_vector<std::uint8_t>(), dense.codes.to_vector<std::uint8_t>());
  EXPECT_EQ(found.turned.to_vector<std::uint8_t>(), dense.turned.to_vector<std::uint8_t>());
}

TEST_F(CudaFp8, WhatLiesBeyondTheExpectedSaturatesAndWhatIsNotFiniteIsNan) {
  Values values(16, 0.0);
  const std::array<double, 6> special = {2.0, 1000.0, -1000.0, kNan, kInfinity, -kInfinity};
  std::ranges::copy(special, values.begin());
  const Tensor x = cast(Tensor::from_vector(values, {1, 16}), DType::bf16).to(kCuda);
  const Bytes e4m3 = Codes(x, QuantFormat::fp8_e4m3, one_float(2)).codes.to_vector<std::uint8_t>();
  const Bytes e5m2 = Codes(x, QuantFormat::fp8_e5m2, one_float(2)).codes.to_vector<std::uint8_t>();

  EXPECT_EQ(Bytes(e4m3.begin(), e4m3.begin() + 3), (Bytes{0x7E, 0x7E, 0xFE}));  // 448 and -448
  EXPECT_EQ(Bytes(e5m2.begin(), e5m2.begin() + 3), (Bytes{0x7B, 0x7B, 0xFB}));  // 57344 and -57344
  for (int i = 3; i < 6; ++i) {
    EXPECT_EQ(e4m3[static_cast<std::size_t>(i)] & 0x7F, 0x7F) << i;
    EXPECT_GT(e5m2[static_cast<std::size_t>(i)] & 0x7F, 0x7C) << i;
  }
}

TEST_F(CudaFp8, AnExpectationOfNanOrInfinityIsNotHidden) {
  for (const double bad : {kNan, kInfinity}) {
    Values values(32, 1.0);
    values[5] = bad;
    const Tensor x = cast(Tensor::from_vector(values, {2, 16}), DType::bf16).to(kCuda);
    const Bytes codes = Codes(x, QuantFormat::fp8_e4m3, largest_of(x)).codes.to_vector<std::uint8_t>();
    EXPECT_EQ(codes[5] & 0x7F, 0x7F) << bad;
  }
}

TEST_F(CudaFp8, ZerosHaveAScaleAndCodesOfZero) {
  const Tensor x = Tensor::zeros({5, 32}, DType::bf16, kCuda);
  const Codes found(x, QuantFormat::fp8_e5m2, largest_of(x));

  EXPECT_EQ(found.scale.item(), 1);
  EXPECT_EQ(found.codes.to_vector<std::uint8_t>(), Bytes(5 * 32, 0));
  EXPECT_EQ(found.turned.to_vector<std::uint8_t>(), Bytes(32 * 16, 0));
}

TEST_F(CudaFp8, SeenIsTheLargestSoFarAndTheFallbackStandsInForZero) {
  const Tensor x = half({200, 48}, 5).to(kCuda), seen = one_float(0), zero = one_float(0), two = one_float(2), three = one_float(3);
  const double largest = largest_of(x).item();

  EXPECT_EQ(Codes(x, QuantFormat::fp8_e4m3, two, three, seen).scale.item(), 2 / 448.0f);
  EXPECT_EQ(seen.item(), largest);
  EXPECT_EQ(Codes(scale(x, 0.5), QuantFormat::fp8_e4m3, zero, three, seen).scale.item(), 3 / 448.0f);
  EXPECT_EQ(seen.item(), largest);
  Codes(scale(x, 2), QuantFormat::fp8_e4m3, zero, {}, seen);
  EXPECT_EQ(seen.item(), 2 * largest);
}

// The expectations of a history of `size` steps in which `seen` is seen.
Values expectations(std::int64_t size, const Values& seen) {
  const Tensor history = Tensor::zeros({2, 1 + size}, DType::f32, kCuda);  // the first row is another matrix's
  slice(history, 1, 0, 1).fill_(kNewHistory);
  Values out;
  for (const double value : seen) {
    advance_amax_history({.history = history.mutable_view()}, device_context(kCuda));
    out.push_back(history.to_doubles()[static_cast<std::size_t>(1 + size)]);
    slice(slice(history, 0, 1, 2), 1, 1, 2).fill_(value);
  }
  return out;
}

TEST_F(CudaFp8, AHistoryExpectsTheLargestOfItsSteps) {
  EXPECT_EQ(expectations(3, {5, 2, 1, 0, kInfinity, kNan, 0.5, 0}), (Values{0, 5, 5, 5, 2, 1, 1, 0.5}));
  EXPECT_EQ(expectations(1, {5, 2, 0, 7, 1}), (Values{0, 5, 2, 2, 7}));
  EXPECT_EQ(expectations(2, {0, 0, 3, 1}), (Values{0, 1, 1, 3}));
  Values seen(80, 1.0), expected(80, 1.0);  // more than a warp, and not a multiple of it
  seen[1] = 9;
  expected[0] = 0;
  std::fill(expected.begin() + 2, expected.begin() + 2 + 45, 9.0);
  EXPECT_EQ(expectations(45, seen), expected);
}

// What a matrix reads as after rounding to FP8 with its own scale, or one for `largest`.
Values rounded(const Tensor& x, QuantFormat format, double largest = 0) {
  Quantized q = quantized(x, {.format = format});
  if (largest > 0) {
    const Tensor given = Tensor::full({1}, largest);
    quantize({.x = x.view(), .spec = q.spec, .amax = given.view(), .codes = q.codes.mutable_view(), .scales = q.scales.mutable_view()},
             device_context(kCpu));
  }
  return q.values().to_doubles();
}

// A product in float64 and the sums of the magnitudes of its terms.
struct Product {
  Values values, magnitudes;

  // [M, K] by [N, K]
  Product(const Values& a, const Values& b, std::int64_t K, const Values& bias = {}) {
    const auto terms = static_cast<std::size_t>(K);
    for (std::size_t i = 0; i < a.size() / terms; ++i)
      for (std::size_t j = 0; j < b.size() / terms; ++j) {
        double sum = bias.empty() ? 0.0 : bias[j], magnitude = std::abs(sum);
        for (std::size_t k = 0; k < terms; ++k) {
          sum += a[i * terms + k] * b[j * terms + k];
          magnitude += std::abs(a[i * terms + k] * b[j * terms + k]);
        }
        values.push_back(sum);
        magnitudes.push_back(magnitude);
      }
  }

  void expect(const Tensor& found, double bound, const std::string& what) const {
    const Values y = found.to_doubles();
    ASSERT_EQ(y.size(), values.size()) << what;
    for (std::size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], values[i], bound * magnitudes[i]) << what << ", element " << i;
  }
};

Values turned(const Values& matrix, std::int64_t columns) {
  const auto width = static_cast<std::size_t>(columns), rows = matrix.size() / width;
  Values out;
  for (std::size_t c = 0; c < width; ++c)
    for (std::size_t r = 0; r < rows; ++r) out.push_back(matrix[r * width + c]);
  return out;
}

// The tensor cores' sums keep at least 13 bits of the largest term, one rounding for each 32 terms at most; the result is rounded once.
double bound_of(std::int64_t terms, DType dtype) { return unit_roundoff(dtype) + std::ceil(static_cast<double>(terms) / 32) * 0x1p-13; }

// Three layers of one input, their weights one after another in memory or apart, and what a pass through them gives.
struct Layers {
  static constexpr std::int64_t kIn = 64, kAll = 80;
  static constexpr std::array<std::int64_t, 3> kSizes = {48, 16, 16};
  Tensor weight, bias;  // of all of them, on the CPU
  std::vector<Tensor> weights, biases;
  std::shared_ptr<Fp8Projections> projections;

  Layers(bool are_joined, bool have_biases, std::int64_t history = 0, double size = 1)
      : weight(half({kAll, kIn}, 7, size)), bias(half({kAll}, 8)) {
    const Tensor all = weight.to(kCuda), all_biases = bias.to(kCuda);
    std::int64_t start = 0;
    for (const std::int64_t out : kSizes) {
      const Tensor part = slice(all, 0, start, start + out), part_bias = slice(all_biases, 0, start, start + out);
      weights.push_back(are_joined ? part : part.clone());
      biases.push_back(!have_biases ? Tensor() : are_joined ? part_bias : part_bias.clone());
      for (Tensor* leaf : {&weights.back(), &biases.back()})
        if (leaf->defined()) {
          *leaf = leaf->detach();
          leaf->set_requires_grad(true);
          leaf->set_grad_dtype(DType::f32);
        }
      start += out;
    }
    projections = std::make_shared<Fp8Projections>(weights, biases, history);
  }

  // Whether layers share a matrix: then they share scales.
  std::vector<std::pair<std::int64_t, std::int64_t>> matrices() const {
    if (projections->weights().size() == 3 && weights[1].storage() == weights[0].storage()) return {{0, kAll}};
    return {{0, 48}, {48, 64}, {64, 80}};
  }

  Tensor weight_gradients() const {  // float32 [kAll, kIn]
    std::vector<Tensor> out;
    for (const Tensor& layer : weights) {
      EXPECT_EQ(layer.grad().dtype(), DType::f32);
      out.push_back(layer.grad().to(kCpu));
    }
    return concat(out, 0);
  }

  Values rounded_rows(const Tensor& matrix, QuantFormat format) const {  // [kAll, ...], each layers' matrix by itself
    Values out;
    for (const auto& [first, last] : matrices()) {
      const Values part = rounded(slice(matrix, 0, first, last).clone(), format);
      out.insert(out.end(), part.begin(), part.end());
    }
    return out;
  }
};

// Results side by side, [M, kAll].
Tensor side_by_side(const std::vector<Tensor>& parts) {
  std::vector<Tensor> host;
  for (const Tensor& part : parts) host.push_back(part.detach().to(kCpu));
  return concat(host, 1);
}

struct Pass {
  Tensor x;  // on the GPU, with its gradient
  std::vector<Tensor> ys;
};

// A pass whose results have the gradients dy [M, kAll], which are columns of one matrix where the layers have biases, and else apart.
Pass run_pass(const Layers& layers, const Tensor& x, const Tensor& dy) {
  Pass pass{x.to(kCuda).set_requires_grad(true), {}};
  pass.ys = layers.projections->forward(pass.x);
  if (layers.biases[0].defined()) {
    concat(pass.ys, 1).backward(dy.to(kCuda));
    return pass;
  }
  Tensor loss = Tensor::zeros({}, DType::bf16, kCuda);
  std::int64_t start = 0;
  for (const Tensor& y : pass.ys) {
    loss = add(loss, sum(mul(y, slice(dy.to(kCuda), 1, start, start + y.size(1)))));
    start += y.size(1);
  }
  loss.backward();
  return pass;
}

TEST_F(CudaFp8, ProductsAndGradientsAreThoseOfTheRoundedOperands) {
  for (const bool are_joined : {true, false})
    for (const bool have_biases : {true, false})
      for (const std::int64_t M : {1, 50, 96}) {
        const std::string what = concat_text(are_joined ? "joined" : "apart", have_biases ? " with biases, M " : ", M ", M);
        const Layers layers(are_joined, have_biases);
        const Tensor x = half({M, Layers::kIn}, 5, 3), dy = half({M, Layers::kAll}, 6, 1e-3);
        const Pass pass = run_pass(layers, x, dy);

        const Values xs = rounded(x, QuantFormat::fp8_e4m3), ws = layers.rounded_rows(layers.weight, QuantFormat::fp8_e4m3);
        const Values dys = turned(layers.rounded_rows(transpose(dy, 0, 1).clone(), QuantFormat::fp8_e5m2), M);  // [M, kAll]
        Product(xs, ws, Layers::kIn, have_biases ? layers.bias.to_doubles() : Values{})
            .expect(side_by_side(pass.ys), bound_of(Layers::kIn, DType::bf16), what + ", y");
        // Of matrices apart, each of the three is added to what is there, rounded to bfloat16.
        Product(dys, turned(ws, Layers::kIn), Layers::kAll).expect(pass.x.grad(), bound_of(Layers::kAll, DType::bf16) * (are_joined ? 1 : 3), what + ", dx");
        const Product dw(turned(dys, Layers::kAll), turned(xs, Layers::kIn), M);
        dw.expect(layers.weight_gradients(), bound_of(M, DType::f32), what + ", dw");
        if (have_biases) {
          const Values ones(static_cast<std::size_t>(M), 1.0);
          Product(ones, turned(dy.to_doubles(), Layers::kAll), M)
              .expect(concat({layers.biases[0].grad().to(kCpu), layers.biases[1].grad().to(kCpu), layers.biases[2].grad().to(kCpu)}, 0),
                      static_cast<double>(M) * 0x1p-23, what + ", dbias");
        }
      }
}

// The largest is 2^31 times the others, which become subnormal in E5M2.
TEST_F(CudaFp8, TinyGradientsKeepTheirSize) {
  const Layers layers(/*are_joined=*/true, /*have_biases=*/false);
  Tensor dy = half({48, Layers::kAll}, 6, 0x1p-84);
  slice(slice(dy, 0, 3, 4), 1, 5, 6).fill_(0x1p-53);
  const Tensor x = half({48, Layers::kIn}, 5);
  const Pass pass = run_pass(layers, x, dy);

  const Values dys = rounded(dy, QuantFormat::fp8_e5m2), ws = rounded(layers.weight, QuantFormat::fp8_e4m3);
  Product(dys, turned(ws, Layers::kIn), Layers::kAll).expect(pass.x.grad(), bound_of(Layers::kAll, DType::bf16), "dx");
  EXPECT_GT(std::ranges::count_if(dys, [](double value) { return value != 0; }), 48 * 40);
}

TEST_F(CudaFp8, PassesOfAWindowAddUp) {
  const Layers layers(/*are_joined=*/true, /*have_biases=*/false);
  const Tensor x = half({32, Layers::kIn}, 5), dy = half({32, Layers::kAll}, 6);
  run_pass(layers, x, dy);
  run_pass(layers, x, dy);

  const Values xs = rounded(x, QuantFormat::fp8_e4m3), dys = rounded(dy, QuantFormat::fp8_e5m2);
  Product(turned(dys, Layers::kAll), turned(xs, Layers::kIn), 32).expect(scale(layers.weight_gradients(), 0.5), bound_of(32, DType::f32), "dw of two");
}

TEST_F(CudaFp8, ChangedWeightsAreQuantisedAnew) {
  const Layers layers(/*are_joined=*/true, /*have_biases=*/false);
  const Tensor x = half({16, Layers::kIn}, 5).to(kCuda);
  const Tensor before = side_by_side(layers.projections->forward(x));
  {
    const NoGradGuard no_grad;
    layers.weights[0].mul_(2);
    layers.weights[1].mul_(2);
    layers.weights[2].mul_(2);
  }
  EXPECT_TRUE(all_equal(side_by_side(layers.projections->forward(x)), scale(before, 2).to_doubles()));
}

// Codes written again would not be those that the first pass saved.
TEST_F(CudaFp8, WeightsAreQuantisedOncePerVersion) {
  const Layers layers(/*are_joined=*/true, /*have_biases=*/false);
  const Tensor x = half({16, Layers::kIn}, 5).to(kCuda).set_requires_grad(true);
  const Tensor y = layers.projections->forward(x)[0];
  layers.projections->forward(x);

  EXPECT_NO_THROW(y.backward(Tensor::full(y.shape(), 1.0, DType::bf16, kCuda)));
}

TEST_F(CudaFp8, ABackwardThroughWeightsThatHaveChangedIsAnError) {
  const Layers layers(/*are_joined=*/true, /*have_biases=*/false);
  const Tensor x = half({16, Layers::kIn}, 5).to(kCuda).set_requires_grad(true);
  const Tensor y = layers.projections->forward(x)[0];
  {
    const NoGradGuard no_grad;
    layers.weights[0].mul_(2);
  }
  layers.projections->forward(x);

  EXPECT_NE(error_of([&] { y.backward(Tensor::full(y.shape(), 1.0, DType::bf16, kCuda)); }).find("fp8_projections backward: saved input 'weight"),
            std::string::npos);
}

TEST_F(CudaFp8, ResultsNobodyUsedHaveNoGradient) {
  for (const bool are_joined : {true, false}) {
    const Layers layers(are_joined, /*have_biases=*/true);
    const Tensor x = half({32, Layers::kIn}, 5), dy = half({32, Layers::kAll}, 6), given = x.to(kCuda).set_requires_grad(true);
    const Tensor y = layers.projections->forward(given)[0];
    const Tensor dy0 = slice(dy, 1, 0, 48).clone();
    y.backward(dy0.to(kCuda));

    const Values dys = rounded(dy0, QuantFormat::fp8_e5m2);
    const Values ws = layers.rounded_rows(layers.weight, QuantFormat::fp8_e4m3);
    Product(dys, turned(Values(ws.begin(), ws.begin() + 48 * Layers::kIn), Layers::kIn), 48).expect(given.grad(), bound_of(Layers::kAll, DType::bf16), "dx");
    EXPECT_FALSE(layers.weights[1].grad().defined());
  }
}

// Counts a new version of the weights, as an update does.
void next_step(const Layers& layers) {
  for (const Tensor& weight : layers.weights) weight.mutable_view();
}

TEST_F(CudaFp8, DelayedScalingUsesWhatEarlierStepsHaveSeen) {
  const Layers layers(/*are_joined=*/true, /*have_biases=*/false, /*history=*/2);
  const Tensor x = half({32, Layers::kIn}, 5), dy = half({32, Layers::kAll}, 6);
  const double largest = largest_of(x.to(kCuda)).item(), largest_dy = largest_of(dy.to(kCuda)).item();
  const Values ws = rounded(layers.weight, QuantFormat::fp8_e4m3);
  // Times 8: beyond the first step's range in the second step, and within the range of the third, which has seen it.
  const Tensor wider = cast(scale(x, 8), DType::bf16), wider_dy = cast(scale(dy, 8), DType::bf16);
  struct Step {
    Tensor x, dy;
    double expected, expected_dy;
  };
  for (const auto& [now, now_dy, expected, expected_dy] :
       {Step{x, dy, largest, largest_dy}, Step{wider, wider_dy, largest, largest_dy}, Step{x, dy, 8 * largest, 8 * largest_dy},
        Step{x, dy, 8 * largest, 8 * largest_dy}, Step{x, dy, largest, largest_dy}}) {
    const Pass pass = run_pass(layers, now, now_dy);
    const std::string what = concat_text("expecting ", expected);
    const Values xs = rounded(now, QuantFormat::fp8_e4m3, expected), dys = rounded(now_dy, QuantFormat::fp8_e5m2, expected_dy);
    Product(xs, ws, Layers::kIn).expect(side_by_side(pass.ys), bound_of(Layers::kIn, DType::bf16), what);
    Product(dys, turned(ws, Layers::kIn), Layers::kAll).expect(pass.x.grad(), bound_of(Layers::kAll, DType::bf16), what);
    next_step(layers);
  }
}

TEST_F(CudaFp8, PassesWithoutGradientsScaleByThemselvesAndLeaveTheHistory) {
  const Layers layers(/*are_joined=*/false, /*have_biases=*/false, /*history=*/4), current(false, false);
  const Tensor x = half({32, Layers::kIn}, 5), dy = half({32, Layers::kAll}, 6);
  run_pass(layers, x, dy);
  const Values history = layers.projections->history().to_doubles();
  const NoGradGuard no_grad;
  const Tensor wider = scale(x, 100).to(kCuda);
  next_step(layers);

  EXPECT_EQ(side_by_side(layers.projections->forward(wider)).to_doubles(), side_by_side(current.projections->forward(wider)).to_doubles());
  EXPECT_EQ(layers.projections->history().to_doubles(), history);
}

TEST_F(CudaFp8, WhatCannotBeTrainedIsNamed) {
  nn::TransformerConfig model = tiny_config();
  model.hidden_size = 48;
  model.intermediate_size = 64;
  model.num_hidden_layers = 3;
  EXPECT_EQ(quant::fp8_obstacle(model, kCuda), "");
  model.num_hidden_layers = 2;
  EXPECT_EQ(quant::fp8_obstacle(model, kCuda), "the first and the last block stay in bfloat16, and model.num_hidden_layers is 2");
  model.num_hidden_layers = 3;
  model.intermediate_size = 60;
  EXPECT_EQ(quant::fp8_obstacle(model, kCuda), "FP8 products need multiples of 16, and model.intermediate_size is 60");
  EXPECT_EQ(error_of([] {
              const Tensor weight = Tensor::zeros({32, 24}, DType::bf16, kCuda);
              Fp8Projections({weight}, {Tensor()}, 0);
            }),
            "fp8: weights must be dense bfloat16 matrices of sizes that are multiples of 16, got bfloat16 [32, 24] on cuda:0");
}

}  // namespace
}  // namespace heddle::test
