#include "nn/checkpoint.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

#include "autograd/grad_mode.h"
#include "kernels/runtime/parallel.h"
#include "nn/atomic_file.h"
#include "nn/safetensors.h"
#include "nn/trainer.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"
#include "tests/support/window.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;
using test::accumulate_window;
using test::error_of;
using test::TempFolder;
using test::tiny_config;
using test::tiny_model;
using test::values_of;
using test::WindowLoss;

AdamW make_optimizer(const CausalLM& model) { return AdamW(model.trainable_parameters(), {}); }

void take_step(const CausalLM& model, AdamW& optimizer) {
  const Batch batch = test::TinyData().train_batch(optimizer.updates(), 2);
  const WindowLoss loss = accumulate_window(model, {&batch, 1}, nullptr);
  optimizer.update({.learning_rate = 1e-2, .grad_scale = 1 / static_cast<double>(loss.labels)});
  optimizer.zero_grad();
}

fs::path save(const fs::path& folder, const CausalLM& model, const AdamW& optimizer, const TrainerState& state) {
  return save_checkpoint(folder, model, optimizer, state, "train: {}\n");
}

std::vector<std::int64_t> steps_in(const fs::path& folder) {
  std::vector<std::int64_t> out;
  for (const Checkpoint& checkpoint : find_checkpoints(folder)) out.push_back(checkpoint.state.step);
  return out;
}

// A folder with checkpoints of these steps.
struct SavedRun {
  explicit SavedRun(const std::vector<std::int64_t>& steps, std::int64_t best = 0) {
    for (const std::int64_t step : steps)
      save(folder.path(), model, optimizer,
           {.step = step, .best_eval_loss = best > 0 && step >= best ? std::optional(1.5) : std::nullopt, .best_step = step >= best ? best : 0});
  }

  TempFolder folder;
  CausalLM model = tiny_model(tiny_config());
  AdamW optimizer = make_optimizer(model);
};

TEST(Checkpoint, RestoresEverythingBitForBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const TempFolder folder;
    const CausalLM model = tiny_model(tiny_config(Architecture::llama), 1, dtype);
    AdamW optimizer = make_optimizer(model);
    for (int i = 0; i < 3; ++i) take_step(model, optimizer);
    const TrainerState state{.step = 7, .tokens = 1234567890123, .examples = 99, .data = "data \"quoted\"",
                             .dropout = {std::numeric_limits<std::uint64_t>::max(), 42}, .best_eval_loss = 0.1, .best_step = 5};
    const fs::path saved = save(folder.path(), model, optimizer, state);

    const CausalLM other = tiny_model(tiny_config(Architecture::llama), 2, dtype);
    AdamW other_optimizer = make_optimizer(other);
    const TrainerState loaded = load_checkpoint(saved, other, other_optimizer);

    EXPECT_EQ(saved.filename(), "checkpoint-7");
    EXPECT_EQ(values_of(other.parameters()), values_of(model.parameters()));
    EXPECT_EQ(values_of(other_optimizer.state()), values_of(optimizer.state()));
    EXPECT_EQ(other_optimizer.updates(), 3);
    EXPECT_EQ(loaded.step, 7);
    EXPECT_EQ(loaded.tokens, 1234567890123);
    EXPECT_EQ(loaded.examples, 99);
    EXPECT_EQ(loaded.data, "data \"quoted\"");
    EXPECT_EQ(loaded.dropout.seed, std::numeric_limits<std::uint64_t>::max());
    EXPECT_EQ(loaded.dropout.offset, 42u);
    EXPECT_EQ(loaded.best_eval_loss, 0.1);
    EXPECT_EQ(loaded.best_step, 5);
  }
}

TEST(Checkpoint, HoldsFourFiles) {
  const SavedRun run({3});
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(run.folder / "checkpoint-3")) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());

  EXPECT_EQ(names, (std::vector<std::string>{"config.yaml", "model.safetensors", "optimizer.safetensors", "trainer_state.json"}));
}

