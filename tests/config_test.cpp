#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <locale>
#include <sstream>

#include "configs/run_config.h"
#include "configs/yaml_reader.h"
#include "kernels/runtime/check.h"
#include "nn/arithmetic_data.h"
#include "nn/atomic_file.h"
#include "nn/posix_file.h"
#include "nn/safetensors.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace heddle::config {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRequiredKeys = R"(model:
  architecture: llama
  hidden_size: 48
  num_hidden_layers: 2
  num_attention_heads: 6
  max_position_embeddings: 40
data:
  source: text
train:
  max_steps: 10
)";

// Messages hold the path as it was given, so the tests run at the root of the sources and give relative paths.
class Config : public testing::Test {
 protected:
  void SetUp() override { fs::current_path(HEDDLE_SOURCE_DIR); }

  // A file of the test's own, gone after the test.
  std::string write(std::string_view text, const std::string& name = "run.yaml") {
    const fs::path path = folder_ / name;
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }

  static RunConfig load(const std::string& path, const std::vector<std::string>& overrides = {}) {
    return load_run_config(path, overrides);
  }

  // All the mistakes of a config, "" if there are none.
  static std::string mistakes(const std::string& path, const std::vector<std::string>& overrides = {}) {
    try {
      load(path, overrides);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  }

  // The folder of a checkpoint that was trained as a config says, as far as configs look at it.
  std::string make_base(const std::string& yaml) {
    const fs::path folder = folder_ / "base";
    fs::create_directory(folder);
    nn::write_file(folder / "config.yaml", yaml);
    nn::write_safetensors(folder / "model.safetensors", {}, {});
    return folder.string();
  }

  // A shipped config; in place of the run that its base is, a checkpoint made with the config of that run.
  RunConfig load_shipped(const fs::path& file) {
    const std::string text = nn::read_file(file), key = "\nbase: runs/";
    const std::size_t start = text.find(key);
    if (start == std::string::npos) return load(file.string());
    const std::string base = text.substr(start + key.size(), text.find('\n', start + 1) - start - key.size());
    return load(file.string(), {"base=" + make_base(to_yaml(load("configs/" + base + ".yaml")))});
  }

  static std::vector<fs::path> yaml_files(const fs::path& folder) {
    std::vector<fs::path> out;
    for (const auto& entry : fs::directory_iterator(folder))
      if (entry.path().extension() == ".yaml") out.push_back(entry.path());
    std::ranges::sort(out);
    return out;
  }

  const test::TempFolder folder_;
};

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
                                       .nvfp4_scale_search = ScaleSearch::four_over_six,
                                       .mxfp4_scale = MxRounding::ceil,
                                       .compute = QuantCompute::wide,
                                       .exclude = {"o_proj"}};

  EXPECT_EQ(load(write(to_yaml(config))), config);
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

TEST_F(Config, EveryNumberFormOfYamlIsANumber) {
  const std::string path = write(kRequiredKeys);
  for (const char* text : {"1e-4", "1E-4", "1.e-4", ".0001", "+1e-4", "0.0001", "+.0001", "1e-04", "0.1e-3"})
    EXPECT_EQ(load(path, {std::string("train.learning_rate=") + text}).train.learning_rate, 1e-4) << text;
  for (const char* text : {"1e4", "1.0e+4", "10000", "10000.", "+1E4"})
    EXPECT_EQ(load(path, {std::string("model.rope_theta=") + text}).model.rope_theta, 10000) << text;
  for (const char* text : {"16", "+16", "0x10", "0o20", "016"})
    EXPECT_EQ(load(path, {std::string("train.micro_batch_size=") + text}).train.micro_batch_size, 16) << text;
}

TEST_F(Config, WhatOnlyLooksLikeANumberIsNone) {
  for (const char* text : {"", ".", "-", "+", "+-1", "-+1", "--1", "1e", "e1", "1_000", "1,5", "1 ", " 1", "0x", ".inf",
                           "inf", "nan", ".nan", "1e999", "1f", "1.0.0"})
    EXPECT_EQ(parse_number(text), std::nullopt) << text;
  for (const char* text : {"", "+", "+-1", "1e4", "1.0", "0x-1", "0o-1", "0x", "0o8", "1_000", "9223372036854775808"})
    EXPECT_EQ(parse_integer(text), std::nullopt) << text;
}

