#include <gtest/gtest.h>

#include <sstream>

#include "nn/arithmetic_data.h"
#include "tests/support/config_fixture.h"

namespace heddle::config {
namespace {

namespace fs = std::filesystem;
using test::Config, test::kRequiredKeys;

TEST_F(Config, EveryShippedConfigLoadsAndNamesItsOutputAfterItself) {
  const auto files = yaml_files("configs");
  ASSERT_GE(files.size(), 3u);

  for (const fs::path& file : files) {
    EXPECT_EQ(load_shipped(file).train.output_dir, "runs/" + file.stem().string()) << file;
  }
}

TEST_F(Config, EveryBadConfigGivesExactlyItsMessages) {
  const auto files = yaml_files("tests/data/bad_configs");
  ASSERT_GE(files.size(), 20u);

  for (const fs::path& file : files) {
    fs::path expected = file;
    EXPECT_EQ(mistakes(file.string()) + "\n", nn::read_file(expected.replace_extension(".expected"))) << file;
  }
}

TEST_F(Config, RequiredKeysAloneAreEnough) {
  const RunConfig config = load(write(kRequiredKeys));

  EXPECT_EQ(config.model.num_key_value_heads, 6);
  EXPECT_EQ(config.model.head_dim, 8);
  EXPECT_EQ(config.model.intermediate_size, 192);
  EXPECT_EQ(config.model.hidden_act, nn::Activation::silu);
  EXPECT_EQ(config.model.attention_bias, false);
  EXPECT_EQ(config.data.sequence_length, 40);
  EXPECT_EQ(config.train.output_dir, "runs/run");
  EXPECT_EQ(config.device, "auto");
}

TEST_F(Config, NullOptionalTakesItsDefault) {
  const RunConfig config = load(write(kRequiredKeys), {"model.head_dim=null", "model.hidden_act=~", "model.mlp_bias="});

  EXPECT_EQ(config, load(write(kRequiredKeys)));
}

TEST_F(Config, ResolvedConfigLoadsAsTheSameConfig) {
  for (const fs::path& file : yaml_files("configs")) {
    const RunConfig config = load_shipped(file);
    EXPECT_EQ(load(write(to_yaml(config), "config.yaml")), config) << file;
  }
}

TEST_F(Config, EveryKeySurvivesWritingAndReading) {
  RunConfig config = load(write(kRequiredKeys));
  config.model.rope_theta = 1.0 / 3;  // 17 digits
  config.model.initializer_range = 5e-324;
  config.model.rms_norm_eps = 1.7976931348623157e308;
  config.model.qk_norm = true;
  config.model.hidden_act = nn::Activation::silu;
  config.data.files = {"a b.txt", "no", "\"quoted\" \\ back\n\ttab", "Загрузки/ö.md", "byte \xff", "#", "1e3", "null"};
  config.train.seed = 9223372036854775807;
  config.train.resume_from_checkpoint = "null";
  config.train.precision = nn::Precision::bf16;
  config.attention.deterministic = true;
  config.device = "cuda:3";
  config.base = make_base(to_yaml(config));
  config.lora = lora::LoraConfig{.r = 3,
                                 .lora_alpha = 0.1,
                                 .lora_dropout = 0.25,
                                 .target_modules = {"all-linear"},
                                 .use_rslora = true,
                                 .init_lora_weights = lora::InitLoraWeights::gaussian,
                                 .rank_pattern = {{"q_proj", 2}, {".*\\.1\\..*", 7}},
                                 .alpha_pattern = {{"mlp.up_proj", 1e-9}},
                                 .use_dora = true,
                                 .loraplus_lr_ratio = 16};
  config.quantize = quant::QuantConfig{.format = QuantFormat::mxfp4,
                                       .fp8_scale = ScaleGrain::block,
                                       .nvfp4_scale_rounding = ScaleRounding::up,
                                       .nvfp4_scale_search = ScaleSearch::none,
                                       .mxfp4_scale = MxRounding::ceil,
                                       .rounding = quant::ElementRounding::stochastic,
                                       .seed = 5,
                                       .exclude = {"o_proj"}};
  config.compute = QuantCompute::wide;

  EXPECT_EQ(load(write(to_yaml(config))), config);
}

TEST_F(Config, StochasticRoundingHasTheSeedOfTheRun) {
  const std::string path = write(kRequiredKeys);
  const std::vector<std::string> drawn = {"quantize.format=nvfp4", "quantize.rounding=stochastic", "train.seed=7"};
  const auto seed_with = [&](const std::string& set) {
    std::vector<std::string> all = drawn;
    all.push_back(set);
    return load_run_config(path, all).quantize->seed;
  };

  EXPECT_EQ(load_run_config(path, drawn).quantize->seed, 7);
  EXPECT_EQ(seed_with("quantize.seed=8"), 8);
  EXPECT_EQ(seed_with("quantize.rounding=nearest"), std::nullopt);
  EXPECT_EQ(mistakes(path, {"quantize.format=nvfp4", "quantize.seed=8"}),
            "--set quantize.seed: expected null beside quantize.rounding (nearest, the default), got 8");
}

TEST_F(Config, ReadmeTableListsEveryKeyWithItsBoundAndDefault) {
  RunConfig defaults;
  defaults.lora.emplace();
  defaults.quantize.emplace();
  std::vector<std::string> expected;
  for (const SectionFields& section : sections(defaults)) {
    for (const nn::Field& field : section.fields) {
      const std::string name = section.name.empty() ? field.key : section.name + "." + field.key;
      std::string value = field.rule.required ? "required" : std::string(field.rule.derived);
      if (value.empty()) value = field.value_text();
      expected.push_back("| `" + name + "` | " + field.expected() + " | " + value + " | ");
    }
  }

  std::vector<std::string> rows;
  const std::string text = nn::read_file("configs/README.md");
  std::istringstream readme(text.substr(text.find("## Keys")));
  for (std::string line; std::getline(readme, line);)
    if (line.starts_with("| `")) rows.push_back(line);

  ASSERT_EQ(rows.size(), expected.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].substr(0, expected[i].size()), expected[i]);
    EXPECT_GT(rows[i].size(), expected[i].size() + 2) << "no meaning: " << rows[i];
  }
}

