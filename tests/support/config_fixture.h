#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "configs/run_config.h"
#include "nn/atomic_file.h"
#include "nn/posix_file.h"
#include "nn/safetensors.h"
#include "tests/support/temp_folder.h"

namespace heddle::test {

inline constexpr std::string_view kRequiredKeys = R"(model:
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
  void SetUp() override { std::filesystem::current_path(HEDDLE_SOURCE_DIR); }

  // A file of the test's own, gone after the test.
  std::string write(std::string_view text, const std::string& name = "run.yaml") {
    const std::filesystem::path path = folder_ / name;
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }

  static config::RunConfig load(const std::string& path, const std::vector<std::string>& overrides = {}) {
    return config::load_run_config(path, overrides);
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
    const std::filesystem::path folder = folder_ / "base";
    std::filesystem::create_directory(folder);
    nn::write_file(folder / "config.yaml", yaml);
    nn::write_safetensors(folder / "model.safetensors", {}, {});
    return folder.string();
  }

  // A shipped config; in place of the run that its base is, a checkpoint made with the config of that run.
  config::RunConfig load_shipped(const std::filesystem::path& file) {
    const std::string text = nn::read_file(file), key = "\nbase: runs/";
    const std::size_t start = text.find(key);
    if (start == std::string::npos) return load(file.string());
    const std::string base = text.substr(start + key.size(), text.find('\n', start + 1) - start - key.size());
    return load(file.string(), {"base=" + make_base(config::to_yaml(load("configs/" + base + ".yaml")))});
  }

  static std::vector<std::filesystem::path> yaml_files(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> out;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".yaml") out.push_back(entry.path());
    std::ranges::sort(out);
    return out;
  }

  const TempFolder folder_;
};

}  // namespace heddle::test