// The decimal comma and digit groups of many languages, without the need for one of them on this machine.
struct CommaPunctuation : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST_F(Config, DecimalCommaOfTheLocaleHasNoEffect) {
  const std::string path = write(kRequiredKeys);
  const std::vector<std::string> overrides{"train.learning_rate=1.5e-4", "train.max_steps=1234567", "train.seed=1.5"};
  const std::vector<std::string> good(overrides.begin(), overrides.begin() + 2);
  const std::string text = to_yaml(load(path, good));
  const std::string message = mistakes(path, overrides);

  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new CommaPunctuation));
  const std::string text_with_comma = to_yaml(load(path, good));
  const std::string message_with_comma = mistakes(path, overrides);
  std::locale::global(before);

  EXPECT_EQ(text_with_comma, text);
  EXPECT_EQ(message_with_comma, message);
}

TEST_F(Config, StringKeysKeepTheirTextAsWritten) {
  const std::string path = write(kRequiredKeys);
  for (const char* text : {"no", "yes", "1e3", "0x10", "true", "y", "runs/a b", "Загрузки/ö"})
    EXPECT_EQ(load(path, {std::string("train.output_dir=") + text}).train.output_dir, text);
  EXPECT_EQ(load(path, {"train.output_dir='null'"}).train.output_dir, "null");
  EXPECT_EQ(mistakes(path, {"train.output_dir=null"}), "--set train.output_dir: expected non-empty string, got null");
}

TEST_F(Config, OverrideWinsOverTheFileAndTheLastOneOverTheFirst) {
  const RunConfig config = load("configs/tiny.yaml", {"train.max_steps=200", "device=cpu", "data.files=[\"a b\", c]",
                                                      "attention.kernel=cpu", "train.max_steps=300"});

  EXPECT_EQ(config.train.max_steps, 300);
  EXPECT_EQ(config.device, "cpu");
  EXPECT_EQ(config.data.files, (std::vector<std::string>{"a b", "c"}));
  EXPECT_EQ(config.attention.kernel, "cpu");
}

