#include "quant/quant_file.h"

#include <map>
#include <nlohmann/json.hpp>

#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/posix_file.h"
#include "nn/safetensors.h"
#include "quant/quant_linear.h"
#include "quant/quantize_model.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace heddle {
namespace {

using nlohmann::json;
using quant::QuantConfig;
using quant::QuantizedWeight;
using quant::QuantLinear;
using test::error_of;
using test::TempFolder;

const char* const kQ = "model.layers.0.self_attn.q_proj";

nn::CausalLM plain_model(std::uint64_t seed = 1) { return test::tiny_model(test::tiny_config(nn::Architecture::llama), seed); }

QuantConfig config_of(QuantFormat format, ScaleGrain grain = ScaleGrain::channel) {
  QuantConfig config;
  config.format = format;
  config.fp8_scale = grain;
  return config;
}

const std::vector<QuantConfig>& written_configs() {
  static const std::vector<QuantConfig> configs = {
      config_of(QuantFormat::nvfp4), config_of(QuantFormat::mxfp4), config_of(QuantFormat::fp8_e4m3, ScaleGrain::tensor),
      config_of(QuantFormat::fp8_e4m3, ScaleGrain::channel), config_of(QuantFormat::fp8_e4m3, ScaleGrain::block)};
  return configs;
}

std::vector<double> logits_of(const nn::CausalLM& model) {
  return model.forward(Tensor::from_vector(std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}, {2, 3})).to_doubles();
}

const QuantizedWeight& weight_of(const nn::CausalLM& model, const std::string& name) {
  for (const auto& [found, module] : model.modules())
    if (found == name) return dynamic_cast<const QuantLinear&>(*module).weight();
  throw Error("no layer " + name);
}

void write_quantized(const std::filesystem::path& folder, const QuantConfig& config) {
  nn::CausalLM model = plain_model();
  quantize_model(model, config);
  quant::save_quantized(folder, model);
}

// From headers alone: what loading finds.
TEST(QuantFile, StoredLayersAreThoseThatAreLoaded) {
  for (const QuantConfig& config : written_configs()) {
    const TempFolder folder;
    write_quantized(folder.path(), config);
    const std::vector<quant::StoredLayer> stored = quant::stored_layers(folder.path());
    nn::CausalLM loaded = plain_model();
    quant::load_quantized(folder.path(), loaded);
    std::map<std::string, const QuantizedWeight*> expected;  // in the order of the file's names
    for (const auto& [name, module] : loaded.modules())
      if (const auto* layer = dynamic_cast<const QuantLinear*>(module.get()); layer != nullptr) expected[name] = &layer->weight();

    ASSERT_EQ(stored.size(), expected.size());
    std::size_t i = 0;
    for (const auto& [name, weight] : expected) {
      const quant::StoredLayer& layer = stored[i++];
      EXPECT_TRUE(layer.spec.format == weight->spec().format && (!layer.spec.is_fp8() || layer.spec.grain == weight->spec().grain)) << name;
      EXPECT_EQ(std::pair(layer.out_features, layer.in_features), std::pair(weight->out_features(), weight->in_features())) << name;
    }
  }
}

TEST(QuantFile, ALoadedModelIsTheSavedOneAndSavesTheSameBytes) {
  for (const QuantConfig& config : written_configs()) {
    const TempFolder first, second;
    nn::CausalLM saved = plain_model(), loaded = plain_model(/*seed=*/2);
    quantize_model(saved, config);
    quant::save_quantized(first.path(), saved);
    const std::vector<std::string> ignored = quant::load_quantized(first.path(), loaded);
    quant::save_quantized(second.path(), loaded);

    EXPECT_TRUE(quant::has_quantized(first.path()));
    EXPECT_TRUE(ignored.empty());
    EXPECT_EQ(logits_of(loaded), logits_of(saved)) << name_of(config.format);
    for (const char* name : {"model.safetensors", "config.json"}) EXPECT_TRUE(nn::read_file(first / name) == nn::read_file(second / name)) << name;
  }
}

