#include "lora/peft_config.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "lora/name_pattern.h"
#include "nn/atomic_file.h"
#include "nn/hf_names.h"
#include "tests/support/error_of.h"
#include "tests/support/peft.h"
#include "tests/support/temp_folder.h"

// adapter_config.json: its text, and what its options mean. data/README.md describes the stored adapters.

namespace heddle::lora {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_of;

PeftConfig read(const std::string& text) {
  const test::TempFolder folder;
  nn::write_file(folder / "adapter_config.json", text);
  return read_peft_config(folder / "adapter_config.json");
}

json least() { return {{"peft_type", "LORA"}, {"r", 8}, {"lora_alpha", 16}, {"target_modules", {"q_proj"}}}; }

TEST(PeftConfig, TextIsByteForByteWhatPeftWrote) {
  for (const std::string& name : test::kPeftCases) {
    const fs::path path = test::peft_adapter(name) / "adapter_config.json";
    EXPECT_EQ(peft_config_text(read_peft_config(path)), nn::read_file(path)) << path;
  }
}

TEST(PeftConfig, TextReadsBackAsTheSameConfig) {
  PeftConfig config{.base_model_name_or_path = "runs/a \"base\"", .r = 5, .lora_alpha = 2.5, .lora_dropout = 0.25, .use_rslora = true,
                    .use_dora = true, .fan_in_fan_out = true, .init_lora_weights = "gaussian", .target_modules = {"c_attn"},
                    .exclude_modules = {"h.1.attn.c_attn"}, .layers_to_transform = {0, 1}, .rank_pattern = {{"c_attn", 7}},
                    .alpha_pattern = {{"c_attn", 0.5}}};

  const std::string text = peft_config_text(config);

  EXPECT_EQ(peft_config_text(read(text)), text);
  EXPECT_EQ(read(text).base_model_name_or_path, config.base_model_name_or_path);
  EXPECT_EQ(alpha_of(read(text), "c_attn"), 0.5);
}

TEST(PeftConfig, ScaleIsAlphaOverRankOrOverItsRoot) {
  EXPECT_EQ(scale_of(read(least().dump()), "q_proj"), 2);
  json rslora = least();
  rslora.update({{"use_rslora", true}, {"r", 16}});
  EXPECT_EQ(scale_of(read(rslora.dump()), "q_proj"), 4);
}

TEST(PeftConfig, TargetsAreWholeNamesOrEndsAfterADot) {
  const PeftConfig config = read(least().dump());

  EXPECT_TRUE(config.targets("q_proj"));
  EXPECT_TRUE(config.targets("model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(config.targets("model.layers.0.self_attn.kq_proj"));
  EXPECT_FALSE(config.targets("model.layers.0.q_proj.k_proj"));
}

TEST(PeftConfig, ATargetThatIsTextIsAPatternOfWholeNames) {
  json in = least();
  in["target_modules"] = R"(.*\.1\.self_attn\.[qv]_proj)";
  const PeftConfig config = read(in.dump());

  EXPECT_TRUE(config.targets("model.layers.1.self_attn.v_proj"));
  EXPECT_FALSE(config.targets("model.layers.0.self_attn.v_proj"));
  EXPECT_FALSE(config.targets("model.layers.1.self_attn.v_proj.base"));
}

TEST(PeftConfig, ExcludedModulesAndOtherLayersAreNoTargets) {
  json in = least();
  in.update({{"exclude_modules", {"layers.2.q_proj"}}, {"layers_to_transform", {1, 2}}});
  const PeftConfig config = read(in.dump());

  EXPECT_FALSE(config.targets("model.layers.0.q_proj"));
  EXPECT_TRUE(config.targets("model.layers.1.q_proj"));
  EXPECT_FALSE(config.targets("model.layers.2.q_proj"));
}

TEST(PeftConfig, TheFirstPatternOfTheFileCounts) {
  const PeftConfig config = read(R"({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
      "rank_pattern": {"q_.*": 3, "0.q_proj": 5}, "alpha_pattern": {"0.q_proj": 1, "q_proj": 2}})");

  EXPECT_EQ(rank_of(config, "layers.0.q_proj"), 3);
  EXPECT_EQ(alpha_of(config, "layers.0.q_proj"), 1);
  EXPECT_EQ(alpha_of(config, "layers.1.q_proj"), 2);
  EXPECT_EQ(rank_of(config, "layers.0.k_proj"), 8);
}

TEST(PeftConfig, WhatChangesTheAdapterAndIsNotSupportedIsRefused) {
  const std::vector<std::pair<json, std::string>> cases = {
      {{{"peft_type", "IA3"}}, "peft_type is IA3; only LORA adapters can be used here"},
      {{{"peft_type", nullptr}}, "peft_type is missing"},
      {{{"lora_alpha", nullptr}}, "lora_alpha is missing"},
      {{{"lora_alpha", "16"}}, "lora_alpha must be a number, got \"16\""},
      {{{"r", nullptr}}, "r is missing"},
      {{{"r", 0}}, "r must be an integer in [1, 2147483648], got 0"},
      {{{"r", 1.5}}, "r must be an integer in [1, 2147483648], got 1.5"},
      {{{"r", std::int64_t{1} << 40}}, "r must be an integer in [1, 2147483648], got 1099511627776"},
      {{{"target_modules", nullptr}}, "target_modules is missing"},
      {{{"target_modules", json::array()}}, "target_modules is empty"},
      {{{"target_modules", ""}}, "target_modules is empty"},
      {{{"target_modules", {3}}}, "target_modules must hold text, got 3"},
      {{{"lora_dropout", 1}}, "lora_dropout must be in [0, 1), got 1"},
      {{{"use_dora", 1}}, "use_dora must be true or false"},
      {{{"rank_pattern", {{"q_proj", -1}}}}, "rank_pattern.q_proj must be an integer in [1, 2147483648], got -1"},
      {{{"layers_to_transform", {-1}}}, "layers_to_transform must hold numbers of layers, got -1"},
      {{{"bias", "all"}}, "bias is \"all\"; adapters with this option cannot be used here"},
      {{{"modules_to_save", {"lm_head"}}}, "modules_to_save is [\"lm_head\"]; adapters with this option cannot be used here"},
      {{{"use_new_thing", true}}, "use_new_thing is true; adapters with this option cannot be used here"},
      {{{"init_lora_weights", "olora"}}, "init_lora_weights is olora, which changes the base; save the adapter as plain LoRA"},
  };
  for (const auto& [change, message] : cases) {
    json in = least();
    in.update(change);
    const std::string error = error_of([&in = in] { read(in.dump()); });
    EXPECT_TRUE(error.ends_with("/adapter_config.json: " + message)) << error;
  }
  EXPECT_TRUE(error_of([] { read("[1]"); }).ends_with("/adapter_config.json: not a JSON object of at most 64 levels with each key once"));
  EXPECT_TRUE(error_of([] { read(R"({"r": 4, "r": 8})"); }).ends_with("/adapter_config.json: not a JSON object of at most 64 levels with each key once"));
  EXPECT_TRUE(error_of([] { read("{"); }).ends_with("/adapter_config.json: not a JSON object of at most 64 levels with each key once"));
}

TEST(PeftConfig, UnknownKeysThatSayNothingAreAccepted) {
  json in = least();
  in.update({{"use_new_thing", false}, {"new_config", nullptr}, {"new_list", json::array()}, {"revision", "main"}});

  EXPECT_EQ(read(in.dump()).r, 8);
}

std::string repeated(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

TEST(PeftConfig, LevelsWithoutEndAreRefused) {
  const std::string lists = repeated("[", 200000) + repeated("]", 200000);

  const std::string error = error_of([&] { read(R"({"peft_type": "LORA", "new_list": )" + lists + "}"); });

  EXPECT_TRUE(error.ends_with("/adapter_config.json: not a JSON object of at most 64 levels with each key once")) << error;
}

TEST(PeftConfig, PatternsThatCannotBeUsedAreRefusedWithTheFileAndTheirStart) {
  const std::string deep = repeated("(", 20000) + repeated(")", 20000);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"q_proj(", "'q_proj(', which is not a regular expression without back references"},
      {"q_proj)|(k_proj", "'q_proj)|(k_proj', which is not a regular expression without back references"},
      {deep, "'" + repeated("(", 100) + "...', which has more than 500 characters"},
      {repeated("(", 21) + repeated(")", 21), "'" + repeated("(", 21) + repeated(")", 21) + "', which has groups in more than 20 levels"},
      {"(x{9}){2}", "'(x{9}){2}', which repeats parts by counts whose product is over 16"},
      {"x{99999999999}", "'x{99999999999}', which repeats parts by counts whose product is over 16"},
      {"(?=.(?!.(?=x)))", "'(?=.(?!.(?=x)))', which has more than 2 look-aheads"},
      {R"((.)\1)", R"('(.)\1', which is not a regular expression without back references)"}};
  for (const auto& [pattern, problem] : cases)
    for (const std::string key : {"target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"}) {
      json in = least();
      in[key] = key.ends_with("pattern") ? json({{pattern, 1}}) : json(pattern);

      const std::string error = error_of([&] { read(in.dump()); });

      EXPECT_TRUE(error.ends_with("/adapter_config.json: " + key + " holds " + problem)) << error;
    }
}

// Tried one after another, the ways to match these would take years.
TEST(PeftConfig, PatternsTakeTimeInProportionToTheirLength) {
  const std::string name = "model.layers.11.self_attn.q_proj";
  for (const std::string& pattern : {std::string("(([a-z.0-9_]*)*)*Z"), repeated(".*", 249) + "Z", repeated("(|)", 166)}) EXPECT_FALSE(fits_ending(pattern, name));
  EXPECT_TRUE(fits_name(R"(^(?!.*vision).*\.\d{1,2}\.self_attn\.(?:q|v)_proj$)", name));
}

TEST(PeftConfig, ExcludedModulesMayBeAPatternBesideNamesOrAPattern) {
  for (const json& targets : {json({"q_proj", "v_proj"}), json(".*[qv]_proj")}) {
    json in = least();
    in.update({{"target_modules", targets}, {"exclude_modules", R"(.*\.0\.[qk]_proj)"}});
    const PeftConfig config = read(in.dump());

    EXPECT_FALSE(config.targets("layers.0.q_proj")) << targets;
    EXPECT_TRUE(config.targets("layers.1.q_proj")) << targets;
    EXPECT_TRUE(config.targets("layers.0.v_proj")) << targets;
    EXPECT_EQ(json::parse(peft_config_text(config))["exclude_modules"], in["exclude_modules"]);
  }
}

TEST(ByEnding, FindsTheShortestEndingsThatTellModulesApart) {
  const std::map<std::string, int> modules = {{"h.0.attn.c_proj", 1}, {"h.0.mlp.c_proj", 2}, {"h.0.attn.c_attn", 1},
                                              {"h.1.attn.c_proj", 1}, {"h.1.mlp.c_proj", 2}, {"h.1.attn.c_attn", 3}, {"head", 4}};

  EXPECT_EQ(by_ending(modules), (std::map<std::string, int>{{"attn.c_proj", 1}, {"mlp.c_proj", 2}, {"h.0.attn.c_attn", 1},
                                                            {"h.1.attn.c_attn", 3}, {"head", 4}}));
}

TEST(HfNames, Gpt2JoinsQueriesKeysAndValues) {
  using nn::HfLinear, nn::hf_linear, nn::Architecture;

  EXPECT_EQ(hf_linear(Architecture::gpt2, "model.layers.11.self_attn.q_proj"), (HfLinear{"transformer.h.11.attn.c_attn", 0, 3}));
  EXPECT_EQ(hf_linear(Architecture::gpt2, "model.layers.11.self_attn.v_proj"), (HfLinear{"transformer.h.11.attn.c_attn", 2, 3}));
  EXPECT_EQ(hf_linear(Architecture::gpt2, "model.layers.1.self_attn.o_proj"), (HfLinear{"transformer.h.1.attn.c_proj"}));
  EXPECT_EQ(hf_linear(Architecture::gpt2, "model.layers.0.mlp.up_proj"), (HfLinear{"transformer.h.0.mlp.c_fc"}));
  EXPECT_EQ(hf_linear(Architecture::gpt2, "lm_head"), (HfLinear{"lm_head"}));
  EXPECT_EQ(hf_linear(Architecture::llama, "model.layers.0.mlp.up_proj"), (HfLinear{"model.layers.0.mlp.up_proj"}));
  EXPECT_EQ(error_of([] { hf_linear(Architecture::gpt2, "model.layers.0.mlp.gate_proj"); }),
            "hf_names: the gpt2 architecture has no linear layer 'model.layers.0.mlp.gate_proj'");
}

}  // namespace
}  // namespace heddle::lora
