#include "quant/quantized_base.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "autograd/grad_mode.h"
#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/posix_file.h"
#include "quant/quant_linear.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_run.h"

namespace heddle {
namespace {

namespace fs = std::filesystem;
using quant::QuantConfig;
using test::TempFolder;

// A plain model in a folder "base" of its own, and what quantising it leaves beside it.
class QuantizedBase : public ::testing::Test {
 protected:
  QuantizedBase() {
    fs::create_directory(base());
    write_base(/*seed=*/1);
  }

  fs::path base() const { return folder_.path() / "base"; }
  void write_base(std::uint64_t seed) const { nn::save_weights(base(), model(seed), DType::f32); }

  static nn::CausalLM model(std::uint64_t seed = 5, DType dtype = DType::f32) {
    return test::tiny_model(test::tiny_config(nn::Architecture::llama), seed, dtype);
  }
  std::vector<std::string> load(nn::CausalLM& model, const QuantConfig& config = {}, DType dtype = DType::f32) const {
    return quant::load_quantized_base(base(), base(), config, dtype, model);
  }

  std::vector<fs::path> kept() const {
    std::vector<fs::path> out;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_.path()))
      if (entry.path() != base()) out.push_back(entry.path());
    return out;
  }

  static std::vector<double> logits_of(const nn::CausalLM& model) {
    return model.forward(Tensor::from_vector(std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}, {2, 3})).to_doubles();
  }

  TempFolder folder_;
};

TEST_F(QuantizedBase, IsQuantisedOnceAndThenReadAsItWas) {
  nn::CausalLM first = model(), second = model(/*seed=*/6);
  const std::vector<std::string> made = load(first), read = load(second);

  ASSERT_EQ(kept().size(), 1u);
  const std::string where = nn::printable_path(fs::canonical(kept()[0]));
  EXPECT_TRUE(kept()[0].filename().string().starts_with("base.nvfp4-")) << where;
  ASSERT_EQ(made.size(), 2u);
  EXPECT_TRUE(made[0].starts_with("14 layers: ")) << made[0];
  EXPECT_EQ(made[1], "quantised weights are kept in " + where);
  EXPECT_EQ(read, (std::vector<std::string>{made[0], "quantised weights of an earlier run, from " + where}));
  EXPECT_EQ(logits_of(second), logits_of(first));
}

// In nvfp4 an outlier in q_proj sets the tensor scale that k_proj and v_proj share with it. Its own row of 12, one block, has the outlier alone.
TEST_F(QuantizedBase, NotesWeightsThatBecameZeroEachTime) {
  const nn::CausalLM spiked = model();
  for (const nn::NamedTensor& parameter : spiked.parameters())
    if (parameter.name == "model.layers.1.self_attn.q_proj.weight") {
      const NoGradGuard no_grad;
      std::vector<float> values = parameter.tensor.to_vector<float>();
      values[3 * 12 + 4] = 1e30f;
      parameter.tensor.copy_(Tensor::from_vector(values, parameter.tensor.shape()));
    }
  nn::save_weights(base(), spiked, DType::f32);
  nn::CausalLM first = model(), second = model();
  const std::vector<std::string> made = load(first), read = load(second);

  const auto note = [](const char* counts, const char* layer) {
    return concat_text("note: ", counts, " weights of model.layers.1.self_attn.", layer,
                       " became 0: they are too small beside the largest that their scale serves");
  };
  ASSERT_EQ(made.size(), 5u);
  ASSERT_EQ(read.size(), 5u);
  for (const std::vector<std::string>& log : {made, read})
    EXPECT_EQ(std::vector(log.begin() + 1, log.begin() + 4),
              (std::vector<std::string>{note("143 of the 144", "q_proj"), note("48 of the 48", "k_proj"), note("48 of the 48", "v_proj")}));
}

// FP8 products, which the CPU has not, are no damage of what was kept: nothing is loaded or quantised.
TEST_F(QuantizedBase, AConfigThatDoesNotFitLeavesTheModelAsItWas) {
  nn::CausalLM first = model(), second = model(/*seed=*/6);
  const std::vector<double> before = logits_of(second);
  load(first);

  EXPECT_THROW(quant::load_quantized_base(base(), base(), {}, DType::f32, second, QuantCompute::fp8), nn::BadValue);
  EXPECT_EQ(logits_of(second), before);
}

// As Hugging Face splits large models; the weights of all files count.
TEST_F(QuantizedBase, MayLieInSeveralFiles) {
  fs::remove(base() / "model.safetensors");
  for (const fs::directory_entry& entry : fs::directory_iterator(HEDDLE_SOURCE_DIR "/tests/data/checkpoints/sharded"))
    fs::copy(entry.path(), base() / entry.path().filename());
  nn::CausalLM first = model(), second = model(/*seed=*/6), other = model();
  load(first);
  load(second);
  EXPECT_EQ(kept().size(), 1u);
  EXPECT_EQ(logits_of(second), logits_of(first));
  const fs::path shard = base() / "model-00003-of-00004.safetensors";
  std::string bytes = nn::read_file(shard);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  nn::write_file(shard, bytes);
  load(other);

  EXPECT_EQ(kept().size(), 2u);
}