TEST(Checkpoint, MisfitsAreListedTogetherAndNothingIsLoaded) {
  const TempFolder folder;
  const CausalLM source = tiny_model(tiny_config());
  const AdamW source_optimizer = make_optimizer(source);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const NamedTensor& parameter : source.parameters()) {
    if (parameter.name == "model.norm.bias") continue;
    const bool is_misshapen = parameter.name == "model.norm.weight";
    tensors.emplace_back(parameter.name, is_misshapen ? Tensor::zeros({3}) : parameter.tensor);
  }
  tensors.emplace_back("extra", Tensor::zeros({1}));
  write_safetensors(folder / "model.safetensors", tensors);
  const CausalLM model = tiny_model(tiny_config(), 2);
  const auto before = values_of(model.parameters());

  const std::string message = error_of([&] { load_weights(folder.path(), model); });

  EXPECT_EQ(message, folder.path().string() +
                         " does not fit this model; nothing was loaded:"
                         "\n  model.safetensors: model.norm.weight is float32 [3], expected float32 [12]"
                         "\n  model.safetensors: missing model.norm.bias, float32 [12]"
                         "\n  model.safetensors: unexpected extra");
  EXPECT_EQ(values_of(model.parameters()), before);
}

TEST(Checkpoint, MissingMomentIsAnErrorAndWeightsStay) {
  const SavedRun run({3});
  std::vector<std::pair<std::string, Tensor>> moments;
  for (const NamedTensor& named : run.optimizer.state())
    if (named.name != "step") moments.emplace_back(named.name, named.tensor);
  write_safetensors(run.folder / "checkpoint-3/optimizer.safetensors", moments);
  const CausalLM model = tiny_model(tiny_config(), 2);
  const AdamW optimizer = make_optimizer(model);
  const auto before = values_of(model.parameters());

  const std::string message = error_of([&] { load_checkpoint(run.folder / "checkpoint-3", model, optimizer); });

  EXPECT_NE(message.find("optimizer.safetensors: missing step, int64 []"), std::string::npos) << message;
  EXPECT_EQ(values_of(model.parameters()), before);
}

TEST(Checkpoint, WeightsThatAreNotFiniteAreRefused) {
  const TempFolder folder;
  const CausalLM source = tiny_model(tiny_config()), model = tiny_model(tiny_config(), 2);
  {
    const NoGradGuard no_grad;
    source.parameters().back().tensor.fill_(std::nan(""));
  }
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const NamedTensor& parameter : source.parameters()) tensors.emplace_back(parameter.name, parameter.tensor);
  write_safetensors(folder / "model.safetensors", tensors);
  const auto before = values_of(model.parameters());

  const std::string message = error_of([&] { load_weights(folder.path(), model); });

  EXPECT_NE(message.find("model.safetensors: model.norm.bias holds NaN or infinity"), std::string::npos) << message;
  EXPECT_EQ(values_of(model.parameters()), before);
}

TEST(Checkpoint, OtherPrecisionIsRefused) {
  const SavedRun run({3});
  const CausalLM model = tiny_model(tiny_config(), 1, DType::bf16);

  const std::string message = error_of([&] { load_weights(run.folder / "checkpoint-3", model); });

  EXPECT_NE(message.find("model.norm.bias is float32 [12], expected bfloat16 [12]"), std::string::npos) << message;
}

// Tied embeddings

TransformerConfig with_tie(bool tie) {
  TransformerConfig config = tiny_config();
  config.tie_word_embeddings = tie;
  return config;
}

void write_weights(const fs::path& file, const CausalLM& model, const std::vector<std::pair<std::string, Tensor>>& more = {}) {
  std::vector<std::pair<std::string, Tensor>> tensors = more;
  for (const NamedTensor& parameter : model.parameters())
    if (parameter.name != "lm_head.weight") tensors.emplace_back(parameter.name, parameter.tensor);
  write_safetensors(file, tensors);
}

