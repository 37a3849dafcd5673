#include "quant/quant_linear.h"

#include <cstdio>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "autograd/grad_mode.h"
#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "nn/transformer.h"
#include "quant/quantize_model.h"
#include "tests/support/compare.h"
#include "tests/support/quantized.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace heddle {
namespace {

using quant::QuantConfig;
using quant::QuantizedWeight;
using quant::QuantLinear;
using quant::QuantReport;
using test::all_specs;
using test::error_of;

constexpr QuantSpec kNvfp4{.format = QuantFormat::nvfp4};
constexpr QuantSpec kMxfp4{.format = QuantFormat::mxfp4};
constexpr QuantSpec kFp8Channel{.format = QuantFormat::fp8_e4m3, .grain = ScaleGrain::channel};

QuantizedWeight packed(const Shape& shape, const QuantSpec& spec, std::uint64_t seed = 2) {
  return QuantizedWeight::quantize("w", test::random_tensor(shape, DType::f32, seed), spec);
}

// The weight is 600 wide, so that a part of it in float64 has 128 rows: 300 rows and 600 columns take several parts.
TEST(QuantLinear, IsTheLinearLayerOfItsDecodedWeight) {
  for (const auto& [name, spec] : all_specs()) {
    const QuantizedWeight weight = packed({300, 600}, spec);
    const Tensor dense = weight.dequantize(DType::f64);
    const Tensor x = test::random_leaf({2, 3, 600}), bias = test::random_leaf({300}, 5), dout = test::random_tensor({2, 3, 300}, DType::f64, 7);
    const Tensor y = quant::quant_linear(x, weight, bias);
    y.backward(dout);
    const Tensor x2 = x.clone().set_requires_grad(true), bias2 = bias.clone().set_requires_grad(true);
    const Tensor expected = linear(x2, dense, bias2);
    expected.backward(dout);

    // The same sums in another order: 600 terms of size up to 30 at 2^-53.
    EXPECT_TRUE(test::all_close(y, expected.to_doubles(), 1e-11)) << name;
    EXPECT_TRUE(test::all_close(x.grad(), x2.grad().to_doubles(), 1e-11)) << name;
    EXPECT_TRUE(test::all_close(bias.grad(), bias2.grad().to_doubles(), 1e-11)) << name;
  }
}

TEST(QuantLinear, GradientsMatchDifferences) {
  for (const auto& [name, spec] : all_specs()) {
    const QuantizedWeight weight = packed({5, 33}, spec);
    const auto fn = [&](const std::vector<Tensor>& in) { return quant::quant_linear(in[0], weight, in[1]); };
    const GradcheckResult result = gradcheck(fn, {test::random_leaf({3, 33}), test::random_leaf({5}, 4)});
    EXPECT_TRUE(result.ok) << name << ": " << result.message;
  }
}

TEST(QuantLinear, AddsToTheGradientThatItsInputHasAlready) {
  const QuantizedWeight weight = packed({4, 20}, kNvfp4);
  const Tensor x = test::random_leaf({3, 20});
  sum(add(quant::quant_linear(x, weight), scale(quant::quant_linear(x, weight), 2.0))).backward();

  const Tensor column_sums = sum(weight.dequantize(DType::f64), {0}, true);
  EXPECT_TRUE(test::all_close(x.grad(), scale(mul(column_sums, Tensor::full({3, 20}, 1.0, DType::f64)), 3.0).to_doubles(), 1e-12));
}

TEST(QuantLinear, TakesEmptyInputs) {
  const QuantizedWeight weight = packed({4, 20}, kNvfp4);

  EXPECT_EQ(quant::quant_linear(Tensor::zeros({0, 20}), weight).shape(), (Shape{0, 4}));
}

TEST(QuantLinear, HasNoParameterButItsBias) {
  const QuantLinear layer(packed({4, 20}, kNvfp4), Tensor::zeros({4}), DType::f32);

  ASSERT_EQ(layer.parameters().size(), 1u);
  EXPECT_EQ(layer.parameters()[0].name, "bias");
  EXPECT_FALSE(layer.parameters()[0].tensor.requires_grad());
  EXPECT_EQ(layer.dense_weight().dtype(), DType::f32);
}

TEST(QuantLinear, OnTheCpuDecodesUnlessFp8IsAskedFor) {
  for (const auto& [name, spec] : all_specs()) EXPECT_EQ(QuantLinear(packed({16, 32}, spec), Tensor(), DType::bf16).compute(), QuantCompute::wide) << name;

  EXPECT_EQ(error_of([] { QuantLinear(packed({16, 32}, kNvfp4), Tensor(), DType::bf16, QuantCompute::fp8); }),
            "quantize.compute: expected bf16 or null, as bfloat16 is not multiplied in FP8 with nvfp4 [16, 32] on cpu, got fp8");
}

TEST(QuantLinear, ProductsInFp8AreNotReplacedByOthers) {
  EXPECT_EQ(error_of([] { quant::quant_linear(Tensor::zeros({3, 32}), packed({16, 32}, kNvfp4), {}, QuantCompute::fp8); }),
            "quant_gemm: products of float32 with nvfp4 [16, 32] on cpu do not run in FP8; compute them wide");
}

TEST(QuantGemms, HaveOneX) {
  const Tensor x = Tensor::zeros({3, 20}, DType::bf16), out = Tensor::empty({3, 4}, DType::bf16);
  const QuantizedWeight weight = packed({4, 20}, kNvfp4);
  const QuantGemmArgs product = {.x = x.view(), .w = weight.view(), .out = out.mutable_view()};
  QuantGemmArgs other = product;
  other.x.dtype = other.out.dtype = DType::f16;

  EXPECT_EQ(error_of([&] { quant_gemms({}, device_context(kCpu)); }), "no error");
  EXPECT_EQ(error_of([&] { quant_gemms({product, product}, device_context(kCpu)); }), "no error");
  EXPECT_EQ(error_of([&] { quant_gemms({product, other}, device_context(kCpu)); }), "quant_gemms: products must have one x");
}

TEST(QuantLinear, LayersOfOneInputGiveWhatEachGives) {
  const QuantLinear a(packed({4, 20}, kNvfp4), test::random_tensor({4}, DType::f64), DType::f64), b(packed({7, 20}, kFp8Channel, 3), Tensor(), DType::f64);
  const Tensor x = test::random_leaf({3, 20}), alone = test::random_leaf({3, 20});
  const std::vector<Tensor> together = a.forward_together({&a, &b}, x, nullptr);
  concat(together, 1).backward(test::random_tensor({3, 11}, DType::f64, 7));
  concat({a.forward(alone), b.forward(alone)}, 1).backward(test::random_tensor({3, 11}, DType::f64, 7));

  ASSERT_EQ(together.size(), 2u);
  EXPECT_EQ(together[0].to_doubles(), a.forward(alone).to_doubles());
  EXPECT_EQ(together[1].to_doubles(), b.forward(alone).to_doubles());
  EXPECT_EQ(x.grad().to_doubles(), alone.grad().to_doubles());
}

TEST(QuantizedWeight, RefusesAGradient) {
  EXPECT_EQ(error_of([] { packed({4, 20}, kNvfp4).set_requires_grad(true); }),
            "quantized weight [4, 20]: quantised weights are frozen; add a LoRA adapter to train the layer");
}

TEST(QuantizedWeight, NamesTheValueThatItCannotHold) {
  for (const auto& [value, printed] : {std::pair{std::numeric_limits<float>::quiet_NaN(), "nan"}, std::pair{-std::numeric_limits<float>::infinity(), "-inf"},
                                       std::pair{1e38f, "1e+38"}}) {
    std::vector<float> values(2 * 20, 1.0f);
    values[27] = value;
    EXPECT_EQ(error_of([&] { QuantizedWeight::quantize("mlp.weight", Tensor::from_vector(values, {2, 20}), kNvfp4); }),
              concat_text("quantize: 'mlp.weight' holds ", printed, " at [1, 7]; weights must be finite and at most 2^126"));
  }
}

// What a [1, 16] weight with these scales gives, "no error" if it can be read.
std::string error_with(const QuantSpec& spec, const Tensor& scales, std::optional<float> global = {}) {
  const QuantizedWeight good = packed({1, 16}, spec);
  const Tensor of_tensor = global ? Tensor::from_vector(std::vector<float>{*global}, {1}) : good.parts().global;
  return error_of([&] { QuantizedWeight("w", spec, 1, 16, {good.parts().codes, scales, of_tensor}); });
}

Tensor one_byte(std::uint8_t byte) { return Tensor::from_vector(std::vector<std::uint8_t>{byte}, {1, 1}); }
Tensor one_float(float value) { return Tensor::from_vector(std::vector<float>{value}, {1, 1}); }

TEST(QuantizedWeight, RefusesStoredScalesThatAreNoNumbers) {
  const auto refused = [](const char* value) {
    return concat_text("quantized weight 'w': scales hold ", value, ", and must be finite and not negative; the file is damaged or of another format");
  };
  const auto global_refused = [](const char* value) {
    return concat_text("quantized weight 'w': the global scale is ", value, ", and must be finite and above 0; the file is damaged or of another format");
  };
  const float inf = std::numeric_limits<float>::infinity();

  EXPECT_EQ(error_with(kNvfp4, one_byte(0x7F)), refused("nan"));
  EXPECT_EQ(error_with(kNvfp4, one_byte(0x81)), refused("-0.00195312"));
  EXPECT_EQ(error_with(kMxfp4, one_byte(255)), refused("nan"));
  EXPECT_EQ(error_with(kFp8Channel, one_float(-2)), refused("-2"));
  EXPECT_EQ(error_with(kFp8Channel, one_float(inf)), refused("inf"));
  EXPECT_EQ(error_with(kNvfp4, one_byte(1), 0.0f), global_refused("0"));
  EXPECT_EQ(error_with(kNvfp4, one_byte(1), inf), global_refused("inf"));
}

TEST(QuantizedWeight, ReadsScalesOfZeroAsZero) {
  for (const QuantSpec& spec : {kNvfp4, kFp8Channel}) {
    const QuantizedWeight good = packed({1, 16}, spec);
    const Tensor zero = spec.is_fp8() ? one_float(0) : one_byte(0);
    const QuantizedWeight weight("w", spec, 1, 16, {good.parts().codes, zero, good.parts().global});

    EXPECT_TRUE(test::all_close(weight.dequantize(DType::f32), std::vector<double>(16, 0.0), 0));
  }
  EXPECT_EQ(error_with(kMxfp4, one_byte(0)), "no error");  // which is 2^-127
}

// 6 * 2^125 is beyond 2^127 and 6 * 2^124 is not; 448 / g * 6 for g = 2^-116 is 1.3 * 2^127; 448 * 4e35 is 1.05 * 2^127.
TEST(QuantizedWeight, RefusesScalesUnderWhichWeightsMightBeInfinite) {
  const char* const text = "quantized weight 'w': under its largest scale, ";

  EXPECT_EQ(error_with(kMxfp4, one_byte(127 + 124)), "no error");
  EXPECT_TRUE(error_with(kMxfp4, one_byte(127 + 125)).starts_with(text));
  EXPECT_EQ(error_with(kNvfp4, one_byte(126), 0x1p-115f), "no error");
  EXPECT_TRUE(error_with(kNvfp4, one_byte(126), 0x1p-116f).starts_with(text));
  EXPECT_EQ(error_with(kFp8Channel, one_float(3.7e35f)), "no error");
  EXPECT_TRUE(error_with(kFp8Channel, one_float(4e35f)).starts_with(text));
}

// Every form of a weight of the largest size there may be can be read again.
TEST(QuantizedWeight, ReadsTheLargestWeightsItQuantises) {
  std::vector<float> values(48, 0x1p126f);
  for (std::size_t i = 0; i < values.size(); i += 2) values[i] *= -0.7f;
  for (const auto& [name, spec] : all_specs()) {
    const QuantizedWeight weight = QuantizedWeight::quantize("w", Tensor::from_vector(values, {1, 48}), spec);
    EXPECT_EQ(error_of([&] { QuantizedWeight("w", spec, 1, 48, weight.parts()); }), "no error") << name;
  }
}

TEST(QuantizedWeight, RefusesPartsOfAnotherShape) {
  const QuantizedWeight good = packed({2, 32}, kNvfp4);

  EXPECT_EQ(error_of([&] { QuantizedWeight("w", kNvfp4, 2, 34, good.parts()); }),
            "quantized weight 'w': codes must be uint8 [2, 17], got uint8 [2, 16] on cpu");
}

TEST(QuantError, IsThatOfTheWorkedExample) {
  // 0.4 and 1 under a scale of 1/6: 2.4 is nearest to 2, so 1/3 is read; the error is 0.0667.
  const Tensor weight = Tensor::from_vector(std::vector<float>{0.4f, 1.0f}, {1, 2});
  const quant::QuantError error = quant::quant_error(weight, QuantizedWeight::quantize("w", weight, {.format = QuantFormat::fp4}));

  EXPECT_NEAR(error.worst, 0.066667, 1e-6);
  EXPECT_NEAR(error.mse(), 0.0022222, 1e-7);
  EXPECT_NEAR(error.sqnr_db(), 24.1664, 1e-3);  // 10 log10(1.16 / 0.0044444)
  EXPECT_NEAR(error.peak(), 1.31306, 1e-5);     // 1 / sqrt(0.58)
}

// Of 0.45 beside 1 rounding to nearest reads one of the two values next to it, always the same, at least 0.3 of their distance off. A draw
// is either of the two, so its standard deviation is at most half their distance; the mean of n draws stays within 5 of its own.
TEST(QuantizedWeight, RoundedStochasticallyHasNoBias) {
  constexpr std::int64_t kRows = 64, kColumns = 256, kDraws = kRows * kColumns * 15 / 16;
  std::vector<float> values(kRows * kColumns, 0.45f);
  for (std::size_t i = 0; i < values.size(); i += 16) values[i] = 1;
  const Tensor weight = Tensor::from_vector(values, {kRows, kColumns});
  using enum QuantFormat;
  for (const QuantSpec& spec : {QuantSpec{.format = fp8_e4m3, .grain = ScaleGrain::channel}, QuantSpec{.format = fp8_e5m2, .grain = ScaleGrain::block},
                                QuantSpec{.format = fp4}, QuantSpec{.format = mxfp4, .mx_rounding = MxRounding::ceil}, kNvfp4}) {
    double sum = 0, low = 1, high = 0;
    const std::vector<double> read = QuantizedWeight::quantize("w", weight, spec, {}, /*seed=*/3).dequantize(DType::f64).to_doubles();
    for (std::size_t i = 0; i < read.size(); ++i) {
      if (i % 16 == 0) continue;
      sum += read[i];
      low = std::min(low, read[i]);
      high = std::max(high, read[i]);
    }

    ASSERT_LT(low, 0.45) << name_of(spec.format);
    ASSERT_GT(high, 0.45) << name_of(spec.format);
    EXPECT_NEAR(sum / kDraws, 0.45, 5 * (high - low) / 2 / std::sqrt(kDraws)) << name_of(spec.format);
  }
}

QuantConfig nvfp4_config() {
  QuantConfig config;
  config.format = QuantFormat::nvfp4;
  return config;
}

const QuantLinear& quant_layer(const nn::CausalLM& model, const std::string& name) {
  for (const auto& [found, module] : model.modules())
    if (found == name) return dynamic_cast<const QuantLinear&>(*module);
  throw Error("no layer " + name);
}

TEST(QuantizeModel, ReplacesEveryLinearLayerButTheHead) {
  const nn::CausalLM model = test::tiny_model(test::tiny_config(nn::Architecture::llama));
  const QuantReport report = quantize_model(const_cast<nn::CausalLM&>(model), nvfp4_config());

  EXPECT_EQ(report.layers.size(), 2u * 7u);
  EXPECT_EQ(report.kept, std::vector<std::string>{"lm_head"});
  EXPECT_EQ(report.layers[0].name, "model.layers.0.self_attn.q_proj");
  EXPECT_EQ(report.layers[0].dense_bytes, 12 * 12 * 4);
  EXPECT_EQ(report.layers[0].bytes, 12 * 6 + 12 + 4);  // codes, one ragged block a row, the global scale
  std::vector<std::string> names;
  for (const nn::NamedTensor& parameter : model.parameters()) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
                                             "model.layers.0.post_attention_layernorm.weight", "model.layers.1.input_layernorm.weight",
                                             "model.layers.1.post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight"}));
}

