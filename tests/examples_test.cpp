#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "autograd/random.h"
#include "nn/posix_file.h"
#include "nn/safetensors.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tool.h"

// The command-line tool as a user runs it: every command, every shipped config, every exit code.

namespace heddle {
namespace {

namespace fs = std::filesystem;
using test::heddle;
using test::Outcome;
using test::run;
using test::train_three_steps;

class ShippedConfig : public testing::TestWithParam<std::string> {};

TEST_P(ShippedConfig, TrainsAndLeavesACompleteRun) {
  const test::TempFolder folder;

  const Outcome outcome = heddle(train_three_steps("configs/" + GetParam() + ".yaml", folder.path() / "run"));

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* name : {"config.yaml", "metrics.jsonl", "loss.svg", "sample.txt", "checkpoint-3/model.safetensors",
                           "checkpoint-3/optimizer.safetensors", "checkpoint-3/trainer_state.json", "checkpoint-3/config.yaml"})
    EXPECT_TRUE(fs::exists(folder.path() / "run" / name)) << name;
  const std::string metrics = nn::read_file(folder.path() / "run/metrics.jsonl");
  for (const char* key : {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_ms", "eval_loss"})
    EXPECT_NE(metrics.find('"' + std::string(key) + "\":"), std::string::npos) << key << " in " << metrics;
  EXPECT_EQ(metrics.find("eval_exact_match") != std::string::npos, GetParam() == "arithmetic");
}

INSTANTIATE_TEST_SUITE_P(Examples, ShippedConfig, testing::Values("tiny", "tiny_llama", "arithmetic"),
                         [](const auto& info) { return info.param; });

TEST(Tool, GeneratesTheSameTextFromTheSameSeed) {
  const test::TempFolder folder;
  ASSERT_EQ(heddle(train_three_steps("configs/tiny.yaml", folder.path() / "run")).exit_code, 0);
  const std::string command = "generate --model " + (folder.path() / "run").string() + " --prompt Tensor --max-new-tokens 8 --seed 3";

  const Outcome first = heddle(command), second = heddle(command);

  EXPECT_EQ(first.exit_code, 0) << first.output;
  EXPECT_EQ(first.output.substr(0, 6), "Tensor");
  EXPECT_EQ(first.output, second.output);
}

class FineTuning : public testing::TestWithParam<std::string> {};

TEST_P(FineTuning, TrainsResumesGeneratesFromAndMergesAnAdapter) {
  const test::TempFolder folder;
  const fs::path base = folder.path() / "base", run = folder.path() / "run", merged = folder.path() / "merged";
  ASSERT_EQ(heddle(train_three_steps("configs/" + GetParam() + ".yaml", base)).exit_code, 0);
  const std::string train = train_three_steps("configs/" + GetParam() + "_lora.yaml", run) + " --set base=" + base.string();

  const Outcome trained = heddle(train);
  const Outcome resumed = heddle(train + " --set train.max_steps=4 --set train.resume_from_checkpoint=auto");
  const std::string end = " --prompt 12+34= --max-new-tokens 8 --seed 3";
  const Outcome adapted = heddle("generate --model " + base.string() + " --adapter " + run.string() + end);
  const Outcome merge = heddle("merge --base " + base.string() + " --adapter " + run.string() + " --output " + merged.string());
  const Outcome generated = heddle("generate --model " + merged.string() + end);
  const Outcome again = heddle("merge --base " + base.string() + " --adapter " + run.string() + " --output " + merged.string());

  ASSERT_EQ(trained.exit_code, 0) << trained.output;
  EXPECT_NE(trained.output.find(" %)\n"), std::string::npos) << trained.output;  // "..., N of them trainable (P %)"
  for (const char* name : {"loss.svg", "checkpoint-3/adapter_model.safetensors", "checkpoint-3/adapter_config.json"})
    EXPECT_TRUE(fs::exists(run / name)) << name;
  EXPECT_FALSE(fs::exists(run / "checkpoint-3/model.safetensors"));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("resuming from " + (run / "checkpoint-3").string() + ", step 3"), std::string::npos) << resumed.output;
  EXPECT_EQ(adapted.exit_code, 0) << adapted.output;
  EXPECT_EQ(merge.exit_code, 0) << merge.output;
  EXPECT_NE(merge.output.find(": summed in float32, rounded to float32, to nearest even\n"), std::string::npos) << merge.output;
  EXPECT_EQ(generated.exit_code, 0) << generated.output;
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_EQ(again.output, "--output: expected a folder that does not exist yet, got \"" + merged.string() + "\"\nRun with --help for more information.\n");
}

INSTANTIATE_TEST_SUITE_P(Examples, FineTuning, testing::Values("tiny", "arithmetic"), [](const auto& info) { return info.param; });

TEST(Tool, AdapterIsResumedOnABaseThatWasMoved) {
  const test::TempFolder folder;
  const fs::path base = folder.path() / "base", moved = folder.path() / "moved", run = folder.path() / "run";
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  const std::string train = train_three_steps("configs/arithmetic_lora.yaml", run) + " --set base=";
  ASSERT_EQ(heddle(train + base.string()).exit_code, 0);
  fs::rename(base, moved);

  const Outcome resumed = heddle(train + moved.string() + " --set train.max_steps=4 --set train.resume_from_checkpoint=auto");

  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("has base \"" + base.string() + "\", here \"" + moved.string() + "\"\n"), std::string::npos) << resumed.output;
}

TEST(Tool, RunDoesNotWriteIntoItsBase) {
  const test::TempFolder folder;
  const fs::path base = folder.path() / "base", link = folder.path() / "link";
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  fs::create_directory_symlink(base, link);

  for (const fs::path& output : {base, base / "", link, base / "checkpoint-3/run", folder.path()}) {
    const Outcome outcome = heddle(train_three_steps("configs/arithmetic_lora.yaml", output) + " --set base=" + base.string());
    EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
    EXPECT_EQ(outcome.output, "heddle: --set train.output_dir: expected a folder neither in the base's nor around it, got \"" + output.string() +
                                  "\", with base \"" + base.string() + "\"\n");
  }
  EXPECT_TRUE(fs::exists(base / "checkpoint-3"));
}

TEST(Tool, AnAdapterIsNotTrainedInFp8) {
  const test::TempFolder folder;
  const fs::path base = folder.path() / "base";
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);

