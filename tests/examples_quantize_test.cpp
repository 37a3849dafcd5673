#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "nn/atomic_file.h"
#include "nn/posix_file.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tool.h"

// The commands on models whose weights are quantised.

namespace heddle {
namespace {

namespace fs = std::filesystem;
using test::heddle;
using test::Outcome;
using test::train_three_steps;

// The base quantised as the run starts, and once beforehand: the same bytes, so the same losses.
TEST(Tool, TrainsAnAdapterOnAQuantisedBase) {
  const test::TempFolder folder;
  const fs::path base = folder.path() / "base", packed = folder.path() / "packed", merged = folder.path() / "merged";
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  ASSERT_EQ(heddle("quantize --format nvfp4 --model " + base.string() + " --output " + packed.string()).exit_code, 0);
  const auto train = [&](const char* name, const std::string& rest) {
    return heddle(train_three_steps("configs/arithmetic_lora.yaml", folder.path() / name) + " --set base=" + rest);
  };

  const Outcome at_start = train("a", base.string() + " --set quantize.format=nvfp4"), before = train("b", packed.string());
  const Outcome merge = heddle("merge --base " + packed.string() + " --adapter " + (folder.path() / "b").string() + " --output " + merged.string());

  ASSERT_EQ(at_start.exit_code, 0) << at_start.output;
  ASSERT_EQ(before.exit_code, 0) << before.output;
  EXPECT_NE(at_start.output.find(" layers: stored so; products on cpu decode them to float32"), std::string::npos) << at_start.output;
  EXPECT_EQ(nn::read_file(folder.path() / "a/checkpoint-3/adapter_model.safetensors"), nn::read_file(folder.path() / "b/checkpoint-3/adapter_model.safetensors"));
  EXPECT_EQ(merge.exit_code, 0) << merge.output;
  EXPECT_NE(merge.output.find("the base was quantised, the merged weights are not; quantised again they would be off by "), std::string::npos) << merge.output;
  EXPECT_EQ(heddle("generate --prompt 12+34= --max-new-tokens 3 --model " + merged.string()).exit_code, 0);
}

TEST(Tool, AQuantisedBaseIsFrozenAndNotQuantisedAgain) {
  const test::TempFolder folder;
  const std::string base = (folder.path() / "base").string(), packed = (folder.path() / "packed").string();
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  ASSERT_EQ(heddle("quantize --format mxfp4 --model " + base + " --output " + packed).exit_code, 0);
  const auto train = [&](const char* config, const char* rest) {
    return heddle(train_three_steps(config, folder.path() / "run") + " --set base=" + packed + rest);
  };

  const Outcome whole = train("configs/arithmetic.yaml", ""), again = train("configs/arithmetic_lora.yaml", " --set quantize.format=nvfp4");

  EXPECT_EQ(whole.exit_code, 2);
  EXPECT_EQ(whole.output, "heddle: --set base: expected a model that is not quantised, or a section lora beside it: quantised weights are frozen, got \"" +
                              packed + "\"\n");
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_EQ(again.output,
            "heddle: --set quantize.format: expected nothing but quantize.compute beside \"" + packed + "\", which is quantised already, got nvfp4\n");
}

TEST(Tool, ARunWithStochasticRoundingIsResumed) {
  const test::TempFolder folder;
  const std::string base = (folder.path() / "base").string();
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  const std::string train = train_three_steps("configs/arithmetic_lora.yaml", folder.path() / "run") + " --set base=" + base +
                            " --set quantize.format=nvfp4 --set quantize.rounding=stochastic";
  ASSERT_EQ(heddle(train).exit_code, 0);

  const Outcome resumed = heddle(train + " --set train.max_steps=4 --set train.resume_from_checkpoint=auto");

  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_TRUE(fs::exists(folder.path() / "run/checkpoint-4"));
}

// How a machine multiplies is not what a base is: a folder's word on it is not followed, and beside a base that is stored quantised it can be said.
TEST(Tool, EachRunSaysForItselfWhatItMultipliesIn) {
  const test::TempFolder folder;
  const std::string base = (folder.path() / "base").string(), packed = (folder.path() / "packed").string(), config = packed + "/config.yaml";
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  const std::string quantize = "quantize --format nvfp4 --model " + base + " --output " + packed;
  const Outcome asked = heddle(quantize + " --set quantize.compute=fp8");
  ASSERT_EQ(heddle(quantize).exit_code, 0);
  std::string text = nn::read_file(config);
  text.replace(text.find("compute: null"), 13, "compute: fp8");
  nn::write_file(config, text);
  const auto train = [&](const char* rest) {
    return heddle(train_three_steps("configs/arithmetic_lora.yaml", folder.path() / "run") + " --set device=cpu --set base=" + packed + rest);
  };

  const Outcome generated = heddle("generate --prompt 12+34= --max-new-tokens 3 --device cpu --model " + packed);
  const Outcome wide = train(" --set quantize.compute=bf16"), narrow = train(" --set quantize.compute=fp8 --set train.cuda_graph=true");

  EXPECT_EQ(asked.exit_code, 2);
  EXPECT_EQ(asked.output, "heddle: --set quantize.compute: expected null: nothing is multiplied here, and each run that uses the folder has its own, got fp8\n");
  EXPECT_EQ(generated.exit_code, 0) << generated.output;
  EXPECT_NE(generated.output.find("heddle: not used: quantize.compute fp8 in " + config + ", which says how another run multiplied\n"), std::string::npos)
      << generated.output;
  EXPECT_EQ(wide.exit_code, 0) << wide.output;
  EXPECT_EQ(narrow.exit_code, 2);
  EXPECT_EQ(narrow.output, "heddle: --set quantize.compute: expected bf16 or null, as float32 is not multiplied in FP8 with nvfp4 [128, 512] on cpu, got fp8\n"
                           "--set train.cuda_graph: expected false on the CPU, got true\n");
}

// Before data and base are read, at its place in the file.
TEST(Tool, Fp8ThatCannotBeIsAmongTheMistakes) {
  const test::TempFolder folder;
  const std::string base = (folder.path() / "base").string(), config = (folder.path() / "config.yaml").string();
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  nn::write_file(config, "quantize:\n  format: fp8_e4m3\n  compute: fp8\n" + nn::read_file(fs::path(HEDDLE_SOURCE_DIR) / "configs/arithmetic_lora.yaml"));

  const Outcome outcome = heddle("train " + config + " --set device=cpu --set base=" + base + " --set data.source=text --set data.files=[no/such]");
  const Outcome plain = heddle("train configs/arithmetic_lora.yaml --set quantize.compute=bf16 --set base=" + base);

  EXPECT_TRUE(outcome.output.starts_with("heddle: " + config + ":3:12: quantize.compute: expected bf16 or null, as float32 is not multiplied in FP8 with fp8_e4m3 ["))
      << outcome.output;
  EXPECT_NE(outcome.output.find("--set data.files: "), std::string::npos) << outcome.output;
  EXPECT_EQ(plain.output, "heddle: --set quantize.compute: expected quantize.format beside it, or a base that is quantised, got bf16\n");
}

// The plain base and the adapter are enough: the base is quantised as it was in training, from what was kept then.
TEST(Tool, UsesAnAdapterOfABaseThatTrainingQuantised) {
  const test::TempFolder folder;
  const std::string base = (folder.path() / "base").string();
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  for (const char* format : {"nvfp4", "fp4"}) {
    const std::string run = (folder.path() / format).string(), merged = (folder.path() / "merged").string() + format;
    const Outcome train = heddle(train_three_steps("configs/arithmetic_lora.yaml", run) + " --set base=" + base + " --set quantize.format=" + format);
    const Outcome text = heddle("generate --prompt 12+34= --max-new-tokens 3 --model " + base + " --adapter " + run);
    const Outcome merge = heddle("merge --base " + base + " --adapter " + run + " --output " + merged);

    ASSERT_EQ(train.exit_code, 0) << train.output;
    EXPECT_NE(train.output.find("model: 468480 parameters, 36864 of them trainable (7.87 %), 393216 quantised\n"), std::string::npos) << train.output;
    EXPECT_EQ(text.exit_code, 0) << text.output;
    EXPECT_EQ(text.output.find("quantised weights of an earlier run") != std::string::npos, format == std::string("nvfp4")) << text.output;
    EXPECT_EQ(merge.exit_code, 0) << merge.output;
    EXPECT_NE(merge.output.find("rounded to bfloat16"), std::string::npos) << merge.output;
  }
}

TEST(Tool, AnAdapterOfAnotherModelIsRefusedBeforeItsBaseIsQuantised) {
  const test::TempFolder folder;
  const std::string base = (folder.path() / "base").string(), other = (folder.path() / "other").string(), run = (folder.path() / "run").string();
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", other) + " --set model.num_hidden_layers=1").exit_code, 0);
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic_lora.yaml", run) + " --set base=" + base + " --set quantize.format=fp4").exit_code, 0);

  const Outcome outcome = heddle("generate --prompt 12+34= --model " + other + " --adapter " + run);

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.output, "heddle: " + run + "/checkpoint-3 was trained on another model than " + other +
                                "/checkpoint-3: model.num_hidden_layers 2, here 1\n");
}

TEST(Tool, QuantisesAModelThatThenGenerates) {
  const test::TempFolder folder;
  const std::string model = (folder.path() / "run").string(), out = (folder.path() / "nvfp4").string();
  ASSERT_EQ(heddle(train_three_steps("configs/tiny_llama.yaml", model)).exit_code, 0);

  const Outcome outcome = heddle("quantize --model " + model + " --format nvfp4 --output " + out + " --exclude layers.0.mlp.*");

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* name : {"model.safetensors", "config.json", "config.yaml", "report.json", "report.svg"}) EXPECT_TRUE(fs::exists(fs::path(out) / name)) << name;
  EXPECT_NE(outcome.output.find("kept as it is: model.layers.0.mlp.down_proj"), std::string::npos) << outcome.output;
  const Outcome text = heddle("generate --model " + out + " --prompt Tensor --max-new-tokens 4");
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_NE(text.output.find(" layers: stored so; products on cpu decode them to float32"), std::string::npos) << text.output;
  EXPECT_EQ(heddle("quantize --model " + out + " --compare").exit_code, 2);
}