TEST(QuantizeModel, FusedProjectionsShareTheirTensorScale) {
  nn::CausalLM model = test::tiny_model(test::tiny_config(nn::Architecture::llama));
  quantize_model(model, nvfp4_config());
  const auto global = [&](const std::string& name) { return quant_layer(model, "model.layers.1." + name).weight().parts().global.item(); };

  EXPECT_EQ(global("self_attn.q_proj"), global("self_attn.k_proj"));
  EXPECT_EQ(global("self_attn.q_proj"), global("self_attn.v_proj"));
  EXPECT_EQ(global("mlp.gate_proj"), global("mlp.up_proj"));
  EXPECT_NE(global("self_attn.q_proj"), global("self_attn.o_proj"));
  EXPECT_NE(global("mlp.gate_proj"), global("mlp.down_proj"));
}

TEST(QuantizeModel, TheModelIsThatOfTheDecodedWeights) {
  for (const nn::Architecture architecture : {nn::Architecture::gpt2, nn::Architecture::llama}) {
    nn::CausalLM model = test::tiny_model(test::tiny_config(architecture)), dense = test::tiny_model(test::tiny_config(architecture));
    quantize_model(model, nvfp4_config());
    {
      const NoGradGuard no_grad;
      for (const auto& [name, module] : model.modules()) {
        const auto layer = std::dynamic_pointer_cast<QuantLinear>(module);
        if (layer == nullptr) continue;
        for (const nn::NamedTensor& parameter : dense.parameters())
          if (parameter.name == name + ".weight") parameter.tensor.copy_(layer->dense_weight());
      }
    }
    const Tensor ids = Tensor::from_vector(std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}, {2, 3});
    const Tensor logits = model.forward(ids), expected = dense.forward(ids);
    sum(logits).backward();
    sum(expected).backward();

    EXPECT_TRUE(test::all_close(logits, expected.to_doubles(), 1e-6));
    const Tensor gradient = model.parameters()[0].tensor.grad();
    EXPECT_TRUE(test::all_close(gradient, dense.parameters()[0].tensor.grad().to_doubles(), 1e-5));
  }
}