TEST_F(Config, OverridesAreCheckedLikeTheFile) {
  const std::string path = write(kRequiredKeys);
  const std::vector<std::string> overrides{
      "train.max_step=200", "train.micro_batch_size=eight", "train.min_learning_rate=11", "model.num_layers.x=1",
      "data=[text]",        "train.seed=[1",                "max_steps=5",           "train.seed",
      "=3",                 "train.output_dir=a: b: c"};

  EXPECT_EQ(mistakes(path, overrides),
            "--set train.max_step: expected a known key, got \"max_step\"; did you mean max_steps?\n"
            "--set train.micro_batch_size: expected integer in [1, 1e+09], got \"eight\"\n"
            "--set train.min_learning_rate: expected at most train.learning_rate (0.001, the default), got 11\n"
            "--set model.num_layers.x: expected a known key, got \"num_layers.x\"; configs/README.md lists the keys\n"
            "--set data: expected a map of keys, got a list\n"
            "--set train.seed: expected valid YAML, got a syntax error (end of sequence flow not found)\n"
            "--set max_steps: expected a known key, got \"max_steps\"; it belongs under train\n"
            "--set train.seed: expected KEY=VALUE, got \"train.seed\"\n"
            "--set =3: expected KEY=VALUE, got \"=3\"\n"
            "--set train.output_dir: expected valid YAML, got a syntax error (illegal map value)");
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

TEST_F(Config, MissingFileAndFolderAreNamed) {
  EXPECT_EQ(mistakes("configs/tyni.yaml"), "cannot open configs/tyni.yaml: No such file or directory");
  EXPECT_EQ(mistakes("configs"), "cannot open configs: it is a folder, a file is needed");
}

TEST_F(Config, PathOfAnyBytesIsOpenedAndShownEscaped) {
  const std::string path = write("- a\n", "Загрузки ö \xff.yaml");

  const std::string shown = (folder_ / "Загрузки ö \\xFF.yaml").string();
  EXPECT_EQ(mistakes(path), shown + ":1:1: expected a map of keys, got a list");
}

TEST_F(Config, WindowsLineEndsAndByteOrderMarkAreIgnored) {
  std::string text = "\xef\xbb\xbf";
  for (const char c : kRequiredKeys) text += c == '\n' ? std::string("\r\n") : std::string(1, c);

  EXPECT_EQ(load(write(text)), load(write(kRequiredKeys)));
}

TEST_F(Config, DeeplyNestedFileIsRefused) {
  const std::string message = mistakes(write("a: " + std::string(100000, '[')));

  EXPECT_NE(message.find(": expected a few levels of nesting, got "), std::string::npos) << message;
}

TEST_F(Config, QuoteThatIsNeverClosedIsRefusedHoweverTheTextEnds) {
  const std::string good(kRequiredKeys);
  for (const char* end : {"'", "\"", "'text", "\"text\n\n", "'it''s", "\"a\n  b\n"})
    EXPECT_NE(mistakes(write(good + "  output_dir: " + end)).find("expected a closing quote after this, got the end of the text"),
              std::string::npos) << end;
  for (const char* end : {"'a'", "\"a\\\"b\"", "'it''s' # a comment", "plain # not 'closed", "\"a\n  b\""})
    EXPECT_EQ(mistakes(write(good + "  output_dir: " + end)), "") << end;
  EXPECT_EQ(mistakes(write(good), {"train.output_dir=\"x"}),
            "--set train.output_dir: expected a closing quote after this, got the end of the text");
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

  const std::vector<std::string> function{"model.rope_theta=500", "model.num_attention_heads=4", "model.rms_norm_eps=1e-3", "train.precision=bf16"};
  EXPECT_EQ(changes(function).refused,
            (std::vector<std::string>{"model.num_attention_heads 6, here 4", "model.num_key_value_heads 6, here 4", "model.head_dim 8, here 12",
                                      "model.rms_norm_eps 1e-06, here 0.001", "model.rope_theta 10000, here 500", "train.precision fp32, here bf16"}));
  const ResumeChanges course = changes({"train.seed=2", "train.micro_batch_size=3", "train.max_steps=20", "model.resid_pdrop=0.5"});
  EXPECT_EQ(course.noted, (std::vector<std::string>{"model.resid_pdrop 0, here 0.5", "train.max_steps 10, here 20",
                                                    "train.micro_batch_size 16, here 3", "train.seed 1337, here 2"}));
  EXPECT_TRUE(course.refused.empty());
  const ResumeChanges free = changes({"train.output_dir=x", "train.resume_from_checkpoint=auto", "train.save_steps=1", "device=cpu"});
  EXPECT_TRUE(free.refused.empty() && free.noted.empty());
}

// Fine-tuning
constexpr std::string_view kFineTune = R"(base: BASE
data:
  source: text
train:
  max_steps: 10
lora:
  r: 4
)";

TEST_F(Config, BaseGivesTheModel) {
  const std::string base = make_base(to_yaml(load(write(kRequiredKeys))));
  const RunConfig run = load(write(kFineTune), {"base=" + base, "model.resid_pdrop=0.1"});

  EXPECT_EQ(run.model.hidden_size, 48);
  EXPECT_EQ(run.model.architecture, nn::Architecture::llama);
  EXPECT_EQ(run.model.resid_pdrop, 0.1);
  EXPECT_EQ(run.data.sequence_length, 40);
  ASSERT_TRUE(run.lora);
  EXPECT_EQ(run.lora->r, 4);
  EXPECT_FALSE(load(write(kRequiredKeys)).lora);
}

