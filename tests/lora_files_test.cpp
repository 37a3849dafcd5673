#include "lora/adapter_file.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/safetensors.h"
#include "tests/support/adapters.h"
#include "tests/support/error_of.h"
#include "tests/support/peft.h"
#include "tests/support/pytorch.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"

// Adapter folders: what PEFT wrote (data/README.md), what we write, and what is refused.

namespace heddle::lora {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nn::Architecture, nn::CausalLM, nn::SafetensorsFile;
using test::adapt, test::random_adapter, test::error_of, test::peft_adapter, test::peft_base, test::TempFolder, test::tiny_config, test::tiny_model;

const char* const kTensors = "adapter_model.safetensors";
const char* const kConfig = "adapter_config.json";

std::vector<double> logits(const CausalLM& model) {
  const NoGradGuard no_grad;
  return model.forward(Tensor::from_vector<std::int64_t>({3, 1, 4, 1, 5, 9, 2, 6, 5, 3}, {2, 5})).to_doubles();
}

// Of the model while it has the adapter.
std::vector<double> logits_with(const Adapter& adapter, CausalLM& model) {
  adapter.attach(model);
  const auto out = logits(model);
  adapter.detach(model);
  return out;
}

void expect_same_tensors(const fs::path& actual, const fs::path& expected) {
  const SafetensorsFile a(actual), e(expected);
  ASSERT_EQ(a.names(), e.names());
  for (const std::string& name : e.names()) {
    ASSERT_EQ(a.info(name).dtype, e.info(name).dtype) << name;
    ASSERT_EQ(a.info(name).shape, e.info(name).shape) << name;
    const Tensor x = a.read(name), y = e.read(name);
    EXPECT_EQ(std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(y.nbytes())), 0) << name;
  }
}

// The folder with the tensors that `change` makes of its own, and the same config.
void rewrite(const fs::path& from, const fs::path& to, const std::function<void(std::map<std::string, Tensor>&)>& change) {
  const SafetensorsFile file(from / kTensors);
  std::map<std::string, Tensor> tensors;
  for (const std::string& name : file.names()) tensors[name] = file.read(name);
  change(tensors);
  fs::create_directories(to);
  fs::copy_file(from / kConfig, to / kConfig, fs::copy_options::overwrite_existing);
  nn::write_safetensors(to / kTensors, {tensors.begin(), tensors.end()});
}

void edit_config(const fs::path& folder, const json& change) {
  json config = json::parse(nn::read_file(folder / kConfig));
  config.update(change);
  nn::write_file(folder / kConfig, config.dump());
}

class PeftFolder : public testing::TestWithParam<std::string> {};
class PeftLogits : public testing::TestWithParam<std::string> {};

TEST_P(PeftFolder, IsTheSameAfterLoadingAndSaving) {
  const TempFolder out;
  const auto base = peft_base(GetParam());

  save_adapter(out / "adapter", *base, load_adapter(peft_adapter(GetParam()), *base), "");

  expect_same_tensors(out / "adapter" / kTensors, peft_adapter(GetParam()) / kTensors);
  json theirs = json::parse(nn::read_file(peft_adapter(GetParam()) / kConfig));
  if (GetParam() == "llama_patterns") {  // whole names, and longer ones than needed
    theirs["target_modules"] = {"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"};
    theirs["alpha_pattern"] = {{"up_proj", 11}};
  }
  EXPECT_EQ(nn::read_file(out / "adapter" / kConfig), theirs.dump(2));
}

// A logit is up to 10 and the end of some 20 sums of at most 96 terms, in other orders than PyTorch's.
TEST_P(PeftLogits, AreThoseOfTheLoadedAdapter) {
  const auto base = peft_base(GetParam());
  const SafetensorsFile stored(test::kPeftFile), run(test::peft_base_file(GetParam()));
  const Adapter adapter = load_adapter(peft_adapter(GetParam()), *base);
  adapter.attach(*base);
  base->eval();

  const NoGradGuard no_grad;
  test::expect_near_pytorch(base->forward(run.read("input_ids")), stored.read(GetParam() + "/logits"), 1e-5, "logits");
}

