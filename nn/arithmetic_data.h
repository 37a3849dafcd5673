#pragma once

#include <cstdint>
#include <string>

#include "nn/data.h"

namespace heddle::nn {

// Sums or differences of two numbers of `digits` digits, one problem a row: "07+95=201\n" is 7 + 95 = 102. The answer is
// written from its last digit to its first, so that a carry is known before the digit that needs it: at 400 steps of 128
// problems a model of 400 000 parameters answers 99 % of unseen sums, against 56 % with the first digit first.
// Operands and answer have a fixed width, so rows need no padding; T is the length of a problem less one, whatever
// sequence_length is, as long as it fits. Loss is on the answer and the line end.
//
// Note: Unseen pairs
// The unit of the split is the unordered pair {a, b}: a+b and b+a are on the same side, so that a held-out sum cannot be
// answered from its mirror image. Subtraction has one problem a pair, the larger less the smaller. validation_fraction
// of the pairs, or of 100 000 where there are more, is held out in an order drawn from the seed; every other pair
// is for training.
class ArithmeticData final : public Dataset {
 public:
  // Throws heddle::Error if a problem is longer than sequence_length, nn::BadValue if either split would be empty.
  ArithmeticData(const DataConfig& config, std::uint64_t seed);

  // T: the characters of a problem less the last, which is only predicted.
  static std::int64_t problem_tokens(const DataConfig& config);

  bool has_exact_match() const override { return true; }
  std::string describe() const override;

  // The text of an example, with its line end.
  std::string problem(Split split, std::int64_t index) const;

 private:
  void write_example(Split split, std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels) const override;

  // Problem `index` of both splits together, the held-out ones first.
  std::string problem_text(std::int64_t index) const;
  std::int64_t orders() const { return operation_ == Operation::addition ? 2 : 1; }  // problems of a pair

  Operation operation_;
  std::int64_t digits_;
  std::int64_t pair_count_;
  std::int64_t eval_pairs_;
};

}  // namespace heddle::nn