TEST(QuantizeModel, SaysWhatItsLayersAreComputedIn) {
  nn::CausalLM model = test::tiny_model(test::tiny_config(nn::Architecture::llama));
  quantize_model(model, nvfp4_config());

  EXPECT_EQ(quant::describe_products(model), (std::vector<std::string>{"nvfp4 weights of 14 layers: stored so; products on cpu decode them to float32"}));
}

TEST(QuantizeModel, PatternsAreNamesTheirEndsOrWildcards) {
  EXPECT_TRUE(quant::is_excluded("model.layers.0.self_attn.o_proj", {"o_proj"}));
  EXPECT_TRUE(quant::is_excluded("model.layers.0.self_attn.o_proj", {"layers.0.*"}));
  EXPECT_TRUE(quant::is_excluded("model.layers.0.self_attn.o_proj", {"model.layers.0.self_attn.o_proj"}));
  EXPECT_FALSE(quant::is_excluded("model.layers.10.self_attn.o_proj", {"layers.0.*", "proj", "self_attn"}));
}

TEST(QuantizeModel, RefusesWhatItCannotDoAndChangesNothing) {
  nn::CausalLM model = test::tiny_model(test::tiny_config());
  QuantConfig config = nvfp4_config();
  const std::size_t parameters = model.parameters().size();

  // Of these out_proj is not there, self_attn holds linear layers but is none, and a norm is not linear.
  for (const char* pattern : {"out_proj", "self_attn", "norm"}) {
    config.exclude = {"lm_head", pattern};
    const std::string expected = concat_text("quantize.exclude: expected a pattern that names linear layers, as \"o_proj\" and \"layers.0.*\" do, got \"", pattern, "\"");
    EXPECT_EQ(error_of([&] { quantize_model(model, config); }), expected);
    EXPECT_EQ(error_of([&] { quant::scoreboard(model, config.exclude); }), expected);
  }
  config.exclude = {"*_proj"};
  EXPECT_EQ(error_of([&] { quantize_model(model, config); }), "quantize: all 12 linear layers are excluded; exclude fewer");
  EXPECT_EQ(model.parameters().size(), parameters);
  quantize_model(model, nvfp4_config());
  EXPECT_EQ(error_of([&] { quantize_model(model, nvfp4_config()); }),
            "quantize: 'model.layers.0.self_attn.q_proj' is already quantised or has an adapter; quantise the plain model");
}