INSTANTIATE_TEST_SUITE_P(, PeftFolder, testing::ValuesIn(test::kPeftCases), [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(, PeftLogits, testing::ValuesIn(test::kPeftCases), [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Pissa, PeftLogits, testing::ValuesIn(test::kPissaCases), [](const auto& info) { return info.param; });

TEST(PissaFolder, IsWrittenAsPlainLoraOfTwiceTheRank) {
  for (const std::string& name : test::kPissaCases) {
    const TempFolder out;
    const auto model = peft_base(name);
    const Adapter adapter = load_adapter(peft_adapter(name), *model);
    save_adapter(out / "a", *model, adapter, "");

    const json config = json::parse(nn::read_file(out / "a" / kConfig));
    EXPECT_EQ(config["r"], 6);
    EXPECT_EQ(config["rank_pattern"], json::object());
    EXPECT_EQ(config["init_lora_weights"], true);
    const Adapter plain = load_adapter(out / "a", *model);
    EXPECT_FALSE(plain.layers()[0].initial_a.defined());
    const auto expected = logits_with(adapter, *model), actual = logits_with(plain, *model);
    // Logits below 10 from float32 weights that were split and summed again.
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 1e-5) << name;
  }
}

TEST(AdapterFile, AdaptersFromFilesTakeTurnsBitForBit) {
  const auto model = peft_base("llama_plain");
  const auto plain = logits(*model);
  const Adapter one = load_adapter(peft_adapter("llama_plain"), *model), other = load_adapter(peft_adapter("llama_patterns"), *model);

  const auto first = logits_with(one, *model), second = logits_with(other, *model);

  EXPECT_NE(first, second);
  EXPECT_NE(first, plain);
  EXPECT_EQ(logits_with(one, *model), first);
  EXPECT_EQ(logits_with(other, *model), second);
  EXPECT_EQ(logits(*model), plain);
}

// What GPT-2 has as one layer: every choice of projections, with 3 query heads and 1 key/value head of 4.
TEST(AdapterFile, SeparateProjectionsOfGpt2AreOneLayerInTheFile) {
  nn::TransformerConfig config = tiny_config();
  config.num_key_value_heads = 1;
  const std::vector<std::string> all = {"q_proj", "k_proj", "v_proj"};
  for (int subset = 1; subset < 8; ++subset) {
    for (const bool use_dora : {false, true}) {
      LoraConfig lora{.r = 2, .lora_alpha = 3, .target_modules = {}, .use_dora = use_dora};
      if ((subset & 4) != 0) lora.rank_pattern = {{"layers.1.self_attn.v_proj", 5}};
      for (int i = 0; i < 3; ++i)
        if ((subset >> i & 1) != 0) lora.target_modules.push_back(all[static_cast<std::size_t>(i)]);
      CausalLM model = tiny_model(config);
      const Adapter adapter = random_adapter(model, lora);
      const TempFolder out;
      save_adapter(out / "ours", model, adapter, "");
      rewrite(out / "ours", out / "without_metadata", [](auto&) {});
      const Adapter again = load_adapter(out / "ours", model), as_peft = load_adapter(out / "without_metadata", model);

      const auto expected = logits_with(adapter, model);
      for (const Adapter* one : {&again, &as_peft}) {
        const auto actual = logits_with(*one, model);
        // Logits below 10, other orders of the same few additions.
        for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 1e-5) << subset << use_dora;
      }
      ASSERT_EQ(again.layers().size(), adapter.layers().size());
      for (std::size_t i = 0; i < again.layers().size(); ++i) {
        EXPECT_EQ(again.layers()[i].names, adapter.layers()[i].names);
        EXPECT_EQ(again.layers()[i].a.to_doubles(), adapter.layers()[i].a.to_doubles());
      }
      EXPECT_EQ(SafetensorsFile(out / "ours" / kTensors).info("base_model.model.transformer.h.0.attn.c_attn.lora_B.weight").shape,
                (Shape{20, 2 * std::popcount(static_cast<unsigned>(subset))}));
    }
  }
}

TEST(AdapterFile, RanksThatTheTensorsDoNotHaveAreRefused) {
  CausalLM model = tiny_model(tiny_config());
  const TempFolder out;
  save_adapter(out / "a", model, random_adapter(model, {.r = 2, .target_modules = {"q_proj", "v_proj"}}), "");
  const SafetensorsFile file(out / "a" / kTensors);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.read(name));
  auto metadata = file.metadata();
  EXPECT_EQ(metadata["heddle_ranks:transformer.h.1.attn.c_attn"], "2 0 2");
  for (const std::string bad : {"4 0 0", "2 2 0", "2 0 1", "2 0", "-1 0 5", "x", "", "2 0 2 0", "2 0 2x"}) {
    metadata["heddle_ranks:transformer.h.1.attn.c_attn"] = bad;
    nn::write_safetensors(out / "a" / kTensors, tensors, metadata);

    EXPECT_EQ(error_of([&] { load_adapter(out / "a", model); }),
              (out / "a").string() + " does not fit this model; nothing was loaded:\n  adapter_model.safetensors: the metadata give "
              "transformer.h.1.attn.c_attn the ranks " + bad + ", which its tensors do not have");
  }
}

