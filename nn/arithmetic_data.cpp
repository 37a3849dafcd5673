#include "nn/arithmetic_data.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/permutation.h"

namespace heddle::nn {
namespace {

constexpr std::uint64_t kSplitStream = 2;          // of Permutation
constexpr std::int64_t kMaxSplitPairs = 100'000;  // keeps an evaluation of long operands short

std::int64_t power_of_ten(std::int64_t exponent) { return exponent == 0 ? 1 : 10 * power_of_ten(exponent - 1); }

std::string zero_padded(std::int64_t value, std::int64_t width) {
  const std::string digits = std::to_string(value);
  return std::string(static_cast<std::size_t>(width) - digits.size(), '0') + digits;
}

// The pair of numbers smaller <= larger < range with this rank, in [0, range * (range + 1) / 2); range is even.
// The triangle of pairs is folded into a rectangle of range / 2 rows and range + 1 columns: row i holds the pairs that
// start with i and, turned round, those that start with range - 1 - i.
std::pair<std::int64_t, std::int64_t> unordered_pair(std::int64_t rank, std::int64_t range) {
  const std::int64_t row = rank / (range + 1);
  const std::int64_t column = rank % (range + 1);
  if (column > row) return {row, column - 1};
  return {range - 1 - row, range - 1 - column};
}

}  // namespace

ArithmeticData::ArithmeticData(const DataConfig& config, std::uint64_t seed)
    : Dataset(seed), operation_(config.operation), digits_(config.digits) {
  const std::int64_t range = power_of_ten(digits_);
  pair_count_ = range / 2 * (range + 1);
  const std::int64_t split_pairs = std::min(pair_count_, kMaxSplitPairs);
  eval_pairs_ = std::llround(config.validation_fraction * static_cast<double>(split_pairs));
  if (eval_pairs_ < 1 || eval_pairs_ >= pair_count_) {
    const std::string expected = concat_text("a share that holds out at least one of ", split_pairs, " pairs and leaves one");
    throw BadValue("data.validation_fraction", expected, number_text(config.validation_fraction));
  }
  const std::int64_t row_length = problem_tokens(config);
  HEDDLE_CHECK(row_length <= config.sequence_length, "data: a problem of ", digits_, " digits takes ", row_length,
               " tokens; sequence_length is ", config.sequence_length);
  set_sizes((pair_count_ - eval_pairs_) * orders(), eval_pairs_ * orders(), row_length);
}

std::int64_t ArithmeticData::problem_tokens(const DataConfig& config) {
  // "aa+bb=ccc\n", or a difference with one digit less.
  return 3 * config.digits + (config.operation == Operation::addition ? 3 : 2);
}

std::string ArithmeticData::describe() const {
  return concat_text("arithmetic: ", name_of(EnumNames<Operation>(kOperationNames), operation_), " of ", digits_,
                     "-digit numbers, ", train_size(), " training and ", eval_size(), " held-out problems of ",
                     row_length() + 1, " tokens");
}

std::string ArithmeticData::problem(Split split, std::int64_t index) const {
  const std::int64_t first = split == Split::eval ? 0 : eval_pairs_ * orders();
  return problem_text(first + index);
}

std::string ArithmeticData::problem_text(std::int64_t index) const {
  const std::int64_t rank = Permutation(pair_count_, seed(), kSplitStream)[index / orders()];
  auto [a, b] = unordered_pair(rank, power_of_ten(digits_));
  if (operation_ == Operation::subtraction || index % orders() == 1) std::swap(a, b);
  const bool is_sum = operation_ == Operation::addition;
  std::string answer = is_sum ? zero_padded(a + b, digits_ + 1) : zero_padded(a - b, digits_);
  std::ranges::reverse(answer);
  return zero_padded(a, digits_) + (is_sum ? '+' : '-') + zero_padded(b, digits_) + '=' + answer + '\n';
}

void ArithmeticData::write_example(Split split, std::int64_t index, std::span<std::int64_t> ids,
                                   std::span<std::int64_t> labels) const {
  const std::string text = problem(split, index);
  const std::size_t answer_start = text.find('=') + 1;
  for (std::size_t t = 0; t < ids.size(); ++t) {
    ids[t] = text[t];
    labels[t] = t + 1 < answer_start ? kNoLoss : text[t + 1];
  }
}

}  // namespace heddle::nn
