#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "autograd/ops.h"
#include "kernels/runtime/parallel.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_close;
using test::all_equal;
using test::error_of;

constexpr double kExact = 1e-15;  // a few roundings of values near 1

Tensor doubles(const std::vector<double>& values, const Shape& shape) { return Tensor::from_vector(values, shape); }
Tensor leaf(const std::vector<double>& values, const Shape& shape) { return doubles(values, shape).set_requires_grad(true); }

TEST(LayerNorm, OfOneAndThree) {
  // mean 2, variance 1, eps 3: xhat = (x - 2) / sqrt(4) = [-0.5, 0.5]; times [2, 4] plus [1, -1].
  const Tensor x = leaf({1, 3}, {1, 2}), weight = leaf({2, 4}, {2}), bias = leaf({1, -1}, {2});

  const Tensor y = layer_norm(x, weight, bias, 3.0);
  y.backward(doubles({1, 2}, {1, 2}));

  EXPECT_TRUE(all_close(y, {0, 1}, kExact));
  EXPECT_TRUE(all_close(weight.grad(), {-0.5, 1}, kExact));  // dout * xhat
  EXPECT_TRUE(all_close(bias.grad(), {1, 2}, kExact));
  // g = dout * weight = [2, 8], mean 5; mean(g * xhat) = (-1 + 4) / 2 = 1.5; rstd * (g - 5 - 1.5 xhat) = 0.5 * [-2.25, 2.25].
  EXPECT_TRUE(all_close(x.grad(), {-1.125, 1.125}, kExact));
}

TEST(RmsNorm, OfThreeAndFour) {
  // mean(x^2) = 12.5, eps 12.5: xhat = x / 5 = [0.6, 0.8]; times [10, 5].
  const Tensor x = leaf({3, 4}, {1, 2}), weight = leaf({10, 5}, {2});

  const Tensor y = rms_norm(x, weight, 12.5);
  y.backward(doubles({1, 2}, {1, 2}));

  EXPECT_TRUE(all_close(y, {6, 4}, 4 * kExact));
  EXPECT_TRUE(all_close(weight.grad(), {0.6, 1.6}, kExact));
  // g = [10, 10]; mean(g * xhat) = 7; rstd * (g - 7 xhat) = 0.2 * [5.8, 4.4].
  EXPECT_TRUE(all_close(x.grad(), {1.16, 0.88}, 4 * kExact));
}

TEST(LayerNorm, WithoutWeightAndBiasIsPlainNormalisation) {
  const Tensor x = leaf({1, 3}, {1, 2});

  const Tensor y = layer_norm(x, {}, {}, 3.0);
  y.backward(doubles({1, 2}, {1, 2}));

  EXPECT_TRUE(all_close(y, {-0.5, 0.5}, kExact));
  EXPECT_TRUE(all_close(x.grad(), {-0.1875, 0.1875}, kExact));  // mean(g * xhat) = 0.25; 0.5 * (g - 1.5 - 0.25 xhat)
}

TEST(LayerNorm, FarFromZeroKeepsItsVariance) {
  // float32 squares of 10000 are 1e8, one step of which is 8: a variance by mean of squares would be lost.
  const Tensor x = Tensor::from_vector<float>({9999, 10001, 9999, 10001}, {1, 4});

  // The mean and the deviations are exact in float32; the root, its inverse and the product round once each.
  constexpr double kTolerance = 3 * std::numeric_limits<float>::epsilon();
  EXPECT_TRUE(all_close(layer_norm(x, {}, {}, 1e-12), {-1, 1, -1, 1}, kTolerance));
}

TEST(LayerNorm, OfOneElementIsTheBiasAndHasNoGradient) {
  const Tensor x = leaf({5, -7}, {2, 1}), weight = leaf({3}, {1}), bias = leaf({2}, {1});

  const Tensor y = layer_norm(x, weight, bias, 1e-5);
  sum(y).backward();

  EXPECT_TRUE(all_equal(y, {2, 2}));
  EXPECT_TRUE(all_equal(x.grad(), {0, 0}));
  EXPECT_TRUE(all_equal(bias.grad(), {2}));
}

TEST(Norms, HalfPrecisionIsComputedInFloatAndRoundedOnce) {
  Generator generator{.seed = 5};
  const Tensor wide_x = cast(normal({7, 40}, 1.0, 3.0, generator), DType::bf16);
  const Tensor wide_weight = cast(normal({40}, 1.0, 0.2, generator), DType::bf16);
  const Tensor exact = rms_norm(cast(wide_x, DType::f64), cast(wide_weight, DType::f64), 1e-5);
  constexpr double kRounding = 0x1p-8;  // relative, of bfloat16; values stay below 8

  EXPECT_TRUE(all_close(rms_norm(wide_x, wide_weight, 1e-5), exact.to_doubles(), 4 * kRounding));
}

TEST(Norms, NoRowsGiveZeroParameterGradients) {
  const Tensor x = leaf({}, {0, 2}), weight = leaf({1, 2}, {2}), bias = leaf({3, 4}, {2});

  const Tensor y = layer_norm(x, weight, bias, 1e-5);
  y.backward(doubles({}, {0, 2}));

  EXPECT_EQ(x.grad().shape(), Shape({0, 2}));
  EXPECT_TRUE(all_equal(weight.grad(), {0, 0}));
  EXPECT_TRUE(all_equal(bias.grad(), {0, 0}));
}

