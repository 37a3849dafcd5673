#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "tests/support/compare.h"

namespace heddle {
namespace {

using test::all_equal;
using test::error_of;

Tensor ids_of(const std::vector<std::int64_t>& ids) { return Tensor::from_vector(ids, {static_cast<std::int64_t>(ids.size())}); }

Tensor table(std::int64_t V, std::int64_t C) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < V * C; ++i) values.push_back(static_cast<double>(i));
  return Tensor::from_vector(values, {V, C}).set_requires_grad(true);
}

TEST(Embedding, PicksRowsAndAddsTheGradientsOfRepeatedIds) {
  const Tensor weight = table(4, 2);  // rows [0 1] [2 3] [4 5] [6 7]
  const Tensor ids = Tensor::from_vector<std::int64_t>({3, 1, 1, 0}, {2, 2});

  const Tensor out = embedding(weight, ids);
  out.backward(Tensor::from_vector<double>({1, 2, 10, 20, 100, 200, 5, 6}, {2, 2, 2}));

  EXPECT_EQ(out.shape(), Shape({2, 2, 2}));
  EXPECT_TRUE(all_equal(out, {6, 7, 2, 3, 2, 3, 0, 1}));
  EXPECT_TRUE(all_equal(weight.grad(), {5, 6, 110, 220, 0, 0, 1, 2}));
}

TEST(Embedding, TakesInt32TransposedAndScalarIds) {
  const Tensor weight = table(4, 2);
  const Tensor ids = transpose(Tensor::from_vector<std::int32_t>({0, 1, 2, 3}, {2, 2}), 0, 1);  // [[0, 2], [1, 3]]

  EXPECT_TRUE(all_equal(embedding(weight, ids), {0, 1, 4, 5, 2, 3, 6, 7}));
  EXPECT_TRUE(all_equal(embedding(weight, select_index(ids_of({3}), 0, 0)), {6, 7}));
}

TEST(Embedding, PaddingRowReceivesNoGradient) {
  const Tensor weight = table(10, 5);
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 5376; ++i) ids.push_back(i * 7 % 10);

  sum(embedding(weight, ids_of(ids), 0)).backward();

  std::vector<double> expected(50, 537.0);  // 5376 ids in cycles of 10: ids 0, 7, 4, 1, 8, 5 occur 538 times
  for (std::size_t v : {7u, 4u, 1u, 8u, 5u})
    for (std::size_t c = 0; c < 5; ++c) expected[v * 5 + c] = 538.0;
  for (std::size_t c = 0; c < 5; ++c) expected[c] = 0.0;
  EXPECT_TRUE(all_equal(weight.grad(), expected));
}

TEST(Embedding, GradientOfHalfRowsIsSummedInFloat) {
  const Tensor weight = Tensor::full({2, 3}, 1.0, DType::bf16).set_requires_grad(true);

  sum(embedding(weight, ids_of(std::vector<std::int64_t>(512, 1)))).backward(Tensor::scalar(1.0, DType::bf16));

  EXPECT_TRUE(all_equal(weight.grad(), {0, 0, 0, 512, 512, 512}));  // adding in bfloat16 would stop at 256
}

TEST(Embedding, RefusesIdsOutsideTheVocabularyNamingIdAndPosition) {
  const Tensor weight = table(8, 2);
  EXPECT_EQ(error_of([&] { embedding(weight, ids_of({0, 7, 8})); }), "embedding: id 8 at position 2 is outside the vocabulary [0, 8)");
  EXPECT_EQ(error_of([&] { embedding(weight, ids_of({-1})); }), "embedding: id -1 at position 0 is outside the vocabulary [0, 8)");
  EXPECT_EQ(error_of([&] { embedding(weight, ids_of({2147483648})); }),
            "embedding: id 2147483648 at position 0 is outside the vocabulary [0, 8)");
  EXPECT_EQ(error_of([&] { embedding(weight, Tensor::from_vector<std::int32_t>({0, -5}, {2})); }),
            "embedding: id -5 at position 1 is outside the vocabulary [0, 8)");
  EXPECT_EQ(error_of([&] { embedding(weight, ids_of({0}), 8); }), "embedding: padding_idx 8 is outside [0, 8); use -1 for none");
  EXPECT_EQ(error_of([&] { embedding(weight, Tensor::zeros({2})); }), "embedding: ids must be int64 or int32, got float32");
}

TEST(Embedding, NoIdsGiveNoRowsAndAZeroGradient) {
  const Tensor weight = table(2, 2);

  const Tensor out = embedding(weight, ids_of({}));
  sum(out).backward();

  EXPECT_EQ(out.shape(), Shape({0, 2}));
  EXPECT_TRUE(all_equal(weight.grad(), {0, 0, 0, 0}));
}

}  // namespace
}  // namespace heddle