Tensor embedding_of(const CausalLM& model) { return model.parameters().front().tensor; }

TEST(TiedEmbedding, IsStoredOnceAndLogitsComeBackBitForBit) {
  const TempFolder folder;
  const CausalLM model = tiny_model(with_tie(true));
  AdamW optimizer = make_optimizer(model);
  take_step(model, optimizer);
  const fs::path saved = save(folder.path(), model, optimizer, {.step = 1});
  const Tensor ids = test::TinyData().train_batch(0, 2).input_ids;

  const CausalLM loaded = tiny_model(with_tie(true), 2);
  load_weights(saved, loaded);

  EXPECT_FALSE(SafetensorsFile(saved / "model.safetensors").contains("lm_head.weight"));
  EXPECT_FALSE(SafetensorsFile(saved / "optimizer.safetensors").contains("exp_avg.lm_head.weight"));
  EXPECT_EQ(loaded.forward(ids).to_doubles(), model.forward(ids).to_doubles());
}

TEST(TiedEmbedding, FileMayHoldItTwiceWhenEqual) {
  const TempFolder folder;
  const CausalLM source = tiny_model(with_tie(true)), model = tiny_model(with_tie(true), 2);
  write_weights(folder / "model.safetensors", source, {{"lm_head.weight", embedding_of(source)}});

  load_weights(folder.path(), model);

  EXPECT_EQ(values_of(model.parameters()), values_of(source.parameters()));
}

TEST(TiedEmbedding, FileWithAnotherHeadIsRefused) {
  const TempFolder folder;
  const CausalLM source = tiny_model(with_tie(true)), model = tiny_model(with_tie(true), 2);
  write_weights(folder / "model.safetensors", source, {{"lm_head.weight", Tensor::zeros({11, 12})}});

  const std::string message = error_of([&] { load_weights(folder.path(), model); });

  EXPECT_NE(message.find("lm_head.weight differs from model.embed_tokens.weight, but the config ties them"), std::string::npos) << message;
}

TEST(TiedEmbedding, UntiedModelNeedsAHeadInTheFile) {
  const TempFolder folder;
  const CausalLM source = tiny_model(with_tie(true)), model = tiny_model(with_tie(false), 2);
  write_weights(folder / "model.safetensors", source);

  const std::string message = error_of([&] { load_weights(folder.path(), model); });

  EXPECT_NE(message.find("missing lm_head.weight, float32 [11, 12]"), std::string::npos) << message;
}

TEST(TiedEmbedding, GradientIsTheSumOfBothUses) {
  const CausalLM tied = tiny_model(with_tie(true)), untied = tiny_model(with_tie(false), 2);
  {
    const NoGradGuard no_grad;
    for (const NamedTensor& to : untied.parameters()) {
      const std::string name = to.name == "lm_head.weight" ? "model.embed_tokens.weight" : to.name;
      for (const NamedTensor& from : tied.parameters())
        if (from.name == name) to.tensor.copy_(from.tensor);
    }
  }
  const Batch batch = test::TinyData().train_batch(0, 3);

  accumulate_window(tied, {&batch, 1}, nullptr);
  accumulate_window(untied, {&batch, 1}, nullptr);

  const std::vector<double> both = embedding_of(tied).grad().to_doubles(), input = embedding_of(untied).grad().to_doubles(),
                            head = untied.parameters().back().tensor.grad().to_doubles();
  // Sums of about 21 terms of size 1 or less, added in another order: 21 roundings of at most half a unit of 8.
  constexpr double kTolerance = 21 * 4 * std::numeric_limits<float>::epsilon();
  for (std::size_t i = 0; i < both.size(); ++i) ASSERT_NEAR(both[i], input[i] + head[i], kTolerance) << i;
}

// Finding