  const Outcome outcome = heddle(train_three_steps("configs/arithmetic_lora.yaml", folder.path() / "run") + " --set base=" + base.string() +
                                 " --set train.precision=fp8");

  EXPECT_EQ(outcome.output, "heddle: --set train.precision: expected bf16 beside lora: a frozen base is multiplied in FP8 by quantize.format fp8_e4m3, got fp8\n");
}

TEST(Tool, GraphOptionWritesTheGraphAndTrainsNothing) {
  const test::TempFolder folder;
  const fs::path graph = folder.path() / "out.dot";

  const Outcome outcome = heddle(train_three_steps("configs/tiny.yaml", folder.path() / "run") + " --graph " + graph.string());

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::string dot = nn::read_file(graph);
  EXPECT_EQ(dot.substr(0, 16), "digraph heddle {");
  EXPECT_NE(dot.find("model.layers.3.self_attn.o_proj.weight"), std::string::npos);
  EXPECT_FALSE(fs::exists(folder.path() / "run"));
}

TEST(Tool, AttentionWritesOutputsAndGradients) {
  const test::TempFolder folder;
  Generator generator{.seed = 5};
  nn::write_safetensors(folder.path() / "in.safetensors", {{"q", normal({2, 5, 6, 8}, 0, 1, generator)},
                                                           {"k", normal({2, 7, 2, 8}, 0, 1, generator)},
                                                           {"v", normal({2, 7, 2, 8}, 0, 1, generator)},
                                                           {"do", normal({2, 5, 6, 8}, 0, 1, generator)}});
  const fs::path out = folder.path() / "out.safetensors";

  const Outcome outcome =
      heddle("attention --causal --input " + (folder.path() / "in.safetensors").string() + " --output " + out.string());

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const nn::SafetensorsFile file(out);
  EXPECT_EQ(file.names(), (std::vector<std::string>{"dk", "dq", "dv", "lse", "o"}));
  EXPECT_EQ(file.info("lse").shape, (Shape{2, 6, 5}));
  EXPECT_EQ(file.info("dk").shape, (Shape{2, 7, 2, 8}));
}

TEST(Tool, GradcheckReportsEachCaseAndSucceeds) {
  const Outcome outcome = heddle("gradcheck --only softmax");

  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_NE(outcome.output.find(" passed, 0 failed"), std::string::npos) << outcome.output;
}

TEST(Tool, BenchAttentionTimesBothPassesAndWritesThem) {
  const test::TempFolder folder;
  const std::string json = (folder.path() / "bench.json").string();

  const Outcome outcome = heddle("bench-attention --device cpu --dtype float32 --batch 1 --heads 2 --kv-heads 1 --seq 70 --head-dim 8 "
                                 "--causal --json " + json);

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::string written = nn::read_file(json);
  for (const char* key : {"\"fwd\"", "\"bwd\"", "\"median_ms\"", "\"tflops\"", "\"gemm_tflops\"", "\"skipped\""})
    EXPECT_NE(written.find(key), std::string::npos) << key << " in " << written;
  EXPECT_NE(written.find("\"deterministic\": false"), std::string::npos) << written;
}

