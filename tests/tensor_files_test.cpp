#include "nn/tensor_files.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/json_text.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"

// Weights in several files, as transformers splits them: checkpoints/sharded of tests/data.

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_of;
using test::TempFolder;

const fs::path kSharded = HEDDLE_SOURCE_DIR "/tests/data/checkpoints/sharded";
const char* const kFirst = "model-00001-of-00004.safetensors";
const char* const kLast = "model-00004-of-00004.safetensors";

CausalLM llama(std::uint64_t seed = 1) { return test::tiny_model(test::tiny_config(Architecture::llama), seed); }

// A copy of the files, with a changed index.
class Copied {
 public:
  explicit Copied(const std::function<void(json&)>& change = [](json&) {}) {
    for (const fs::directory_entry& entry : fs::directory_iterator(kSharded)) fs::copy(entry.path(), folder_ / entry.path().filename());
    json index = read_json(index_path());
    change(index);
    write_file(index_path(), index.dump());
  }

  const fs::path& path() const { return folder_.path(); }
  fs::path index_path() const { return folder_ / kWeightsIndex; }
  // What opening says after the path of the index.
  std::string error() const {
    const std::string text = error_of([&] { TensorFiles::of_model(path()); }), index = printable_path(index_path());
    return text.starts_with(index) ? text.substr(index.size()) : text;
  }

 private:
  TempFolder folder_;
};

// Both compute in float32. Logits are up to 11; each of some 20 sums on the way, of at most 20 terms of that size, may be off by 20 * 2^-24 of it.
TEST(TensorFiles, AModelThatTransformersSplitComputesWhatItDidThere) {
  const CausalLM model = llama();
  load_weights(kSharded, model);
  const Tensor logits = model.forward(Tensor::from_vector(std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}, {2, 3}));

  EXPECT_TRUE(test::all_close(logits, SafetensorsFile(kSharded / "expected.safetensors").read("logits").to_doubles(), 11 * 20 * 20 * 0x1p-24));
}

TEST(TensorFiles, WhereThereIsAnIndexItAloneCounts) {
  const Copied copied;
  save_weights(copied.path(), llama(/*seed=*/2), DType::f32);
  const CausalLM model = llama(/*seed=*/3), expected = llama(/*seed=*/4);
  load_weights(copied.path(), model);
  load_weights(kSharded, expected);

  EXPECT_EQ(test::values_of(model.parameters()), test::values_of(expected.parameters()));
}

TEST(TensorFiles, SeveralFilesAreAFolderOfWeights) {
  const Copied copied;
  write_file(copied.path() / "config.yaml", "");

  EXPECT_TRUE(has_weights(copied.path()));
  EXPECT_EQ(open_weights(copied.path()), copied.path());
  fs::remove(copied.index_path());
  EXPECT_FALSE(has_weights(copied.path()));
}

TEST(TensorFiles, AMisfitIsSaidOfTheFileThatItIsIn) {
  const CausalLM gpt2 = test::tiny_model(test::tiny_config());
  const std::string message = error_of([&] { load_weights(kSharded, gpt2); });

  EXPECT_NE(message.find("\n  model-00002-of-00004.safetensors: unexpected model.layers.0.mlp.gate_proj.weight"), std::string::npos) << message;
  EXPECT_NE(message.find(std::string("\n  ") + kWeightsIndex + ": missing model.norm.bias"), std::string::npos) << message;
}

TEST(TensorFiles, RefusesFilesThatAreNotThereOrEmpty) {
  const Copied missing, empty;
  fs::remove(missing.path() / kLast);
  fs::resize_file(empty.path() / kLast, 0);

  EXPECT_EQ(missing.error(), std::string(" names ") + kLast + ", which is not there");
  EXPECT_EQ(empty.error(), "safetensors: " + printable_path(empty.path() / kLast) + ": the file has 0 bytes, at least 8 are needed");
}

