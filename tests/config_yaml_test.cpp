// What a config file's text and --set may look like, and how messages show it.

#include <locale>

#include "configs/yaml_reader.h"
#include "tests/support/config_fixture.h"

namespace heddle::config {
namespace {

using test::Config, test::kRequiredKeys;

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

TEST_F(Config, LongTextsAreShownShortened) {
  const std::string path = write(kRequiredKeys), text(5000, 'x'), start(100, 'x');

  EXPECT_EQ(mistakes(path, {"train." + text + "=1", "train.max_steps=" + text, text}),
            "--set train." + start.substr(6) + "...: expected a known key, got \"" + start + "...\"; configs/README.md lists the keys\n"
            "--set train.max_steps: expected integer in [1, 1e+09], got \"" + start + "...\"\n"
            "--set " + start + "...: expected KEY=VALUE, got \"" + start + "...\"");
}

}  // namespace
}  // namespace heddle::config
