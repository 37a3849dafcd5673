#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "nn/data.h"

namespace heddle::nn {

// The files that match one of the patterns, each once and sorted by name. Patterns are relative to `root`, or absolute. In
// a pattern `*`, `?` and `[...]` match within one name, `**` any number of folders. Wildcards match no hidden name, and
// `**` enters no folder called build or runs. Throws nn::BadValue naming every pattern that matches nothing.
std::vector<std::filesystem::path> find_files(const std::vector<std::string>& patterns, const std::filesystem::path& root);

struct TextCorpus {
  std::string origin;  // for the log: "12 files"
  std::vector<std::int32_t> tokens;
};

// The bytes of all matching files as tokens, one file after the other; see find_files. Any bytes are text, UTF-8 or not.
// Throws heddle::Error naming a file that cannot be read, and why.
TextCorpus read_text(const std::vector<std::string>& patterns, const std::filesystem::path& root);

// Windows of sequence_length + 1 tokens of one long text.
//
// Note: Held-out windows
// The text is cut into windows of sequence_length + 1 tokens and validation_fraction of them, evenly spread over the
// text, are held out whole. The choice does not depend on the seed: runs with different seeds are compared on the same
// text. Training windows start at any token, as long as they touch no held-out one; an epoch uses every start once.
class TextData final : public Dataset {
 public:
  // Throws nn::BadValue if the text is shorter than one window or either split would be empty.
  TextData(TextCorpus corpus, std::int64_t sequence_length, double validation_fraction, std::uint64_t seed);

  bool has_exact_match() const override { return false; }
  std::string describe() const override;

  // The position in the text of the first token of an example.
  std::int64_t start_of(Split split, std::int64_t index) const;

 private:
  void write_example(Split split, std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels) const override;

  // Tokens one after the other that may each start a training window.
  struct Stretch {
    std::int64_t start;
    std::int64_t before;  // such tokens in the stretches before this one
  };

  TextCorpus corpus_;
  std::vector<std::int64_t> eval_starts_;
  std::vector<Stretch> stretches_;
};

}  // namespace heddle::nn