// q_proj is [12, 12]: 6 bytes of codes a row, one block of 16 and of 32 columns.
TEST(QuantFile, HasTheTensorsOfItsLayout) {
  struct Expected {
    std::string name, dtype;
    Shape shape;
  };
  const std::vector<std::vector<Expected>> layouts = {
      {{"weight_packed", "U8", {12, 6}}, {"weight_scale", "F8_E4M3", {12, 1}}, {"weight_global_scale", "F32", {1}}},
      {{"weight_packed", "U8", {12, 6}}, {"weight_scale", "U8", {12, 1}}},
      {{"weight", "F8_E4M3", {12, 12}}, {"weight_scale", "F32", {1}}},
      {{"weight", "F8_E4M3", {12, 12}}, {"weight_scale", "F32", {12, 1}}},
      {{"weight", "F8_E4M3", {12, 12}}, {"weight_scale", "F32", {1, 1}}}};
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const TempFolder folder;
    write_quantized(folder.path(), written_configs()[i]);
    const nn::SafetensorsFile file(folder / "model.safetensors");

    for (const Expected& expected : layouts[i]) {
      const nn::SafetensorsInfo& info = file.info(std::string(kQ) + "." + expected.name);
      EXPECT_EQ(info.dtype, expected.dtype) << i << expected.name;
      EXPECT_EQ(info.shape, expected.shape) << i << expected.name;
    }
    EXPECT_EQ(file.contains(std::string(kQ) + ".weight"), i >= 2);
    EXPECT_EQ(file.info("lm_head.weight").dtype, "F32");
    EXPECT_EQ(file.info("model.norm.weight").dtype, "F32");
  }
}

json quantization_of(const TempFolder& folder) { return json::parse(nn::read_file(folder / "config.json")).at("quantization_config"); }

TEST(QuantFile, NamesItsLayoutInTheConfig) {
  const TempFolder folder;
  write_quantized(folder.path(), config_of(QuantFormat::nvfp4));
  const json expected = json::parse(R"({
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": null,
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "input_activations": null, "output_activations": null,
      "weights": {"num_bits": 4, "type": "float", "symmetric": true, "strategy": "tensor_group", "group_size": 16, "dynamic": false,
                  "scale_dtype": "torch.float8_e4m3fn"}}}})");

  EXPECT_EQ(quantization_of(folder), expected);
  const json config = json::parse(nn::read_file(folder / "config.json"));
  EXPECT_EQ(config.at("architectures"), json::array({"LlamaForCausalLM"}));
  EXPECT_EQ(config.at("hidden_size"), 12);
  EXPECT_EQ(config.at("num_key_value_heads"), 1);
}

TEST(QuantFile, Fp8ConfigsSayHowActivationsAreScaled) {
  const auto group_of = [](ScaleGrain grain) {
    const TempFolder folder;
    write_quantized(folder.path(), config_of(QuantFormat::fp8_e4m3, grain));
    const json quantization = quantization_of(folder);
    EXPECT_EQ(quantization.at("format"), "float-quantized");
    return quantization.at("config_groups").at("group_0");
  };

  EXPECT_EQ(group_of(ScaleGrain::channel).at("weights").at("strategy"), "channel");
  EXPECT_EQ(group_of(ScaleGrain::channel).at("input_activations").at("strategy"), "token");
  EXPECT_EQ(group_of(ScaleGrain::block).at("weights").at("block_structure"), json({128, 128}));
  EXPECT_EQ(group_of(ScaleGrain::tensor).at("input_activations").at("dynamic"), true);
}

// A file as another program lays it out: the tensors of a saved one, changed by `change`, under its own quantization_config.
class Rewritten {
 public:
  using Tensors = std::map<std::string, std::pair<std::string, Tensor>>;  // dtype in the file, and the values or bytes

  explicit Rewritten(const QuantConfig& config) {
    const TempFolder folder;
    write_quantized(folder.path(), config);
    const nn::SafetensorsFile file(folder / "model.safetensors");
    for (const std::string& name : file.names()) {
      const std::string dtype = file.info(name).dtype;
      tensors[name] = {dtype, dtype == "F8_E4M3" ? file.read_bytes(name) : file.read(name)};
    }
  }

  // Calls change(value) for every tensor whose name ends so, and gives it a new end.
  template <typename Change>
  void rename(const std::string& end, const std::string& new_end, const Change& change) {
    Tensors changed;
    for (const auto& [name, value] : tensors) {
      const bool is_it = name.ends_with("_proj." + end);
      changed[is_it ? name.substr(0, name.size() - end.size()) + new_end : name] = is_it ? std::pair{value.first, change(value.second)} : value;
    }
    tensors = changed;
  }