TEST(FindCheckpoint, LastIsTheHighestStepNotTheLastName) {
  const SavedRun run({9, 10, 100});

  EXPECT_EQ(find_last_checkpoint(run.folder.path())->state.step, 100);
  EXPECT_EQ(steps_in(run.folder.path()), (std::vector<std::int64_t>{9, 10, 100}));
}

TEST(FindCheckpoint, IncompleteAndDamagedOnesAreSkippedWithAReason) {
  const SavedRun run({1, 2, 3, 4});
  fs::remove(run.folder / "checkpoint-2/trainer_state.json");
  fs::resize_file(run.folder / "checkpoint-3/model.safetensors", 100);
  std::ofstream(run.folder / "checkpoint-4/trainer_state.json") << "{";
  fs::create_directory(run.folder / "checkpoint-5.tmp-1-0");
  std::ostringstream warnings;

  const auto found = find_last_checkpoint(run.folder.path(), &warnings);

  EXPECT_EQ(found->state.step, 1);
  for (const char* name : {"checkpoint-2: ", "checkpoint-3: ", "checkpoint-4: "})
    EXPECT_NE(warnings.str().find(name), std::string::npos) << warnings.str();
}

TEST(FindCheckpoint, StateThatNoRunWritesIsRefused) {
  const SavedRun run({9});
  const fs::path folder = run.folder / "checkpoint-9", path = folder / "trainer_state.json";
  const std::string good = read_file(path);
  const auto with = [&](const std::string& before, const std::string& after) {
    std::string text = good;
    text.replace(text.find(before), before.size(), after);
    write_file(path, text);
    return error_of([&] { open_checkpoint(folder, Pick::last); });
  };

  const std::string in = path.string() + ": ", most = "9007199254740992], got ";
  EXPECT_EQ(with("\"step\": 9", "\"step\": -5"), in + "step must be an integer in [0, " + most + "-5");
  EXPECT_EQ(with("\"step\": 9", "\"step\": 3.7"), in + "step must be an integer in [0, " + most + "3.7");
  EXPECT_EQ(with("\"step\": 9", "\"step\": 1e30"), in + "step must be an integer in [0, " + most + "1e+30");
  EXPECT_EQ(with("\"step\": 9", "\"step\": 9223372036854775807"), in + "step must be an integer in [0, " + most + "9223372036854775807");
  EXPECT_EQ(with("\"step\": 9", "\"step\": 18446744073709551615"), in + "step must be an integer in [0, " + most + "18446744073709551615");
  EXPECT_EQ(with("\"tokens\": 0", "\"tokens\": -3"), in + "tokens must be an integer in [0, " + most + "-3");
  EXPECT_EQ(with("\"examples\": 0", "\"examples\": null"), in + "examples must be an integer in [0, " + most + "null");
  EXPECT_EQ(with("\"best_step\": 0", "\"best_step\": -1"), in + "best_step must be an integer in [0, 9], got -1");
  EXPECT_EQ(with("\"best_step\": 0", "\"best_step\": 10"), in + "best_step must be an integer in [0, 9], got 10");
  EXPECT_EQ(with("\"offset\": 0", "\"offset\": -1"), in + "dropout.offset must be an integer >= 0 of 64 bits, got -1");
  EXPECT_EQ(with("\"step\": 9", "\"step\": 9"), "no error");
}

TEST(FindCheckpoint, RenamedFolderIsRefused) {
  const SavedRun run({9});
  fs::rename(run.folder / "checkpoint-9", run.folder / "checkpoint-50");
  const fs::path renamed = run.folder / "checkpoint-50";

  EXPECT_FALSE(find_last_checkpoint(run.folder.path()));
  EXPECT_EQ(error_of([&] { open_checkpoint(renamed, Pick::last); }),
            (renamed / "trainer_state.json").string() + ": step is 9, the folder's name says 50; was it renamed?");
}