TEST(Tool, BenchAttentionSaysIfItsKernelsAreDeterministic) {
  const test::TempFolder folder;
  const std::string json = (folder.path() / "bench.json").string();

  const Outcome outcome = heddle("bench-attention --device cpu --dtype float32 --batch 1 --heads 1 --seq 8 --head-dim 8 --pass bwd --runs 10 "
                                 "--ceiling 1 --deterministic --json " + json);

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_NE(outcome.output.find(", deterministic; "), std::string::npos) << outcome.output;
  EXPECT_NE(nn::read_file(json).find("\"deterministic\": true"), std::string::npos);
}

TEST(Tool, BenchTrainCountsTheWorkOfQuantisedWeights) {
  const test::TempFolder folder;
  const std::string base = (folder.path() / "base").string();
  ASSERT_EQ(heddle(train_three_steps("configs/arithmetic.yaml", base)).exit_code, 0);
  const auto work_of = [&](const std::string& rest) {
    const std::string output = heddle("bench-train configs/arithmetic_lora.yaml --set device=cpu --steps 1 --warmup 1 --set base=" + base + rest).output;
    const std::size_t end = output.find(" MFLOP a token");
    return end == std::string::npos ? output : output.substr(output.rfind('\n', end), end - output.rfind('\n', end));
  };

  EXPECT_EQ(work_of(" --set quantize.format=fp4"), work_of(""));
}

// Rows of arithmetic are as long as a problem.
TEST(Tool, BenchTrainCountsTheWorkOfTheRowsThereAre) {
  const auto work_of = [](const std::string& length) {
    const std::string output = heddle("bench-train configs/arithmetic.yaml --set device=cpu --set train.micro_batch_size=1 --steps 1 --warmup 1 "
                                      "--set data.sequence_length=" + length).output;
    return output.substr(output.find("        "), output.find(" MFLOP") - output.find("        "));
  };

  EXPECT_EQ(work_of("16"), work_of("12"));
}

TEST(Tool, BenchTrainReportsTheStepAndKeepsNothing) {
  const test::TempFolder folder;
  const fs::path run_folder = folder.path() / "run", json = folder.path() / "bench.json";

  const Outcome outcome = heddle("bench-train configs/tiny.yaml --set device=cpu --set train.micro_batch_size=1 --steps 2 --warmup 1 --set "
                                 "train.output_dir=" + run_folder.string() + " --json " + json.string());

  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* text : {"steps/s", "tokens/s", "TFLOP/s", "GiB at the peak"})
    EXPECT_NE(outcome.output.find(text), std::string::npos) << text << " in " << outcome.output;
  EXPECT_NE(nn::read_file(json).find("\"tokens_per_second\""), std::string::npos);
  EXPECT_FALSE(fs::exists(run_folder));
}

TEST(Tool, EveryHelpHasAnExample) {
  for (const char* command : {"", "train", "generate", "merge", "quantize", "gradcheck", "attention", "bench-attention", "bench-train"}) {
    const Outcome outcome = heddle(std::string(command) + " --help");
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_NE(outcome.output.find("Example: heddle "), std::string::npos) << outcome.output;
  }
}

TEST(Tool, UsageAndConfigErrorsExitWithTwo) {
  for (const char* arguments :
       {"", "fly", "train", "train no/such.yaml", "train configs/tiny.yaml --set train.max_step=3",
        "train configs/tiny.yaml --set attention.kernel=warp", "train configs/tiny.yaml --set device=tpu",
        "train configs/tiny.yaml --set data.files=[no/such]", "train configs/tiny.yaml --set train.resume_from_checkpoint=no/such",
        "train configs/tiny.yaml --set data.validation_fraction=1e-9", "train configs/tiny.yaml --set device=cpu --set train.cuda_graph=true", "train configs/tiny.yaml --set train.micro_batch_size=99999999999",
        "generate --model runs --prompt ''", "generate --model runs --prompt x --seed -1", "gradcheck --only zzz",
        "generate --model runs --prompt x --seed 99999999999999999999", "generate --model runs --prompt x --top-k 99999999999999999999",
        "attention --input a --output b --scale 0", "attention --input a --output b --scale nan", "attention --input a --output b --device tpu",
        "attention --input README.md --output ./README.md", "attention --input '' --output b", "attention --input a --output ''",
        "bench-attention --device cpu --seq 8 --batch 1 --json no/such/folder/x.json", "bench-train configs/tiny.yaml --json ''", "merge --base runs --adapter runs --output tests",
        "merge --base runs --adapter runs --output ''", "generate --model runs --prompt x --adapter ''",
        "quantize --model runs --format fp4 --output ''", "bench-attention --preset short", "bench-attention --kernel warp", "bench-train", "bench-train no/such.yaml"})
    EXPECT_EQ(heddle(arguments).exit_code, 2) << arguments;
}

