#include "nn/data.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "nn/arithmetic_data.h"
#include "nn/permutation.h"
#include "nn/text_data.h"

namespace heddle::nn {
namespace {

// Streams of Permutation. Evaluation has its own seed as well, so that its order is the same in every run.
constexpr std::uint64_t kEvalSeed = 0;
constexpr std::uint64_t kEvalStream = 1;
constexpr std::uint64_t kFirstEpochStream = std::uint64_t{1} << 32;

// Rows of a batch while it is being filled.
struct Rows {
  Rows(std::int64_t count, std::int64_t length)
      : ids(Tensor::empty({count, length}, DType::i64)),
        labels(Tensor::empty({count, length}, DType::i64)),
        length(length),
        ids_data(ids.mutable_view().as<std::int64_t>()),
        labels_data(labels.mutable_view().as<std::int64_t>()) {}

  std::span<std::int64_t> ids_of(std::int64_t row) const { return {ids_data + row * length, static_cast<std::size_t>(length)}; }
  std::span<std::int64_t> labels_of(std::int64_t row) const { return {labels_data + row * length, static_cast<std::size_t>(length)}; }

  Tensor ids;
  Tensor labels;
  std::int64_t length;
  std::int64_t* ids_data;
  std::int64_t* labels_data;
};

// Whether `label` is the most probable id of one position.
bool is_argmax(std::span<const double> logits, std::int64_t label) {
  const double wanted = logits[static_cast<std::size_t>(label)];
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(logits.size()); ++id) {
    const double other = logits[static_cast<std::size_t>(id)];
    const bool is_ahead = id < label ? wanted > other : wanted >= other;
    if (!is_ahead) return false;
  }
  return true;
}

}  // namespace

void Dataset::set_sizes(std::int64_t train_size, std::int64_t eval_size, std::int64_t row_length) {
  assert(train_size >= 1 && eval_size >= 1 && row_length >= 1);
  train_size_ = train_size;
  eval_size_ = eval_size;
  row_length_ = row_length;
}

Batch Dataset::train_batch(std::int64_t first, std::int64_t count) const {
  HEDDLE_CHECK(first >= 0 && count >= 1, "train_batch: first must be >= 0 and count >= 1, got ", first, " and ", count);
  const Rows rows(count, row_length_);
  for (std::int64_t row = 0; row < count; ++row) {
    const auto epoch = static_cast<std::uint64_t>((first + row) / train_size_);
    const Permutation order(train_size_, seed_, kFirstEpochStream + epoch);
    write_example(Split::train, order[(first + row) % train_size_], rows.ids_of(row), rows.labels_of(row));
  }
  return {rows.ids, rows.labels};
}

Batch Dataset::eval_batch(std::int64_t first, std::int64_t count) const {
  HEDDLE_CHECK(first >= 0 && first < eval_size_ && count >= 1, "eval_batch: first must be in [0, ", eval_size_,
               ") and count >= 1, got ", first, " and ", count);
  const Permutation order(eval_size_, kEvalSeed, kEvalStream);
  const Rows rows(std::min(count, eval_size_ - first), row_length_);
  for (std::int64_t row = 0; row < rows.ids.size(0); ++row)
    write_example(Split::eval, order[first + row], rows.ids_of(row), rows.labels_of(row));
  return {rows.ids, rows.labels};
}

std::unique_ptr<Dataset> make_dataset(const DataConfig& config, std::uint64_t seed, const std::filesystem::path& root) {
  validate(config);
  if (config.source == DataSource::arithmetic) return std::make_unique<ArithmeticData>(config, seed);
  return std::make_unique<TextData>(read_text(config.files, root), config.sequence_length, config.validation_fraction, seed);
}

std::int64_t count_exact_matches(const Tensor& logits, const Tensor& labels) {
  HEDDLE_CHECK(logits.rank() == 3 && labels.rank() == 2 && labels.dtype() == DType::i64 && logits.size(0) == labels.size(0) &&
                   logits.size(1) == labels.size(1),
               "count_exact_matches: needs logits [B, T, V] and int64 labels [B, T], got ", logits.describe(), " and ",
               labels.describe());
  const std::vector<double> scores = logits.to_doubles();
  const std::vector<std::int64_t> wanted = labels.to_vector<std::int64_t>();
  const std::int64_t rows = labels.size(0), length = labels.size(1), vocab = logits.size(2);
  std::int64_t matches = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    bool is_right = true;
    for (std::int64_t i = row * length; i < (row + 1) * length && is_right; ++i) {
      const std::int64_t label = wanted[static_cast<std::size_t>(i)];
      if (label == kNoLoss) continue;
      HEDDLE_CHECK(label >= 0 && label < vocab, "count_exact_matches: label ", label, " is outside [0, ", vocab, ")");
      is_right = is_argmax({scores.data() + i * vocab, static_cast<std::size_t>(vocab)}, label);
    }
    matches += is_right;
  }
  return matches;
}

}  // namespace heddle::nn