TEST(AdapterFile, RanksOfLayersThatAreNotAdaptedAreRefused) {
  CausalLM model = tiny_model(tiny_config());
  const TempFolder out;
  save_adapter(out / "a", model, random_adapter(model, {.target_modules = {"q_proj"}}), "");
  const SafetensorsFile file(out / "a" / kTensors);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.read(name));
  auto metadata = file.metadata();
  metadata["heddle_ranks:transformer.h.7.attn.c_attn"] = "8 0 0";
  nn::write_safetensors(out / "a" / kTensors, tensors, metadata);

  EXPECT_EQ(error_of([&] { load_adapter(out / "a", model); }),
            (out / "a").string() + " does not fit this model; nothing was loaded:\n  adapter_model.safetensors: the metadata give "
            "ranks of transformer.h.7.attn.c_attn, which is not adapted");
}

TEST(AdapterFile, IsNotLoadedIntoAModelThatHasAnAdapterAttached) {
  const auto model = peft_base("llama_plain");
  const Adapter first = load_adapter(peft_adapter("llama_plain"), *model);
  first.attach(*model);

  EXPECT_EQ(error_of([&] { load_adapter(peft_adapter("llama_plain"), *model); }),
            "lora: model.layers.0.self_attn.q_proj has an adapter already; detach it first");
  EXPECT_EQ(model->trainable_parameters().size(), first.parameters().size());
}

TEST(AdapterFile, OfAMergedModelIsNotWritten) {
  const TempFolder out;
  CausalLM model = tiny_model(tiny_config());
  Adapter adapter = random_adapter(model, {});
  adapter.merge(model);

  EXPECT_EQ(error_of([&] { save_adapter(out / "a", model, adapter, ""); }),
            "lora: 'model.layers.0.self_attn.q_proj' of this model is not the layer the adapter was made for; detach what is attached "
            "or merged there");
  EXPECT_FALSE(fs::exists(out / "a"));
}

TEST(AdapterFile, AnAdaptedHeadHasItsOwnWeightBesideTheFactors) {
  nn::TransformerConfig config = tiny_config(Architecture::llama);
  config.tie_word_embeddings = false;
  const TempFolder out;
  const std::string key = "base_model.model.lm_head.base_layer.weight";
  CausalLM model = tiny_model(config);
  const Adapter adapter = random_adapter(model, {.target_modules = {"q_proj", "lm_head"}});
  save_adapter(out / "a", model, adapter, "");
  rewrite(out / "a", out / "without", [&](auto& tensors) { tensors.erase(key); });
  rewrite(out / "a", out / "another", [&](auto& tensors) { tensors.at(key).mul_(1.02); });

  EXPECT_EQ(SafetensorsFile(out / "a" / kTensors).read(key).to_doubles(), model.parameters().back().tensor.to_doubles());
  for (const char* name : {"a", "without"})
    EXPECT_EQ(test::values_of(load_adapter(out / name, model).parameters()), test::values_of(adapter.parameters())) << name;
  EXPECT_EQ(error_of([&] { load_adapter(out / "another", model); }),
            (out / "another").string() + " does not fit this model; nothing was loaded:\n  adapter_model.safetensors: " + key +
                " is not the weight of this model");
}