  void write(const TempFolder& folder, const json& quantization, const char* file = "config.json", const char* key = "quantization_config") const {
    std::vector<std::pair<std::string, Tensor>> out;
    std::map<std::string, std::string> byte_dtypes;
    for (const auto& [name, value] : tensors) {
      out.emplace_back(name, value.second);
      if (value.first == "F8_E4M3") byte_dtypes[name] = value.first;
    }
    nn::write_safetensors(folder / "model.safetensors", out, {}, byte_dtypes);
    nn::write_file(folder / file, json{{key, quantization}}.dump());
  }

  Tensors tensors;
};

const auto kSame = [](const Tensor& value) { return value; };

void expect_loads_as(const TempFolder& folder, const QuantConfig& config) {
  nn::CausalLM expected = plain_model(), loaded = plain_model(/*seed=*/2);
  quantize_model(expected, config);
  quant::load_quantized(folder.path(), loaded);
  EXPECT_TRUE(test::all_close(weight_of(loaded, kQ).dequantize(DType::f32), weight_of(expected, kQ).dequantize(DType::f32).to_doubles(), 1e-7));
  EXPECT_TRUE(test::all_close(Tensor::from_vector(logits_of(loaded), {66}), logits_of(expected), 1e-6));
}

// The tensor scale is the inverse, up to one rounding.
TEST(QuantFile, ReadsNvfp4OfModelOpt) {
  Rewritten file(config_of(QuantFormat::nvfp4));
  file.rename("weight_packed", "weight", kSame);
  file.rename("weight_global_scale", "weight_scale_2", [](const Tensor& g) { return Tensor::scalar(1 / g.item()); });
  const TempFolder folder, older;
  file.write(folder, {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}});
  file.write(older, {{"quant_algo", "NVFP4"}, {"group_size", 16}, {"exclude_modules", {"lm_head"}}}, "hf_quant_config.json", "quantization");

  expect_loads_as(folder, config_of(QuantFormat::nvfp4));
  expect_loads_as(older, config_of(QuantFormat::nvfp4));
}

TEST(QuantFile, ReadsFp8OfOtherPrograms) {
  const auto check = [](ScaleGrain grain, const char* scale_name, const json& quantization, const auto& reshaped) {
    Rewritten file(config_of(QuantFormat::fp8_e4m3, grain));
    file.rename("weight_scale", scale_name, reshaped);
    const TempFolder folder;
    file.write(folder, quantization);
    expect_loads_as(folder, config_of(QuantFormat::fp8_e4m3, grain));
  };
  const json modelopt = {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}};
  json per_channel = modelopt, block = modelopt;
  per_channel["quant_algo"] = "FP8_PER_CHANNEL_PER_TOKEN";
  block["quant_algo"] = "FP8_PB_WO";

  check(ScaleGrain::tensor, "weight_scale", modelopt, [](const Tensor& s) { return reshape(s, {}); });
  check(ScaleGrain::channel, "weight_scale", per_channel, [](const Tensor& s) { return reshape(s, {s.size(0)}); });
  check(ScaleGrain::block, "weight_scale", block, [](const Tensor& s) { return reshape(s, {s.size(0), 1, s.size(1), 1}); });
  check(ScaleGrain::block, "weight_scale_inv", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}, kSame);
}

// ModelOpt's MIXED_PRECISION, in several files: checkpoints/mixed of tests/data.
class MixedFile : public ::testing::Test {
 protected:
  MixedFile() {
    for (const auto& entry : std::filesystem::directory_iterator(kStored)) std::filesystem::copy(entry.path(), folder_ / entry.path().filename());
    quantization_ = json::parse(nn::read_file(folder_ / "hf_quant_config.json")).at("quantization");
  }

  // As newer versions write it.
  void write_config() {
    quantization_["quant_method"] = "modelopt";
    nn::write_file(folder_ / "config.json", json{{"quantization_config", quantization_}}.dump());
  }