TEST_F(Config, MistakesOfFineTuningAreAllReported) {
  const std::string base = make_base(to_yaml(load(write(kRequiredKeys)))), path = write(kFineTune);

  EXPECT_EQ(mistakes(path), path + ":1:7: base: expected a checkpoint or the output folder of a run, got \"BASE\" (BASE is not a folder; give "
                                   "a checkpoint or the output folder of a run)");
  EXPECT_EQ(mistakes(path, {"base=null", "model.architecture=gpt2", "model.hidden_size=48", "model.num_hidden_layers=2", "model.num_attention_heads=6",
                            "model.max_position_embeddings=40"}),
            "--set base: expected a checkpoint or the output folder of a run, for lora to adapt, got null");
  EXPECT_EQ(mistakes(path, {"base=null"}), "--set base: expected a checkpoint or the output folder of a run, for lora to adapt, got null");
  EXPECT_EQ(mistakes(path, {"base=" + base, "model.architecture=gpt2"}), "--set model.architecture: expected the base's, llama, got gpt2");
  EXPECT_EQ(mistakes(path, {"base=" + base, "model.hidden_size=96"}), "--set model.hidden_size: expected the base's, 48, got 96");
  EXPECT_EQ(mistakes(path, {"base=" + base, "lora.target_modules=k_porj"}),
            "--set lora.target_modules: expected names of layers, of which there are c_attn, down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, "
            "up_proj, v_proj, got \"k_porj\", which is none of them; did you mean k_proj?");
  EXPECT_EQ(mistakes(path, {"base=" + base, "lora.r=0", "lora.rank_pattern={k_proj: 2, q_proj: 0}", "lora.alpha_pattern={'(': 1}", "lora.lora_dropout=1",
                            "lora.init_lora_weights=olora", "lora.lora_alhpa=3"}),
            "--set lora.r: expected integer in [1, 1e+09], got 0\n"
            "--set lora.rank_pattern: expected map of regular expressions for names to integer in [1, 1e+09], got a map holding \"q_proj\": 0\n"
            "--set lora.alpha_pattern: expected map of regular expressions for names to number > 0, got a map holding \"(\"\n"
            "--set lora.lora_dropout: expected number in [0, 1), got 1\n"
            "--set lora.init_lora_weights: expected one of true, gaussian, pissa, got \"olora\"\n"
            "--set lora.lora_alhpa: expected a known key, got \"lora_alhpa\"; did you mean lora_alpha?");
}

TEST_F(Config, WhatIsNoBaseIsTheOneMistake) {
  const std::string whole = to_yaml(load(write(kRequiredKeys))), path = write(kFineTune);
  const fs::path base = make_base(whole), cut = folder_ / "cut", bare = folder_ / "bare", adapter = folder_ / "adapter";
  fs::copy(base, cut);
  fs::resize_file(cut / "model.safetensors", 5);
  fs::copy(base, bare);
  fs::remove(bare / "config.yaml");
  fs::copy(base, adapter);
  fs::rename(adapter / "model.safetensors", adapter / "adapter_model.safetensors");

  for (const fs::path& bad : {fs::path(path), cut, bare, adapter, folder_ / "none"}) {
    const std::string found = mistakes(path, {"base=" + bad.string()});
    EXPECT_TRUE(found.starts_with("--set base: expected a checkpoint or the output folder of a run, got \"" + bad.string())) << found;
    EXPECT_EQ(found.find('\n'), std::string::npos) << found;
  }
}

TEST_F(Config, NullLoraIsNoneAndAnEmptyMapIsItsDefaults) {
  const std::string base = "base=" + make_base(to_yaml(load(write(kRequiredKeys)))), path = write(kFineTune);

  EXPECT_FALSE(load(path, {base, "lora=null"}).lora);
  EXPECT_EQ(load(path, {base, "lora={}"}).lora, lora::LoraConfig{});
  EXPECT_FALSE(load(write(std::string(kRequiredKeys) + "lora:\n")).lora);
}

TEST_F(Config, ThatOfARunCanBeReadWithoutItsBase) {
  const std::string base = make_base(to_yaml(load(write(kRequiredKeys))));
  const RunConfig run = load(write(kFineTune), {"base=" + base});
  const std::string own = write(to_yaml(run), "own.yaml");
  fs::remove_all(base);

  EXPECT_EQ(load_run_config(own, {}, {}, Base::not_opened), run);
}

TEST_F(Config, ChecksOfTheModelWaitForItsBase) {
  const std::string path = write(kFineTune);
  const RunCheck of_model = {{"model", "data"}, [](const RunConfig&) { throw nn::BadValue("data.files", "another", "this"); }};

  EXPECT_EQ(test::error_of([&] { load_run_config(path, {}, {of_model}); }), mistakes(path));
}

TEST_F(Config, ResumeRefusesAnotherAdapter) {
  const std::string base = make_base(to_yaml(load(write(kRequiredKeys)))), path = write(kFineTune);
  const RunConfig before = load(path, {"base=" + base});
  const auto changes = [&](const std::string& set) { return resume_changes(before, load(path, {"base=" + base, set})); };

  EXPECT_EQ(changes("lora.use_dora=true").refused, std::vector<std::string>{"lora.use_dora false, here true"});
  EXPECT_EQ(changes("lora.lora_dropout=0.5").noted, std::vector<std::string>{"lora.lora_dropout 0, here 0.5"});
  EXPECT_EQ(resume_changes(load(write(kRequiredKeys)), before).refused.front(), "lora.r nothing, here 4");
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