TEST(AdapterFile, AnAdaptedHeadOfGpt2IsNotedAsPeftNotesIt) {
  nn::TransformerConfig config = tiny_config();
  config.tie_word_embeddings = false;
  CausalLM model = tiny_model(config);
  for (const bool has_head : {false, true}) {
    const TempFolder out;
    save_adapter(out / "a", model, random_adapter(model, {.target_modules = {has_head ? "lm_head" : "o_proj"}}), "");

    EXPECT_EQ(json::parse(nn::read_file(out / "a" / kConfig))["fan_in_fan_out"], !has_head);
  }
}

TEST(AdapterFile, SavingReplacesAnOlderOne) {
  const TempFolder out;
  CausalLM model = tiny_model(tiny_config());
  save_adapter(out / "a", model, random_adapter(model, {.target_modules = {"all-linear"}}), "");
  const Adapter second = random_adapter(model, {.target_modules = {"o_proj"}}, 2);
  save_adapter(out / "a", model, second, "");

  EXPECT_EQ(test::values_of(load_adapter(out / "a", model).parameters()), test::values_of(second.parameters()));
  EXPECT_EQ(std::distance(fs::directory_iterator(out.path()), fs::directory_iterator()), 1);
}

TEST(AdapterFile, MisfitsAreListedTogetherAndNothingIsLoaded) {
  const TempFolder out;
  const auto model = peft_base("llama_plain");
  const std::string layer = "base_model.model.model.layers.1.self_attn.";
  rewrite(peft_adapter("llama_plain"), out / "a", [&](auto& tensors) {
    tensors.erase(layer + "k_proj.lora_A.weight");
    tensors[layer + "k_proj.lora_B.weight"] = Tensor::zeros({16, 4});
    tensors[layer + "o_proj.lora_A.weight"] = Tensor::zeros({3, 32}, DType::f64);
    tensors[layer + "q_proj.lora_B.weight"] = Tensor::full({32, 3}, std::numeric_limits<double>::infinity());
    tensors[layer + "v_proj.lora_C.weight"] = Tensor::zeros({1});
  });

  const std::string message = error_of([&] { load_adapter(out / "a", *model); });

  const std::string start = "\n  adapter_model.safetensors: ";
  EXPECT_EQ(message, (out / "a").string() + " does not fit this model; nothing was loaded:" +
                         start + layer + "q_proj.lora_B.weight holds NaN or infinity" +
                         start + "missing " + layer + "k_proj.lora_A.weight [3, 32]" +
                         start + layer + "k_proj.lora_B.weight is [16, 4], expected [16, 3]" +
                         start + layer + "o_proj.lora_A.weight is F64, expected F32, BF16 or F16" +
                         start + "unexpected " + layer + "v_proj.lora_C.weight");
  EXPECT_EQ(model->trainable_parameters().size(), model->parameters().size());
  EXPECT_EQ(linear_layers(*model).size(), 15u);
}

TEST(AdapterFile, ARankThatTheConfigDoesNotSayIsRefused) {
  const TempFolder out;
  const auto model = peft_base("gpt2_plain");
  rewrite(peft_adapter("gpt2_plain"), out / "a", [](auto&) {});
  edit_config(out / "a", {{"r", 16}});

  const std::string message = error_of([&] { load_adapter(out / "a", *model); });

  EXPECT_NE(message.find("transformer.h.0.attn.c_attn.lora_A.weight is [3, 32], expected [16, 32]"), std::string::npos) << message;
}

TEST(AdapterFile, AlphaOfTheFileCounts) {
  const TempFolder out;
  const auto model = peft_base("gpt2_plain");
  rewrite(peft_adapter("gpt2_plain"), out / "a", [](auto&) {});
  edit_config(out / "a", {{"lora_alpha", 16}});

  EXPECT_EQ(load_adapter(out / "a", *model).layers()[0].scale, 16.0 / 3);
}