TEST(Tool, UsageErrorsNameWhatIsWrong) {
  EXPECT_EQ(heddle("fly").output, "heddle: there is no command 'fly'; heddle --help lists them\n");
  EXPECT_EQ(heddle("--versoin").output, "heddle: there is no option '--versoin'; heddle --help lists them\n");
  EXPECT_NE(heddle("attention --input a --output b --scale 0").output.find("expected number > 0, got \"0\""), std::string::npos);
  for (const char* command : {"generate --model a --prompt b", "attention --input a --output b", "quantize --model a", "bench-attention"})
    EXPECT_EQ(heddle(std::string(command) + " --device gpu").output,
              "--device: expected auto, cpu, cuda or cuda:N, got \"gpu\"\nRun with --help for more information.\n");
}

TEST(Tool, RunTimeFailuresExitWithOne) {
  EXPECT_EQ(heddle("generate --model no/such/run --prompt x").exit_code, 1);
  EXPECT_EQ(heddle("attention --input no/such.safetensors --output /tmp/x").exit_code, 1);
  EXPECT_EQ(heddle("bench-attention --device cpu --dtype float32 --seq 8 --batch 1 --runs 1 --ceiling 1 --json /dev/full").exit_code, 2);
  EXPECT_EQ(heddle("gradcheck --only softmax >/dev/full").exit_code, 1);
  EXPECT_EQ(heddle("--help >/dev/full").exit_code, 1);
}

TEST(Tool, AFileThatCannotGrowIsAFailureWithAReason) {
  const test::TempFolder folder;
  const std::string json = (folder.path() / "bench.json").string();

  const Outcome outcome = run("ulimit -f 0; " HEDDLE_BINARY " bench-attention --device cpu --dtype float32 --batch 1 --heads 1 --seq 8 --head-dim 8 "
                              "--pass fwd --runs 1 --ceiling 1 --json " + json);

  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_NE(outcome.output.find("heddle: cannot write " + json + ": File too large\n"), std::string::npos) << outcome.output;
  EXPECT_FALSE(fs::exists(json));
}

TEST(Tool, MoreThreadsThanCoresAreNotStarted) {
  const Outcome outcome = run("OMP_NUM_THREADS=100000 " HEDDLE_BINARY " gradcheck --only softmax");

  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.output.find("heddle: OMP_NUM_THREADS asks for 100000 threads; using "), 0u) << outcome.output;
}

TEST(Tool, AThreadCountThatIsNoneIsNamed) {
  const auto version = [](const std::string& count) { return run("OMP_NUM_THREADS='" + count + "' " HEDDLE_BINARY " --version"); };
  for (const char* count : {"abc", "0", "-1", "4x", " ", "2,x", "2,,1", "2,", "99999999999"}) {
    const Outcome outcome = version(count);

    EXPECT_EQ(outcome.exit_code, 2) << count;
    EXPECT_EQ(outcome.output, std::string("heddle: OMP_NUM_THREADS: expected integers in [1, 2147483647] with commas between, got \"") + count + "\"\n");
  }
  for (const char* count : {"1", "1,2", " 1\t, 2 ", ""}) EXPECT_EQ(version(count).exit_code, 0) << count;
}

TEST(Tool, EmptyPathsOfTrainingAreNamed) {
  const Outcome config = heddle("train ''"), graph = heddle("train configs/tiny.yaml --graph ''");

  EXPECT_EQ(config.exit_code, 2);
  EXPECT_NE(config.output.find("config: expected a path, got \"\""), std::string::npos) << config.output;
  EXPECT_EQ(graph.exit_code, 2);
  EXPECT_NE(graph.output.find("--graph: expected a path, got \"\""), std::string::npos) << graph.output;
}

TEST(Tool, MistakesOutsideTheFileAreReportedTogether) {
  const Outcome outcome = heddle("train configs/tiny.yaml --set data.files=[no/such] --set attention.kernel=warp --set device=cuda:99"
                                 " --set train.resume_from_checkpoint=no/such --set train.seed=-1");

  for (const char* start : {"--set data.files: expected patterns that each match a file in ", "--set attention.kernel: expected one of auto, ",
                            "--set device: expected a device that can be used, got cuda:99 ", "--set train.seed: expected integer >= 0, got -1"})
    EXPECT_NE(outcome.output.find(start), std::string::npos) << start << outcome.output;
}