TEST_F(Config, RuleBrokenByTheFileAgainstAnOverrideNamesBoth) {
  const std::string path = write(kRequiredKeys);

  EXPECT_EQ(mistakes(path, {"model.num_attention_heads=5"}),
            path + ":3:16: model.hidden_size: expected a multiple of model.num_attention_heads (5, --set), got 48");
}

TEST_F(Config, ShortestArithmeticSequenceIsOneProblemOfTheDataSet) {
  const std::string path = write(kRequiredKeys);
  for (const char* operation : {"addition", "subtraction"}) {
    std::vector<std::string> overrides{"data.source=arithmetic", "data.digits=3", std::string("data.operation=") + operation};
    const std::int64_t length = nn::ArithmeticData(load(path, overrides).data, /*seed=*/1).row_length();

    overrides.push_back("data.sequence_length=" + std::to_string(length));
    EXPECT_EQ(mistakes(path, overrides), "");
    overrides.push_back("data.sequence_length=" + std::to_string(length - 1));
    EXPECT_EQ(mistakes(path, overrides), "--set data.sequence_length: expected at least " + std::to_string(length) +
                                             ", a whole problem, for data.digits (3, --set), got " +
                                             std::to_string(length - 1));
  }
}

TEST_F(Config, WhatChecksRefuseIsAmongTheMistakes) {
  const std::string path = write(std::string(kRequiredKeys) + "  seed: -1\ndevice: cuda:7\n");
  const auto refuse = [](const char* key) {
    return [key](const RunConfig&) { throw nn::BadValue(key, "another", "this"); };
  };
  const std::vector<RunCheck> checks = {{{""}, refuse("device")}, {{"data"}, refuse("data.files")}, {{"model", "train"}, refuse("train.max_steps")}};

  std::string message;
  try {
    load_run_config(path, {"data.validation_fraction=0.5"}, checks);
  } catch (const ConfigError& error) {
    message = error.what();
  }

  EXPECT_EQ(message, path + ":7:1: data.files: expected another, got this (the default)\n" +
                         path + ":11:9: train.seed: expected integer >= 0, got -1\n" +
                         path + ":12:9: device: expected another, got this");
}

TEST_F(Config, ResumeRefusesAnotherFunctionAndNotesAnotherTraining) {
  const RunConfig before = load(write(kRequiredKeys));
  const auto changes = [&](const std::vector<std::string>& overrides) { return resume_changes(before, load(write(kRequiredKeys), overrides)); };

  const std::vector<std::string> function{"model.rope_theta=500", "model.num_attention_heads=4", "model.rms_norm_eps=1e-3", "train.precision=bf16",
                                          "train.fp8_history=8"};
  EXPECT_EQ(changes(function).refused,
            (std::vector<std::string>{"model.num_attention_heads 6, here 4", "model.num_key_value_heads 6, here 4", "model.head_dim 8, here 12",
                                      "model.rms_norm_eps 1e-06, here 0.001", "model.rope_theta 10000, here 500", "train.precision fp32, here bf16",
                                      "train.fp8_history 16, here 8"}));
  const ResumeChanges course = changes({"train.seed=2", "train.micro_batch_size=3", "train.max_steps=20", "model.resid_pdrop=0.5"});
  EXPECT_EQ(course.noted, (std::vector<std::string>{"model.resid_pdrop 0, here 0.5", "train.max_steps 10, here 20",
                                                    "train.micro_batch_size 16, here 3", "train.seed 1337, here 2"}));
  EXPECT_TRUE(course.refused.empty());
  const ResumeChanges free = changes({"train.output_dir=x", "train.resume_from_checkpoint=auto", "train.save_steps=1", "device=cpu"});
  EXPECT_TRUE(free.refused.empty() && free.noted.empty());
}

TEST(TransformerConfig, ValidateNamesEveryBadKeyAndRule) {
  const nn::TransformerConfig config{.architecture = nn::Architecture::llama,
                                     .hidden_size = 10,
                                     .num_attention_heads = 3,
                                     .max_position_embeddings = 8,
                                     .rms_norm_eps = 0};

  try {
    nn::validate(config);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "model.num_hidden_layers: expected integer in [1, 10000], got 0\n"
                 "model.rms_norm_eps: expected number > 0, got 0\n"
                 "model.hidden_size: expected a multiple of num_attention_heads (3), got 10");
  }
}

TEST(TrainConfig, ValidateNamesEveryBadKeyAndRule) {
  const nn::TrainConfig config{.output_dir = "runs/x", .max_steps = 5, .learning_rate = 1.0 / 0.0, .warmup_steps = -1};

  try {
    nn::validate(config);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "train.learning_rate: expected number > 0, got inf\n"
                 "train.warmup_steps: expected integer in [0, 1e+09], got -1");
  }
}

}  // namespace
}  // namespace heddle::config