TEST(Tool, QuantisesStochasticallyAsTheSeedSays) {
  const test::TempFolder folder;
  const std::string model = (folder.path() / "run").string();
  ASSERT_EQ(heddle(train_three_steps("configs/tiny.yaml", model)).exit_code, 0);
  const auto quantise = [&](const char* name, const std::string& rest) {
    return heddle("quantize --model " + model + " --format mxfp4 --output " + (folder.path() / name).string() + rest);
  };
  const auto file = [&](const char* name) { return nn::read_file(folder.path() / name); };
  for (const auto& [name, seed] : {std::pair{"a", "3"}, std::pair{"b", "3"}, std::pair{"c", "4"}}) {
    const Outcome outcome = quantise(name, std::string(" --rounding stochastic --seed ") + seed);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  }
  const Outcome alone = quantise("d", " --seed 3");

  EXPECT_TRUE(file("a/model.safetensors") == file("b/model.safetensors"));
  EXPECT_FALSE(file("a/model.safetensors") == file("c/model.safetensors"));
  EXPECT_NE(file("c/report.json").find("\"rounding\": \"stochastic\",\n  \"seed\": 4,"), std::string::npos) << file("c/report.json");
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_EQ(alone.output, "heddle: --set quantize.seed: expected null beside quantize.rounding (nearest, the default), got 3\n");
}