  void expect_loads() const {
    nn::CausalLM model = plain_model();
    const nn::SafetensorsFile expected(folder_ / "expected.safetensors");
    const std::vector<std::string> ignored = quant::load_quantized(folder_.path(), model);

    EXPECT_EQ(ignored.size(), 8u + 3u);  // input_scale of every quantised layer
    std::size_t compared = model.parameters().size();
    for (const nn::NamedTensor& parameter : model.parameters()) EXPECT_EQ(parameter.tensor.to_doubles(), expected.read(parameter.name).to_doubles());
    for (const auto& [name, module] : model.modules())
      if (const auto layer = std::dynamic_pointer_cast<QuantLinear>(module); layer != nullptr) {
        EXPECT_EQ(layer->weight().dequantize(DType::f32).to_doubles(), expected.read(name + ".weight").to_doubles()) << name;
        EXPECT_EQ(layer->weight().spec().format, name.find("mlp") == std::string::npos ? QuantFormat::fp8_e4m3 : QuantFormat::nvfp4) << name;
        ++compared;
      }
    EXPECT_EQ(compared, expected.names().size());
  }

  // What loading says with a changed config, after the path.
  std::string error() {
    write_config();
    nn::CausalLM model = plain_model();
    return error_of([&] { quant::load_quantized(folder_.path(), model); }).substr(nn::printable_path(folder_.path()).size());
  }

  static constexpr const char* kStored = HEDDLE_SOURCE_DIR "/tests/data/checkpoints/mixed";
  TempFolder folder_;
  json quantization_;
};

TEST_F(MixedFile, HasEveryLayerInItsOwnFormat) {
  expect_loads();
  write_config();
  expect_loads();
  quantization_.erase("quantized_layers");  // which are then those of hf_quant_config.json
  write_config();
  expect_loads();
}

TEST_F(MixedFile, RefusesFormsThatItDoesNotKnowAndListsThatAreNone) {
  json& layers = quantization_["quantized_layers"];
  layers[kQ]["quant_algo"] = "W4A16_AWQ";
  EXPECT_EQ(error(), concat_text(": quantized_layers has ", kQ, " in \"W4A16_AWQ\"; heddle reads NVFP4 and FP8"));
  std::filesystem::remove(folder_ / "hf_quant_config.json");
  quantization_.erase("quantized_layers");
  EXPECT_EQ(error(), ": quant_algo is MIXED_PRECISION, and there are no quantized_layers to say of what");
}

TEST_F(MixedFile, RefusesLayersThatAreNotAsListed) {
  json& layers = quantization_["quantized_layers"];
  layers["model.layers.1.mlp.up_proj"]["quant_algo"] = "FP8";
  layers["model.layers.2.mlp.up_proj"]["quant_algo"] = "FP8";
  layers.erase(kQ);
  const std::string q = kQ;

  EXPECT_EQ(error(), " does not fit this model; nothing was loaded:\n  model.layers.1.mlp.up_proj.weight is BF16, in FP8 it is F8_E4M3"
                     "\n  quantized_layers has model.layers.2.mlp.up_proj, which is no linear layer of the model\n  safetensors: " +
                         nn::printable_path(folder_ / "model-00001-of-00003.safetensors") + ": tensor '" + q +
                         ".weight' has dtype F8_E4M3; heddle reads F64, F32, BF16, F16, I64, I32, U8 and BOOL\n  unexpected " + q + ".weight_scale");
}

TEST(QuantFile, LeavesScalesOfActivationsOut) {
  Rewritten file(config_of(QuantFormat::nvfp4));
  file.tensors[std::string(kQ) + ".input_global_scale"] = {"F32", Tensor::full({1}, 3.0)};
  const TempFolder folder, saved;
  write_quantized(saved.path(), config_of(QuantFormat::nvfp4));
  file.write(folder, quantization_of(saved));
  nn::CausalLM model = plain_model();

  EXPECT_EQ(quant::load_quantized(folder.path(), model), std::vector<std::string>{std::string(kQ) + ".input_global_scale"});
}

TEST(QuantFile, NamesEverythingThatDoesNotFitAndChangesNothing) {
  Rewritten file(config_of(QuantFormat::nvfp4));
  const std::string q = kQ, k = "model.layers.0.self_attn.k_proj", v = "model.layers.0.self_attn.v_proj";
  file.tensors.erase(q + ".weight_scale");
  file.tensors[k + ".weight_scale"].first = "U8";
  file.tensors[v + ".weight_scale"].second.copy_(Tensor::full({4, 1}, 127, DType::u8));
  file.tensors["extra"] = {"F32", Tensor::zeros({2})};
  file.tensors.erase("model.norm.weight");
  const TempFolder folder, saved;
  write_quantized(saved.path(), config_of(QuantFormat::nvfp4));
  file.write(folder, quantization_of(saved));
  nn::CausalLM model = plain_model(), before = plain_model();

  EXPECT_EQ(error_of([&] { quant::load_quantized(folder.path(), model); }),
            nn::printable_path(folder.path()) + " does not fit this model; nothing was loaded:\n  missing " + q + ".weight_scale\n  " + k +
                ".weight_scale is U8, in nvfp4-pack-quantized it is F8_E4M3\n  quantized weight '" + v +
                "': scales hold nan, and must be finite and not negative; the file is damaged or of another format\n  missing model.norm.weight\n  unexpected extra");
  EXPECT_EQ(logits_of(model), logits_of(before));
}