TEST(QuantizeModel, RoundsStochasticallyAsItsSeedSays) {
  const auto codes = [](std::int64_t seed, const std::vector<std::string>& exclude = {"lm_head"}) {
    nn::CausalLM model = test::tiny_model(test::tiny_config(nn::Architecture::llama));
    {
      const NoGradGuard no_grad;
      Tensor gate;
      for (const auto& [name, tensor] : model.parameters())
        if (name.ends_with("layers.0.mlp.gate_proj.weight")) gate = tensor;
        else if (name.ends_with("layers.0.mlp.up_proj.weight")) tensor.copy_(gate);
    }
    QuantConfig config = nvfp4_config();
    config.rounding = quant::ElementRounding::stochastic;
    config.seed = seed;
    config.exclude = exclude;
    const QuantReport report = quantize_model(model, config);
    EXPECT_EQ(nlohmann::json::parse(to_json(report)).at("rounding"), "stochastic");
    EXPECT_EQ(nlohmann::json::parse(to_json(report)).at("seed"), seed);
    std::map<std::string, std::vector<std::uint8_t>> out;
    for (const char* name : {"down", "gate", "up"})
      out[name] = quant_layer(model, concat_text("model.layers.0.mlp.", name, "_proj")).weight().parts().codes.to_vector<std::uint8_t>();
    return out;
  };
  auto first = codes(3), other = codes(4);

  EXPECT_EQ(codes(3, {"lm_head", "q_proj"}), first);
  EXPECT_NE(other["down"], first["down"]);
  EXPECT_NE(first["up"], first["gate"]);  // of equal weights
}

