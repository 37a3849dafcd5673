#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "autograd/ops.h"
#include "nn/train_config.h"

namespace heddle::nn {

// The label of a position that carries no loss; cross_entropy's default.
inline constexpr std::int64_t kNoLoss = CrossEntropyOptions{}.ignore_index;

struct Batch {
  Tensor input_ids;  // int64 [B, T]
  Tensor labels;     // int64 [B, T]: the id that follows input_ids[b, t], already shifted, or kNoLoss
};

enum class Split { train, eval };

// Examples of equal length in two disjoint splits. Nothing in it moves: a batch is a function of (seed, position), so
// a run resumes exactly by storing how many training examples it has used.
class Dataset {
 public:
  virtual ~Dataset() = default;

  // Examples first .. first+count-1 of the endless training stream: epoch after epoch, each visiting every training
  // example once in an order of its own. A batch may straddle two epochs, and may be larger than the split.
  Batch train_batch(std::int64_t first, std::int64_t count) const;
  // Held-out examples first .. first+count-1, fewer at the end of the split; first in [0, eval_size()). Their order is
  // fixed and shuffled, so a prefix is a fair sample of the split.
  Batch eval_batch(std::int64_t first, std::int64_t count) const;

  std::int64_t train_size() const { return train_size_; }
  std::int64_t eval_size() const { return eval_size_; }
  std::int64_t row_length() const { return row_length_; }  // T

  // Whether the labels of an example are one answer, right or wrong as a whole: see count_exact_matches.
  virtual bool has_exact_match() const = 0;
  // One line that says what was read and the size of both splits. Data with other examples has another line: by it a resumed
  // run knows its data again.
  virtual std::string describe() const = 0;

 protected:
  explicit Dataset(std::uint64_t seed) : seed_(seed) {}
  // To be called by the constructor of a subclass. Sizes are >= 1.
  void set_sizes(std::int64_t train_size, std::int64_t eval_size, std::int64_t row_length);
  std::uint64_t seed() const { return seed_; }

 private:
  // Writes example `index` of a split, in the data set's own order. ids and labels have row_length() elements.
  virtual void write_example(Split split, std::int64_t index, std::span<std::int64_t> ids,
                             std::span<std::int64_t> labels) const = 0;

  std::uint64_t seed_;
  std::int64_t train_size_ = 0;
  std::int64_t eval_size_ = 0;
  std::int64_t row_length_ = 0;
};

// The data set a config asks for. File patterns are relative to `root`. `seed` chooses the order of training examples
// and, for arithmetic, which pairs are held out. Throws heddle::ConfigError if the config is not valid, nn::BadValue
// if the data do not exist or are too small to split, heddle::Error if they cannot be read.
std::unique_ptr<Dataset> make_dataset(const DataConfig& config, std::uint64_t seed, const std::filesystem::path& root = ".");

// The number of rows whose most probable ids agree with every label that is not kNoLoss.
//   logits [B, T, V] floating; labels int64 [B, T]. Ties go to the lowest id; a NaN is never right.
// This equals generating the answer greedily and comparing it as a whole: while every earlier token was right, the true
// prefix the logits were computed from is the generated one, and after the first wrong token the row has failed anyway.
std::int64_t count_exact_matches(const Tensor& logits, const Tensor& labels);

}  // namespace heddle::nn