TEST(QuantFile, RefusesLayoutsItDoesNotKnow) {
  const auto error_for = [](const json& quantization) {
    const TempFolder folder;
    Rewritten(config_of(QuantFormat::nvfp4)).write(folder, quantization);
    nn::CausalLM model = plain_model();
    const std::string text = error_of([&] { quant::load_quantized(folder.path(), model); });
    return text.substr(0, text.find(';')).substr(nn::printable_path(folder.path()).size());
  };

  EXPECT_EQ(error_for({{"quant_method", "awq"}, {"format", "gemm"}}), ": quantised by method \"awq\", format \"gemm\"");
  EXPECT_EQ(error_for({{"quant_method", "compressed-tensors"}, {"format", "pack-quantized"}}),
            ": quantised by method \"compressed-tensors\", format \"pack-quantized\"");
  EXPECT_EQ(error_for({{"quant_method", "compressed-tensors"}, {"format", "naive-quantized"}, {"config_groups", {{"g", {{"weights", {{"num_bits", 8}, {"type", "int"}}}}}}}}),
            ": quantised by method \"compressed-tensors\", format \"naive-quantized\"");
}

TEST(QuantFile, RefusesToWriteWhatNobodyReads) {
  const TempFolder folder;
  nn::CausalLM plain = plain_model(), fp4 = plain_model();
  quantize_model(fp4, config_of(QuantFormat::fp4));

  EXPECT_EQ(error_of([&] { quant::save_quantized(folder.path(), plain); }), "save_quantized: no layer of the model is quantised");
  EXPECT_EQ(error_of([&] { quant::save_quantized(folder.path(), fp4); }),
            "quantize: there is no published file layout for fp4; write fp8_e4m3, mxfp4 or nvfp4");
}

// Deep enough to exhaust the stack of a recursive copy.
TEST(QuantFile, RefusesConfigsOfManyLevels) {
  const TempFolder folder;
  nn::write_file(folder / "config.json", "{\"quantization_config\": " + std::string(200'000, '[') + std::string(200'000, ']') + "}");

  EXPECT_THROW(quant::has_quantized(folder.path()), Error);
}

// Programs differ in which of them they take.
TEST(QuantFile, RefusesConfigsWithAKeyTwice) {
  const TempFolder folder;
  for (const auto& [key, text] : {std::pair{"quantization_config", R"({"quantization_config": {"quant_method": "awq"}, "quantization_config": {}})"},
                                  std::pair{"format", R"({"quantization_config": {"format": "awq", "format": "nvfp4-pack-quantized"}})"}}) {
    nn::write_file(folder / "config.json", text);
    EXPECT_EQ(error_of([&] { quant::has_quantized(folder.path()); }),
              concat_text(nn::printable_path(folder / "config.json"), ": the key \"", key, "\" is there twice; mend or remove it"));
  }
}

// Every layout's bytes under the title of every other one.
TEST(QuantFile, RefusesBytesOfAnotherLayoutThanItsConfigNames) {
  for (const QuantConfig& stored : written_configs())
    for (const QuantConfig& titled : written_configs()) {
      const TempFolder folder, other;
      write_quantized(folder.path(), stored);
      write_quantized(other.path(), titled);
      nn::write_file(folder / "config.json", nn::read_file(other / "config.json"));
      nn::CausalLM model = plain_model();
      const std::string error = error_of([&] { quant::load_quantized(folder.path(), model); });

      EXPECT_EQ(error == "no error", stored.format == titled.format) << name_of(stored.format) << " as " << name_of(titled.format) << ": " << error;
    }
}

TEST(QuantFile, APlainCheckpointIsNotQuantised) {
  const TempFolder folder;
  nn::write_file(folder / "config.json", R"({"hidden_size": 12})");

  EXPECT_FALSE(quant::has_quantized(folder.path()));
}

}  // namespace
}  // namespace heddle
