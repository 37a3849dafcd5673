#include "nn/evaluate.h"

#include <gtest/gtest.h>

#include "nn/arithmetic_data.h"
#include "tests/support/tiny_run.h"

namespace heddle::nn {
namespace {

using test::tiny_config;
using test::TinyData;
using test::tiny_model;

TEST(Evaluate, TwiceInARowIsBitwiseEqualAndRestoresTrainingMode) {
  TransformerConfig config = tiny_config();
  config.resid_pdrop = 0.2;
  CausalLM model = tiny_model(config);
  const TinyData data;

  const EvalResult first = evaluate(model, data, 2, 20), second = evaluate(model, data, 2, 20);

  EXPECT_EQ(first.loss, second.loss);
  EXPECT_TRUE(model.is_training());
}

TEST(Evaluate, BatchSizeDoesNotMatter) {
  CausalLM model = tiny_model(tiny_config());
  const TinyData data;

  // Sums of about 28 losses of size 2.4 in float32, in another order.
  EXPECT_NEAR(evaluate(model, data, 2, 20).loss, evaluate(model, data, 5, 20).loss, 1e-5);
}

TEST(Evaluate, ReadsNoMoreBatchesThanAsked) {
  CausalLM model = tiny_model(tiny_config());
  const TinyData five, two(13, 2);

  EXPECT_EQ(evaluate(model, five, 1, 100).loss, evaluate(model, five, 1, 5).loss);
  EXPECT_NE(evaluate(model, five, 1, 2).loss, evaluate(model, five, 1, 5).loss);
}

TEST(Evaluate, ArithmeticReportsExactMatchOfEveryHeldOutProblem) {
  DataConfig data_config;
  data_config.source = DataSource::arithmetic;
  data_config.digits = 1;
  data_config.sequence_length = 16;
  data_config.validation_fraction = 0.2;
  const ArithmeticData data(data_config, 1);
  TransformerConfig config = tiny_config();
  config.vocab_size = 300;  // more than bytes: the rest is never answered
  CausalLM model = tiny_model(config);

  const EvalResult result = evaluate(model, data, 4, /*eval_iters=*/1);
  const std::string sample = sample_text(model, data, 1);

  ASSERT_TRUE(result.exact_match);
  EXPECT_GE(*result.exact_match, 0);
  EXPECT_LE(*result.exact_match, 1);
  EXPECT_NE(sample.find("Problems not seen in training: "), std::string::npos);
  EXPECT_NE(sample.find("  wrong, the answer is "), std::string::npos) << sample;
}

}  // namespace
}  // namespace heddle::nn