TEST(Norms, ParameterGradientBitsDoNotDependOnTheThreadCount) {
  Generator generator{.seed = 6};
  const Tensor x = normal({500, 96}, 0.0, 1.0, generator);
  const Tensor dout = normal({500, 96}, 0.0, 1.0, generator);
  const int threads_before = num_threads();
  const auto gradient = [&](int threads) {
    set_num_threads(threads);
    const Tensor weight = Tensor::full({96}, 1.0).set_requires_grad(true);
    layer_norm(x, weight, {}, 1e-5).backward(dout);
    return weight.grad().to_doubles();
  };

  const std::vector<double> one = gradient(1), three = gradient(3);
  set_num_threads(threads_before);

  EXPECT_EQ(one, three);
}

TEST(Norms, WeightThatIsNotALeafGetsItsGradientThroughTheGraph) {
  const Tensor x = doubles({3, 4}, {1, 2}), half = leaf({5, 2.5}, {2});

  rms_norm(x, scale(half, 2.0), 12.5).backward(doubles({1, 2}, {1, 2}));

  EXPECT_TRUE(all_close(half.grad(), {1.2, 3.2}, 4 * kExact));  // twice that of RmsNorm.OfThreeAndFour
}

TEST(Norms, HalfWeightMayAccumulateItsGradientInFloat) {
  const Tensor x = cast(doubles({1, 3}, {1, 2}), DType::bf16);
  Tensor weight = Tensor::full({2}, 1.0, DType::bf16);
  weight.set_requires_grad(true);
  weight.set_grad_dtype(DType::f32);

  for (int i = 0; i < 300; ++i) layer_norm(x, weight, {}, 3.0).backward(Tensor::full({1, 2}, 1.0, DType::bf16));

  EXPECT_EQ(weight.grad().dtype(), DType::f32);
  EXPECT_TRUE(all_equal(weight.grad(), {-150, 150}));  // 300 * 0.5; bfloat16 would stop at 128
}

// Every layer with parameters adds to their gradients: after a second pass over the same data they are exactly doubled.
TEST(ParameterGradients, AddUpOverMicroBatchesForEveryLayerType) {
  Generator generator{.seed = 9};
  const auto random = [&](const Shape& shape) { return normal(shape, 0.0, 1.0, generator, DType::f64); };
  const Tensor x = random({3, 4});
  const Tensor ids = Tensor::from_vector<std::int64_t>({2, 0, 2}, {3});
  struct Layer {
    const char* name;
    std::vector<Shape> parameters;
    std::function<Tensor(const std::vector<Tensor>&)> forward;
  };
  const std::vector<Layer> layers = {
      {"linear", {{5, 4}, {5}}, [&](const auto& p) { return linear(x, p[0], p[1]); }},
      {"layer_norm", {{4}, {4}}, [&](const auto& p) { return layer_norm(x, p[0], p[1], 1e-5); }},
      {"rms_norm", {{4}}, [&](const auto& p) { return rms_norm(x, p[0], 1e-5); }},
      {"embedding", {{6, 4}}, [&](const auto& p) { return embedding(p[0], ids); }},
      {"tied embedding and head", {{6, 4}}, [&](const auto& p) { return linear(embedding(p[0], ids), p[0]); }},
  };
  // Sums of up to about 20 products of normal numbers, added to a gradient rather than to 0: a few roundings of about 20.
  constexpr double kTolerance = 500 * std::numeric_limits<double>::epsilon();
  for (const Layer& layer : layers) {
    std::vector<Tensor> parameters;
    for (const Shape& shape : layer.parameters) parameters.push_back(random(shape).set_requires_grad(true));
    const Tensor dout = random(layer.forward(parameters).shape());

    layer.forward(parameters).backward(dout);
    std::vector<std::vector<double>> doubled;
    for (const Tensor& parameter : parameters) doubled.push_back(scale(parameter.grad(), 2.0).to_doubles());
    layer.forward(parameters).backward(dout);

    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(all_close(parameters[i].grad(), doubled[i], kTolerance)) << layer.name << " parameter " << i;
  }
}

TEST(Norms, RefuseBadArgumentsByName) {
  const Tensor x = doubles({1, 2, 3, 4}, {2, 2});
  EXPECT_EQ(error_of([&] { layer_norm(x, {}, {}, 0.0); }), "layer_norm: eps must be > 0, got 0");
  EXPECT_EQ(error_of([&] { rms_norm(x, doubles({1, 2, 3}, {3}), 1e-5); }),
            "rms_norm: weight must be float64 [2] on cpu, got float64 [3] on cpu");
  EXPECT_EQ(error_of([&] { layer_norm(x, {}, Tensor::zeros({2}), 1e-5); }),
            "layer_norm: bias must be float64 [2] on cpu, got float32 [2] on cpu");
  EXPECT_EQ(error_of([&] { rms_norm(Tensor::zeros({2, 0}), {}, 1e-5); }),
            "rms_norm: needs a floating-point tensor whose last dimension is at least 1, got float32 [2, 0] on cpu");
}

}  // namespace
}  // namespace heddle