// Weights of another base or under another config are never taken for these; what they are multiplied in does not count.
TEST_F(QuantizedBase, EveryBaseAndConfigHasItsOwnFolder) {
  QuantConfig config;
  nn::CausalLM a = model(), b = model(), c = model(), d = model(), e = model(/*seed=*/5, DType::bf16);
  load(a, config);
  quant::load_quantized_base(base(), base(), config, DType::f32, b, QuantCompute::wide);
  EXPECT_EQ(kept().size(), 1u);
  config.nvfp4_scale_rounding = ScaleRounding::up;
  load(c, config);
  EXPECT_EQ(kept().size(), 2u);
  config.exclude.push_back("o_proj");
  load(d, config);
  EXPECT_EQ(kept().size(), 3u);
  load(e, config, DType::bf16);
  EXPECT_EQ(kept().size(), 4u);
  write_base(/*seed=*/2);
  nn::CausalLM f = model();
  load(f, config);
  EXPECT_EQ(kept().size(), 5u);
}

// One bit of the codes, a cut file, a missing one, and the folder of another base under this name.
TEST_F(QuantizedBase, ADamagedFolderIsMadeAgain) {
  nn::CausalLM first = model();
  load(first);
  const fs::path folder = kept()[0], weights = folder / "model.safetensors", record = folder / "base.json";
  const std::string bytes = nn::read_file(weights), text = nn::read_file(record);
  std::string flipped = bytes, other = text;
  flipped.back() = static_cast<char>(flipped.back() ^ 1);
  other.replace(other.find("\"key\": \"") + 8, 4, "0000");
  const auto expect_made_again = [&](const std::string& reason) {
    nn::CausalLM again = model(/*seed=*/6);
    const std::vector<std::string> log = load(again);

    ASSERT_EQ(log.size(), 3u);
    EXPECT_TRUE(log[0].starts_with(nn::printable_path(fs::canonical(folder)) + " is made again: ")) << log[0];
    EXPECT_NE(log[0].find(reason), std::string::npos) << log[0];
    EXPECT_EQ(logits_of(again), logits_of(first));
    EXPECT_TRUE(nn::read_file(weights) == bytes && nn::read_file(record) == text);
  };

  nn::write_file(weights, flipped);
  expect_made_again("model.safetensors is not the file that was written");
  nn::write_file(weights, bytes.substr(0, 100));
  expect_made_again("does not fit in the file");
  nn::write_file(record, other);
  expect_made_again("base.json is of another base or config");
  nlohmann::json costless = nlohmann::json::parse(text);
  costless["cost"] = 1;
  nn::write_file(record, costless.dump());
  expect_made_again("base.json has no list of lines on what it cost");
  nn::write_file(record, "[");
  expect_made_again("base.json is of another base or config");
  fs::remove(weights);
  expect_made_again("model.safetensors");
}

// A file in the place of the folder stands for a place that cannot be written, which root has no other.
TEST_F(QuantizedBase, WorksWhereNothingCanBeKept) {
  nn::CausalLM first = model();
  load(first);
  const fs::path folder = kept()[0];
  fs::remove_all(folder);
  nn::write_file(folder, "");
  nn::CausalLM second = model();
  const std::vector<std::string> log = load(second);

  ASSERT_EQ(log.size(), 3u);
  EXPECT_TRUE(log[2].starts_with("quantised weights are not kept: ")) << log[2];
  EXPECT_EQ(logits_of(second), logits_of(first));
}

TEST_F(QuantizedBase, FormatsWithoutAFileLayoutAreNotKept) {
  for (const QuantFormat format : {QuantFormat::fp4, QuantFormat::fp8_e5m2}) {
    QuantConfig config;
    config.format = format;
    nn::CausalLM first = model();
    EXPECT_EQ(load(first, config).size(), 1u);
    EXPECT_TRUE(kept().empty());
  }
}

// As in a model of that dtype, whether kept or not.
TEST_F(QuantizedBase, QuantisesWeightsRoundedToTheDtypeOfTraining) {
  nn::CausalLM trained = model(/*seed=*/5, DType::bf16), wide = model(), again = model();
  load(trained, {}, DType::bf16);
  const fs::path folder = kept()[0];
  load(again, {}, DType::bf16);
  fs::remove_all(folder);
  load(wide, {}, DType::bf16);

  EXPECT_EQ(kept(), std::vector<fs::path>{folder});
  const auto packed = [](const nn::CausalLM& model) {
    std::vector<std::vector<std::uint8_t>> out;
    for (const auto& [name, module] : model.modules())
      if (const auto layer = std::dynamic_pointer_cast<quant::QuantLinear>(module); layer != nullptr) {
        out.push_back(layer->weight().parts().codes.to_vector<std::uint8_t>());
        out.push_back(layer->weight().parts().scales.to_vector<std::uint8_t>());
      }
    return out;
  };
  EXPECT_EQ(packed(wide), packed(trained));
  EXPECT_EQ(packed(again), packed(trained));
  EXPECT_EQ(logits_of(wide), logits_of(again));
}

}  // namespace
}  // namespace heddle