TEST(Tool, QuantisesIntoANewFolderOnly) {
  const test::TempFolder folder;
  const std::string model = (folder.path() / "run").string();
  ASSERT_EQ(heddle(train_three_steps("configs/tiny.yaml", model)).exit_code, 0);

  for (const std::string& output : {model, std::string("''")}) {
    const Outcome outcome = heddle("quantize --model " + model + " --format nvfp4 --output " + output);

    EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
    EXPECT_NE(outcome.output.find("--output: expected a folder that does not exist yet, got \""), std::string::npos) << outcome.output;
  }
  EXPECT_TRUE(fs::exists(fs::path(model) / "best.json") || fs::exists(fs::path(model) / "metrics.jsonl"));
}

// Nothing is read or quantised first.
TEST(Tool, SaysBeforeQuantisingWhatItCannotDo) {
  const test::TempFolder folder;
  const std::string model = (folder.path() / "run").string(), out = (folder.path() / "no/such").string();
  ASSERT_EQ(heddle(train_three_steps("configs/tiny.yaml", model)).exit_code, 0);
  const auto output_of = [&](const std::string& arguments) { return heddle("quantize --model " + model + " " + arguments).output; };

  EXPECT_EQ(output_of("--format fp4 --output " + out),
            "heddle: --set quantize.format: expected one that files have a layout for (fp8_e4m3, mxfp4 or nvfp4), got fp4\n");
  EXPECT_EQ(heddle("quantize --format fp8_e5m2 --model " + model + " --output " + out).exit_code, 2);
  EXPECT_EQ(output_of("--format nvfp4 --output " + out),
            "heddle: cannot write " + out + ": the folder " + (folder.path() / "no").string() + " does not exist; create it first\n");
  EXPECT_EQ(output_of("--compare --set quantize.format=nvfp4"),
            "heddle: quantize: --compare shows every form of every format; leave out --set quantize.format=nvfp4\n");
  EXPECT_EQ(output_of("--format nvfp4 --output " + out + " --set train.seed=5"), "heddle: quantize: --set takes quantize.key=value, got train.seed=5\n");
  const std::string bytes = output_of("--compare --exclude \"$(printf 'a\\377')\"");
  EXPECT_NE(bytes.find(", got \"a\\\\xFF\"\n"), std::string::npos) << bytes;
}

TEST(Tool, ComparesWhatFormatsCost) {
  const test::TempFolder folder;
  ASSERT_EQ(heddle(train_three_steps("configs/tiny.yaml", folder.path())).exit_code, 0);

  const Outcome outcome = heddle("quantize --compare --model " + folder.path().string());

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* name : {"fp8_e4m3, scale a channel", "fp8_e5m2, scale a tensor", "fp4 ", "mxfp4, ceil", "nvfp4, nearest", "nvfp4, mse"})
    EXPECT_NE(outcome.output.find(name), std::string::npos) << name << " in " << outcome.output;
}

}  // namespace
}  // namespace heddle