TEST(Tool, TrainingInFp8IsRefusedWhereItCannotRun) {
  const Outcome on_cpu = heddle("train configs/tiny.yaml --set device=cpu --set train.precision=fp8");

  EXPECT_EQ(on_cpu.exit_code, 2);
  EXPECT_EQ(on_cpu.output, "heddle: --set train.precision: expected bf16 or fp32 (FP8 products need a GPU of compute capability 8.9 or higher), got fp8\n");
}

// A config of the user's own beside the output of its run.
TEST(Tool, ConfigFileInItsOwnOutputFolderIsNotReplaced) {
  const test::TempFolder folder;
  const fs::path config = folder.path() / "config.yaml";
  std::ofstream(config) << "# mine\n" << nn::read_file(fs::path(HEDDLE_SOURCE_DIR) / "configs/tiny.yaml");
  const std::string before = nn::read_file(config);

  const Outcome outcome = heddle(train_three_steps(config.string(), folder.path()));

  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_NE(outcome.output.find("--set train.output_dir: expected another folder than the config file's"), std::string::npos);
  EXPECT_EQ(nn::read_file(config), before);
}

TEST(Tool, LargerVocabularyThanBytesTrainsAndSamples) {
  const test::TempFolder folder;
  const fs::path run_folder = folder.path() / "run";

  const Outcome trained = heddle(train_three_steps("configs/tiny.yaml", run_folder) + " --set model.vocab_size=300");
  const Outcome generated = heddle("generate --model " + run_folder.string() + " --prompt x --max-new-tokens 40 --temperature 9");

  EXPECT_EQ(trained.exit_code, 0) << trained.output;
  EXPECT_EQ(generated.exit_code, 0) << generated.output;
}

TEST(Tool, ResumeRefusesAnotherModelAndWarnsOfAnotherCourse) {
  const test::TempFolder folder;
  const std::string train = train_three_steps("configs/tiny.yaml", folder.path() / "run");
  ASSERT_EQ(heddle(train).exit_code, 0);
  const std::string resume = train + " --set train.resume_from_checkpoint=auto --set train.max_steps=4";

  const Outcome other_model = heddle(resume + " --set model.layer_norm_epsilon=0.1");
  const Outcome other_seed = heddle(resume + " --set train.seed=5");

  const std::string checkpoint = (folder.path() / "run/checkpoint-3").string();
  EXPECT_EQ(other_model.exit_code, 2);
  EXPECT_EQ(other_model.output, "heddle: --set train.resume_from_checkpoint: expected a checkpoint of the same model, got " + checkpoint +
                                    ", which has model.layer_norm_epsilon 1e-05, here 0.1\n");
  EXPECT_EQ(other_seed.exit_code, 0) << other_seed.output;
  for (const char* change : {"train.seed 1337, here 5\n", "train.max_steps 3, here 4\n"})
    EXPECT_NE(other_seed.output.find("warning: " + checkpoint + " has " + change), std::string::npos) << other_seed.output;
}

TEST(Tool, FirstInterruptSavesAndPrintsACommandThatResumes) {
  const test::TempFolder folder;
  const fs::path run_folder = folder.path() / "run";
  // The shell sends SIGINT to the trainer once metrics.jsonl shows that it is under way.
  const Outcome outcome = run(HEDDLE_BINARY " " + train_three_steps("configs/tiny.yaml", run_folder) +
                              " --set train.max_steps=100000 & pid=$!; while kill -0 $pid && ! grep -q step " +
                              (run_folder / "metrics.jsonl").string() + " 2>/dev/null; do sleep 0.05; done; kill -INT $pid; wait $pid");

  EXPECT_EQ(outcome.exit_code, 130) << outcome.output;
  const std::string printed = outcome.output.substr(outcome.output.rfind(HEDDLE_BINARY));
  const std::string step = outcome.output.substr(outcome.output.find("interrupted after step ") + 23);
  const Outcome resumed = run(printed.substr(0, printed.find('\n')) + " --set train.max_steps=" + std::to_string(std::stoi(step) + 1));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("resuming from " + run_folder.string()), std::string::npos) << resumed.output;
  const Outcome generated = heddle("generate --model " + run_folder.string() + " --prompt x --max-new-tokens 1");
  EXPECT_EQ(generated.exit_code, 0) << generated.output;
}

}  // namespace
}  // namespace heddle