TEST(AdapterFile, AnAdapterOfAnotherBaseIsRefused) {
  const TempFolder out;
  CausalLM trained_on = tiny_model(tiny_config(), 1), other = tiny_model(tiny_config(), 2);
  save_adapter(out / "a", trained_on, random_adapter(trained_on, {}), "runs/base");

  EXPECT_EQ(error_of([&] { load_adapter(out / "a", other); }),
            (out / "a").string() + " was trained on another base than this model (fingerprint " + base_fingerprint(trained_on) +
                ", this one has " + base_fingerprint(other) + "); use it with its own, then at runs/base");
  EXPECT_EQ(error_of([&] { load_adapter(out / "a", trained_on); }), "no error");
}

TEST(AdapterFile, AnAdapterThatTouchesNoLayerIsRefused) {
  const TempFolder out;
  const auto model = peft_base("llama_plain");
  rewrite(peft_adapter("llama_plain"), out / "a", [](auto&) {});
  edit_config(out / "a", {{"target_modules", {"c_attn"}}});

  EXPECT_EQ(error_of([&] { load_adapter(out / "a", *model); }),
            (out / "a").string() + ": target_modules names no layer of this model; 0 of 16 tensors could be applied");
}

TEST(AdapterFile, AFileWithoutTensorsIsRefused) {
  const TempFolder out;
  const auto model = peft_base("gpt2_plain");
  rewrite(peft_adapter("gpt2_plain"), out / "a", [](auto& tensors) { tensors.clear(); });

  const std::string message = error_of([&] { load_adapter(out / "a", *model); });

  EXPECT_NE(message.find("missing base_model.model.transformer.h.0.attn.c_attn.lora_A.weight [3, 32]"), std::string::npos) << message;
}

// Merging it would change the embedding as well.
TEST(AdapterFile, ATiedHeadHasNoAdapter) {
  const TempFolder out;
  const auto model = peft_base("gpt2_plain");
  rewrite(peft_adapter("gpt2_plain"), out / "a", [](auto& tensors) {
    tensors["base_model.model.lm_head.lora_A.weight"] = Tensor::zeros({3, 32});
    tensors["base_model.model.lm_head.lora_B.weight"] = Tensor::zeros({64, 3});
  });
  edit_config(out / "a", {{"target_modules", {"c_attn", "attn.c_proj", "lm_head"}}});

  const std::string message = error_of([&] { load_adapter(out / "a", *model); });

  EXPECT_NE(message.find("unexpected base_model.model.lm_head.lora_A.weight"), std::string::npos) << message;
}

TEST(AdapterFile, SixteenBitFactorsAreWrittenAsFloat32AndReadBackExactly) {
  const TempFolder out;
  for (const Architecture architecture : {Architecture::gpt2, Architecture::llama}) {
    CausalLM model = tiny_model(tiny_config(architecture), 1, DType::bf16);
    const Adapter adapter = random_adapter(model, {.use_dora = true});
    save_adapter(out / "a", model, adapter, "");

    const SafetensorsFile file(out / "a" / kTensors);
    for (const std::string& name : file.names()) EXPECT_EQ(file.info(name).dtype, "F32") << name;
    const Adapter again = load_adapter(out / "a", model);
    EXPECT_EQ(again.layers()[0].a.dtype(), DType::bf16);
    EXPECT_EQ(again.layers()[0].magnitude.dtype(), DType::f32);
    EXPECT_EQ(test::values_of(again.parameters()), test::values_of(adapter.parameters()));
  }
}