TEST(TensorFiles, RefusesFilesOutsideTheFolder) {
  for (const char* file : {"../model.safetensors", "/model.safetensors", "..", "", "a/b.safetensors"})
    EXPECT_EQ(Copied([&](json& index) { index["weight_map"]["lm_head.weight"] = file; }).error(),
              std::string(": tensor 'lm_head.weight' is in \"") + file + "\", which is not the name of a file in the folder");
  EXPECT_EQ(Copied([](json& index) { index["weight_map"]["lm_head.weight"] = 7; }).error(),
            ": tensor 'lm_head.weight' is in \"7\", which is not the name of a file in the folder");
}

TEST(TensorFiles, RefusesNamesThatNoFileCanHave) {
  const std::string error = Copied([](json& index) { index["weight_map"]["lm_head.weight"] = std::string(5000, 'x'); }).error();

  EXPECT_EQ(error, ": tensor 'lm_head.weight' is in \"" + std::string(100, 'x') + "...\", which is not the name of a file in the folder");
}

TEST(TensorFiles, WithoutAnIndexTheyAreNoModel) {
  const Copied copied;
  write_file(copied.path() / "config.yaml", "");
  fs::remove(copied.index_path());

  EXPECT_EQ(error_of([&] { open_weights(copied.path()); }),
            printable_path(copied.path()) + " has weights in several files and no model.safetensors.index.json; add the one they came with");
}

TEST(TensorFiles, ATensorThatNoFileHasIsSaidOfTheIndex) {
  EXPECT_EQ(error_of([] { TensorFiles::of_model(kSharded).read("extra"); }), "model.safetensors.index.json has no tensor 'extra'");
}

TEST(TensorFiles, RefusesATensorInAnotherFileAlsoWhereItIsInBoth) {
  const std::string expected = concat_text(": tensor 'lm_head.weight' is in ", kLast, ", and to be in ", kFirst);
  const auto moved = [](json& index) { index["weight_map"]["lm_head.weight"] = kFirst; };
  const Copied in_one(moved), in_both(moved);
  std::vector<std::pair<std::string, Tensor>> tensors = {{"lm_head.weight", Tensor::zeros({11, 12})}};
  const SafetensorsFile first(kSharded / kFirst);
  for (const std::string& name : first.names()) tensors.emplace_back(name, first.read(name));
  write_safetensors(in_both.path() / kFirst, tensors);

  EXPECT_EQ(in_one.error(), expected);
  EXPECT_EQ(in_both.error(), expected);
}

TEST(TensorFiles, RefusesNamesThatOnlyTheIndexOrOnlyAFileHas) {
  EXPECT_EQ(Copied([](json& index) { index["weight_map"]["extra"] = kFirst; }).error(), concat_text(": tensor 'extra' is not in ", kFirst));
  EXPECT_EQ(Copied([](json& index) { index["weight_map"].erase("lm_head.weight"); }).error(),
            concat_text(" does not name tensor 'lm_head.weight', which is in ", kLast));
}

TEST(TensorFiles, DoesNotDependOnTheTotalSize) {
  EXPECT_EQ(Copied([](json& index) { index["metadata"]["total_size"] = 10129; }).error(), "no error");
  EXPECT_EQ(Copied([](json& index) { index.erase("metadata"); }).error(), "no error");
}

TEST(TensorFiles, RefusesOtherFormsOfAnIndex) {
  EXPECT_EQ(Copied([](json& index) { index.erase("weight_map"); }).error(), ": there is no weight_map of tensors and their files");
  EXPECT_EQ(Copied([](json& index) { index["weight_map"] = json::object(); }).error(), ": there is no weight_map of tensors and their files");
  const Copied twice;
  write_file(twice.index_path(), R"({"weight_map": {"a": "b", "a": "c"}})");
  EXPECT_EQ(twice.error(), ": the key \"a\" is there twice; mend or remove it");
}

}  // namespace
}  // namespace heddle::nn