TEST(QuantizeModel, RefusesSeedsAndSearchesThatWouldDoNothing) {
  nn::CausalLM model = test::tiny_model(test::tiny_config());
  const auto error_with = [&](const auto& change) {
    QuantConfig config = nvfp4_config();
    change(config);
    return error_of([&] { quantize_model(model, config); });
  };

  EXPECT_EQ(error_with([](QuantConfig& c) { c.seed = 3; }), "quantize.seed: expected null beside rounding (nearest), got 3");
  EXPECT_EQ(error_with([](QuantConfig& c) { c.rounding = quant::ElementRounding::stochastic; }), "quantize: stochastic rounding needs a seed");
  EXPECT_EQ(error_with([](QuantConfig& c) {
              c.rounding = quant::ElementRounding::stochastic;
              c.seed = 3;
              c.nvfp4_scale_search = ScaleSearch::mse;
            }),
            "quantize.nvfp4_scale_search: expected none beside rounding (stochastic), got mse");
}

TEST(QuantReport, ShowsEveryLayer) {
  nn::CausalLM model = test::tiny_model(test::tiny_config(nn::Architecture::llama));
  const QuantReport report = quantize_model(model, nvfp4_config());
  const std::string table = to_table(report), json = to_json(report);

  for (const quant::LayerReport& layer : report.layers) {
    EXPECT_NE(table.find(layer.name), std::string::npos);
    EXPECT_NE(json.find('"' + layer.name + '"'), std::string::npos);
  }
  EXPECT_NE(table.find("kept as it is: lm_head"), std::string::npos);
  EXPECT_EQ(table.find("note:"), std::string::npos);
}