TEST(FindCheckpoint, CopyUnderAFreeNameIsOpened) {
  const SavedRun run({9});
  fs::rename(run.folder / "checkpoint-9", run.folder / "favourite");

  EXPECT_EQ(open_checkpoint(run.folder / "favourite", Pick::last).state.step, 9);
}

TEST(OpenWeights, NeedsWeightsAndConfigAlone) {
  const SavedRun run({9});
  const fs::path folder = run.folder / "checkpoint-9";
  fs::remove(folder / "optimizer.safetensors");
  fs::remove(folder / "trainer_state.json");

  EXPECT_EQ(open_weights(folder), folder);
  fs::remove(folder / "config.yaml");
  EXPECT_EQ(error_of([&] { open_weights(folder); }), folder.string() + ": config.yaml is missing");
}

TEST(OpenWeights, IncompleteRunSaysWhatIsMissing) {
  const SavedRun run({9});
  fs::remove(run.folder / "checkpoint-9/optimizer.safetensors");

  const std::string message = error_of([&] { open_weights(run.folder.path()); });

  EXPECT_NE(message.find("cannot open " + (run.folder / "checkpoint-9/optimizer.safetensors").string()), std::string::npos) << message;
}

TEST(FindCheckpoint, EmptyOrMissingFolderHasNone) {
  const TempFolder folder;

  EXPECT_FALSE(find_last_checkpoint(folder.path()));
  EXPECT_FALSE(find_last_checkpoint(folder / "missing"));
  EXPECT_EQ(error_of([&] { open_checkpoint(folder.path(), Pick::last); }), folder.path().string() +
            " holds no complete checkpoint; give one, or the output folder of a run");
}

TEST(FindCheckpoint, APathThatCannotBeExaminedIsNamed) {
  const std::string path(300, 'x');  // more than a name may have

  EXPECT_EQ(error_of([&] { open_checkpoint(path, Pick::last); }), "cannot examine " + path + ": File name too long");
  EXPECT_EQ(error_of([&] { open_weights(path); }), "cannot examine " + path + "/trainer_state.json: File name too long");
  EXPECT_EQ(error_of([&] { open_adapter(path); }), "cannot examine " + path + "/adapter_model.safetensors: File name too long");
}

TEST(FindCheckpoint, BestIsTheOneRecordedByTheLast) {
  const SavedRun run({1, 2, 3}, /*best=*/2);

  EXPECT_EQ(find_best_checkpoint(run.folder.path())->state.step, 2);
  EXPECT_EQ(open_checkpoint(run.folder.path(), Pick::best).state.step, 2);
  EXPECT_EQ(open_checkpoint(run.folder / "checkpoint-1", Pick::best).state.step, 1);
}

TEST(FindCheckpoint, WithoutEvaluationTheBestIsTheLast) {
  const SavedRun run({1, 2});

  EXPECT_EQ(find_best_checkpoint(run.folder.path())->state.step, 2);
}

// Keeping

TEST(PruneCheckpoints, KeepsTheBestTheLastAndTheNewest) {
  const SavedRun run({1, 2, 3, 4, 5, 6}, /*best=*/2);

  prune_checkpoints(run.folder.path(), 3);

  EXPECT_EQ(steps_in(run.folder.path()), (std::vector<std::int64_t>{2, 5, 6}));
}

TEST(PruneCheckpoints, LimitOfOneKeepsTheBestBesideTheLast) {
  const SavedRun run({1, 2, 3}, /*best=*/1);

  prune_checkpoints(run.folder.path(), 1);

  EXPECT_EQ(steps_in(run.folder.path()), (std::vector<std::int64_t>{1, 3}));
}