// PEFT's programs read it in float32, where norms rounded to 16 bits would be another function than the base.
TEST(AdapterFile, FreshDoraOfA16BitModelMovesNoLogitInFloat32) {
  const TempFolder out;
  for (const Architecture architecture : {Architecture::gpt2, Architecture::llama}) {
    CausalLM model = tiny_model(tiny_config(architecture), 1, DType::bf16), copy = tiny_model(tiny_config(architecture));
    const NoGradGuard no_grad;
    for (std::size_t i = 0; i < copy.parameters().size(); ++i) copy.parameters()[i].tensor.copy_(model.parameters()[i].tensor);
    const LoraConfig config{.target_modules = {"all-linear"}, .use_dora = true};
    save_adapter(out / "a", model, adapt(model, config), "");

    const Adapter again = load_adapter(out / "a", copy);

    EXPECT_EQ(logits_with(again, copy), logits(copy));
  }
}

TEST(AdapterFile, Float32FactorsOfA16BitModelStayWhatTheyAre) {
  for (const std::string name : {"gpt2_plain", "llama_dora"}) {
    const TempFolder out;
    const auto model = peft_base(name, {.dtype = DType::bf16});
    const Adapter adapter = load_adapter(peft_adapter(name), *model);

    save_adapter(out / "a", *model, adapter, "");

    EXPECT_EQ(adapter.layers()[0].b.dtype(), DType::f32);
    EXPECT_NE(logits_with(adapter, *model), logits(*model));
    expect_same_tensors(out / "a" / kTensors, peft_adapter(name) / kTensors);
  }
}

TEST(AdapterFile, FactorsThatAreNotFiniteAreNotWritten) {
  const TempFolder out;
  CausalLM model = tiny_model(tiny_config());
  const Adapter adapter = random_adapter(model, {.target_modules = {"o_proj"}});
  {
    const NoGradGuard no_grad;
    adapter.layers()[1].b.fill_(std::numeric_limits<double>::quiet_NaN());
  }

  EXPECT_EQ(error_of([&] { save_adapter(out / "a", model, adapter, ""); }),
            (out / "a").string() + ": not written, base_model.model.transformer.h.1.attn.c_proj.lora_B.weight holds NaN or infinity");
  EXPECT_FALSE(fs::exists(out / "a"));
}

TEST(AdapterFile, AnyBytesInTheBasesPathMakeValidJson) {
  const TempFolder out;
  CausalLM model = tiny_model(tiny_config());
  save_adapter(out / "a", model, random_adapter(model, {}), "Загрузки/\xff\"");

  EXPECT_EQ(json::parse(nn::read_file(out / "a" / kConfig))["base_model_name_or_path"], "Загрузки/\\xFF\"");
  EXPECT_EQ(error_of([&] { load_adapter(out / "a", model); }), "no error");
}

TEST(AdapterFile, TargetsAreWrittenAsTheShortestNamesThatFit) {
  const TempFolder out;
  CausalLM model = tiny_model(tiny_config());
  save_adapter(out / "a", model, random_adapter(model, {.r = 2, .target_modules = {"o_proj", "layers.1.mlp.up_proj"},
                                                        .rank_pattern = {{"layers.0.self_attn.o_proj", 4}}}), "");

  const json config = json::parse(nn::read_file(out / "a" / kConfig));

  EXPECT_EQ(config["target_modules"], json({"attn.c_proj", "h.1.mlp.c_fc"}));
  EXPECT_EQ(config["rank_pattern"], json({{"h.0.attn.c_proj", 4}}));
}

TEST(AdapterFile, AMergedCheckpointHoldsTheMergedWeightsAfterTheModelIsUnmerged) {
  const TempFolder out;
  const auto model = peft_base("gpt2_dora"), again = peft_base("gpt2_dora");
  Adapter adapter = load_adapter(peft_adapter("gpt2_dora"), *model);
  const auto plain = test::values_of(model->parameters());
  const auto adapted = logits_with(adapter, *model);

  adapter.merge(*model);
  nn::save_weights(out.path(), *model, DType::f32);
  adapter.detach(*model);
  nn::load_weights(out.path(), *again);

  EXPECT_EQ(test::values_of(model->parameters()), plain);
  const auto merged = logits(*again);
  // Logits below 10; each weight is rounded once more, and adds up with others in some 20 sums of at most 96 terms.
  for (std::size_t i = 0; i < merged.size(); ++i) ASSERT_NEAR(merged[i], adapted[i], 1e-4);
}

}  // namespace
}  // namespace heddle::lora