TEST(QuantReport, NotesALayerThatLostMoreThanAQuarterOfItsWeights) {
  const auto table_of = [](std::int64_t zeroed) {
    QuantReport report;
    report.layers.push_back({.name = "up_proj", .error = {.count = 8, .zeroed = zeroed}});
    return to_table(report);
  };
  const char* const note = "note: 3 of the 8 weights of up_proj became 0: they are too small beside the largest that their scale serves\n";

  EXPECT_NE(table_of(3).find(note), std::string::npos) << table_of(3);
  EXPECT_EQ(table_of(2).find("note:"), std::string::npos);
}

// Normally distributed weights, of which every format leaves more than the note asks for.
TEST(QuantReport, NotesNothingOfOrdinaryWeights) {
  for (const auto& [name, spec] : all_specs()) {
    const Tensor weight = test::random_tensor({64, 256}, DType::f32, 2);
    QuantReport report;
    report.layers.push_back({.name = name, .spec = spec, .error = quant_error(weight, QuantizedWeight::quantize(name, weight, spec))});

    EXPECT_EQ(notes(report), std::vector<std::string>()) << name;
  }
}

// 2 blocks of 12 x 12 weights of o_proj: 4 bits, and a float32 each.
TEST(Scoreboard, OfOneKindOfLayerHasItsBits) {
  const nn::CausalLM model = test::tiny_model(test::tiny_config(nn::Architecture::llama));
  const std::string all = quant::scoreboard(model, {"lm_head"}), some = quant::scoreboard(model, {"lm_head"}, "o_proj");

  EXPECT_NE(some.find("\nfp4                             4.222222"), std::string::npos) << some;
  EXPECT_EQ(all.find("\nfp4                             4.222222"), std::string::npos) << all;
  EXPECT_EQ(error_of([&] { quant::scoreboard(model, {"lm_head"}, "norm"); }),
            "--only: expected a pattern that names linear layers, as \"o_proj\" and \"layers.0.*\" do, got \"norm\"");
  EXPECT_EQ(error_of([&] { quant::scoreboard(model, {"lm_head", "q_proj"}, "q_proj"); }),
            "--only: expected a pattern that names linear layers which are not excluded, got \"q_proj\"");
}

// In nvfp4 projections share a tensor scale: under that of q_proj and k_proj, a v_proj a million times smaller becomes 0.
TEST(Scoreboard, HasTheErrorOfTheQuantisedModel) {
  nn::CausalLM model = test::tiny_model(test::tiny_config(nn::Architecture::llama));
  {
    const NoGradGuard no_grad;
    for (const auto& [name, tensor] : model.parameters())
      if (name.ends_with("v_proj.weight")) tensor.mul_(1e-6);
  }
  const std::string table = quant::scoreboard(model, {"lm_head"});
  quant::QuantError error;
  for (const quant::LayerReport& layer : quantize_model(model, nvfp4_config()).layers) error.add(layer.error);

  char share[16];
  std::snprintf(share, sizeof share, "%.2f %%\n", 100.0 * static_cast<double>(error.zeroed) / static_cast<double>(error.count));
  const std::size_t line = table.find("nvfp4, nearest");
  EXPECT_EQ(table.find(share, line), table.find('\n', line) + 1 - std::string(share).size()) << table << share;
}

}  // namespace
}  // namespace heddle