TEST(SetAside, MovesAWholeRunToANewFolder) {
  const SavedRun run({1, 2});
  std::ofstream(run.folder / "metrics.jsonl") << "{}\n";

  const auto first = set_aside(run.folder.path(), -1);
  save(run.folder.path(), run.model, run.optimizer, {.step = 5});
  const auto second = set_aside(run.folder.path(), -1);

  EXPECT_EQ(first, run.folder / "old-1");
  EXPECT_EQ(steps_in(*first), (std::vector<std::int64_t>{1, 2}));
  EXPECT_TRUE(fs::exists(*first / "metrics.jsonl"));
  EXPECT_EQ(second, run.folder / "old-2");
  EXPECT_FALSE(set_aside(run.folder.path(), -1));
}

TEST(SetAside, RunWithoutACheckpointIsMovedToo) {
  const TempFolder folder;
  for (const char* name : {"config.yaml", "metrics.jsonl", "loss.svg", "sample.txt"}) {
    write_file(folder / name, "earlier");

    const auto aside = set_aside(folder.path(), -1);

    ASSERT_TRUE(aside) << name;
    EXPECT_EQ(read_file(*aside / name), "earlier");
    EXPECT_FALSE(fs::exists(folder / name));
  }
}

TEST(SetAside, CheckpointsAfterAStepKeepTheirMetrics) {
  const SavedRun run({1, 2});
  write_file(run.folder / "metrics.jsonl", "{}\n");

  const auto aside = set_aside(run.folder.path(), 1);

  EXPECT_EQ(steps_in(*aside), (std::vector<std::int64_t>{2}));
  EXPECT_EQ(read_file(*aside / "metrics.jsonl"), "{}\n");
  EXPECT_TRUE(fs::exists(run.folder / "metrics.jsonl"));
}

// Failures while saving

TEST(SaveCheckpoint, RefusesWeightsThatAreNotFinite) {
  const TempFolder folder;
  const CausalLM model = tiny_model(tiny_config());
  const AdamW optimizer = make_optimizer(model);
  {
    const NoGradGuard no_grad;
    model.parameters().back().tensor.fill_(std::nan(""));
  }

  const std::string message = error_of([&] { save(folder.path(), model, optimizer, {.step = 4}); });

  EXPECT_EQ(message, (folder / "checkpoint-4").string() + ": not saved, model.norm.bias holds NaN or infinity");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// A file may not grow past 4 kB, as on a full disk: weights take about 12 kB.
TEST(SaveCheckpoint, FullDiskLeavesTheLastOneAndNoLitter) {
  const SavedRun run({1});
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{4096, before.rlim_max};
  ::signal(SIGXFSZ, SIG_IGN);

  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string message = error_of([&] { save(run.folder.path(), run.model, run.optimizer, {.step = 2}); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, SIG_DFL);

  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(steps_in(run.folder.path()), (std::vector<std::int64_t>{1}));
  EXPECT_EQ(std::distance(fs::directory_iterator(run.folder.path()), fs::directory_iterator()), 1);
}

// A child saves step after step until it is killed, at 20 different moments.
TEST(SaveCheckpoint, KillLeavesACompleteCheckpoint) {
  set_num_threads(1);  // threads do not survive a fork
  for (int round = 0; round < 20; ++round) {
    const SavedRun run({1});
    const pid_t child = ::fork();
    if (child == 0) {
      for (std::int64_t step = 2;; ++step) {
        save(run.folder.path(), run.model, run.optimizer, {.step = step});
        prune_checkpoints(run.folder.path(), 1);
      }
    }
    ::usleep(static_cast<useconds_t>(1000 + 1700 * round));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);

    const OutputFolder next_run(run.folder.path());
    const auto found = find_last_checkpoint(run.folder.path());

    ASSERT_TRUE(found);
    const CausalLM model = tiny_model(tiny_config(), 2);
    const AdamW optimizer = make_optimizer(model);
    load_checkpoint(found->folder, model, optimizer);
    EXPECT_EQ(values_of(model.parameters()), values_of(run.model.parameters()));
    for (const auto& entry : fs::directory_iterator(run.folder.path()))
      EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace heddle::nn
