// Configs that start from a base: its model, and the adapter.

#include "tests/support/config_fixture.h"
#include "tests/support/error_of.h"

namespace heddle::config {
namespace {

namespace fs = std::filesystem;
using test::Config, test::kRequiredKeys;

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

TEST_F(Config, LongTargetsAndPatternsAreShownShortened) {
  const std::string base = make_base(to_yaml(load(write(kRequiredKeys)))), path = write(kFineTune), name(300, 'x'), start(100, 'x');
  const std::string pattern(1000, '('), start_of_pattern(100, '(');

  EXPECT_TRUE(mistakes(path, {"base=" + base, "lora.target_modules=" + name}).ends_with(", got \"" + start + "...\", which is none of them"));
  EXPECT_TRUE(mistakes(path, {"base=" + base, "lora.rank_pattern={" + name + ": 2}"}).ends_with(", got \"" + start + "...\", which fits none"));
  EXPECT_TRUE(mistakes(path, {"base=" + base, "lora.alpha_pattern={'" + pattern + "': 2}"}).ends_with(", got a map holding \"" + start_of_pattern + "...\""));
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
  const RunConfig quantised = load(path, {"base=" + base, "quantize.format=nvfp4"}), plain = load(write(kRequiredKeys));
  EXPECT_EQ(resume_changes(plain, before).refused, std::vector<std::string>{"no section lora, here one"});
  EXPECT_EQ(resume_changes(before, plain).refused, std::vector<std::string>{"a section lora, here none"});
  EXPECT_EQ(resume_changes(before, quantised).refused, std::vector<std::string>{"no section quantize, here one"});
}

// With a base that the run quantises, and with one that is stored so.
TEST_F(Config, ResumeNotesAnotherCompute) {
  const std::string base = make_base(to_yaml(load(write(kRequiredKeys)))), path = write(kFineTune);
  for (const char* quantise : {"quantize.format=nvfp4", "quantize=null"}) {
    const auto changes = [&](const char* was, const char* is) {
      const auto run = [&](const char* compute) { return load(path, {"base=" + base, quantise, std::string("quantize.compute=") + compute}); };
      return resume_changes(run(was), run(is));
    };

    EXPECT_EQ(changes("null", "bf16").noted, std::vector<std::string>{"quantize.compute null, here bf16"}) << quantise;
    EXPECT_EQ(changes("fp8", "null").noted, std::vector<std::string>{"quantize.compute fp8, here null"}) << quantise;
    EXPECT_TRUE(changes("fp8", "bf16").refused.empty()) << quantise;
  }
}

TEST_F(Config, ComputeAloneQuantisesNothing) {
  const std::string base = make_base(to_yaml(load(write(kRequiredKeys)))), path = write(kFineTune);
  const RunConfig run = load(path, {"base=" + base, "quantize.compute=bf16"});

  EXPECT_FALSE(run.quantize);
  EXPECT_EQ(run.compute, QuantCompute::wide);
  EXPECT_TRUE(to_yaml(run).find("quantize:\n  compute: bf16\nbase") != std::string::npos) << to_yaml(run);
  EXPECT_EQ(load(write(to_yaml(run), "own.yaml")), run);
  EXPECT_EQ(mistakes(path, {"base=" + base, "quantize.compute=bf16", "quantize.exclude=[o_proj]"}),
            path + ":1:1: quantize.format: expected one of fp8_e4m3, fp8_e5m2, fp4, mxfp4, nvfp4, got nothing; the key is required");
}

}  // namespace
}  // namespace heddle::config
