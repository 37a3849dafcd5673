#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "nn/data.h"

namespace heddle::nn {

// The files under `root` that match one of the patterns, each once, relative to root and sorted by name. In a pattern `*`
// and `?` match within one name and `**` any number of folders. Hidden files and folders, and the folders build and runs
// at the root, are skipped. Throws heddle::Error naming a pattern that matches nothing.
std::vector<std::filesystem::path> find_files(const std::vector<std::string>& patterns, const std::filesystem::path& root);

// Windows of sequence_length + 1 tokens of one long text: the files' bytes, one after the other.
//
// Note: Held-out windows
// The text is cut into windows of sequence_length + 1 tokens and validation_fraction of them, evenly spread over the
// text, are held out whole. The choice does not depend on the seed: runs with different seeds are compared on the same
// text. Training windows start at any token, as long as they touch no held-out one; an epoch uses every start once.
class TextData final : public Dataset {
 public:
  // Throws heddle::Error if the text is shorter than one window or either split would be empty.
  TextData(const std::vector<std::int32_t>& tokens, std::int64_t sequence_length, double validation_fraction, std::uint64_t seed);
  // The text of files, as make_dataset reads it.
  static TextData from_files(const DataConfig& config, std::uint64_t seed, const std::filesystem::path& root);

  bool has_exact_match() const override { return false; }
  std::string describe() const override;

  // The position in the text of the first token of an example.
  std::int64_t start_of(Split split, std::int64_t index) const;

 private:
  void write_example(Split split, std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels) const override;

  std::vector<std::int32_t> tokens_;
  std::vector<std::int64_t> eval_starts_;
  std::vector<std::int64_t> train_starts_;
  std::int64_t file_count_ = 0;
};

}  // namespace heddle::nn
