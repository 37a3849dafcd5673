#include "nn/evaluate.h"

#include <algorithm>
#include <vector>

#include "autograd/ops.h"
#include "nn/generate.h"
#include "nn/tokenizer.h"

namespace heddle::nn {
namespace {

constexpr std::int64_t kSampleProblems = 20;
constexpr std::int64_t kSampleTokens = 400;

// One row of a batch on the host.
struct Row {
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> labels;
};

std::vector<Row> rows_of(const Batch& batch) {
  const std::vector<std::int64_t> ids = batch.input_ids.to_vector<std::int64_t>();
  const std::vector<std::int64_t> labels = batch.labels.to_vector<std::int64_t>();
  const std::int64_t T = batch.input_ids.size(1);
  std::vector<Row> rows(static_cast<std::size_t>(batch.input_ids.size(0)));
  for (std::size_t b = 0; b < rows.size(); ++b) {
    const auto first = static_cast<std::int64_t>(b) * T;
    rows[b].ids.assign(ids.begin() + first, ids.begin() + first + T);
    rows[b].labels.assign(labels.begin() + first, labels.begin() + first + T);
  }
  return rows;
}

// The logits an answer is chosen from: those of bytes, where the vocabulary is larger.
Tensor byte_logits(const Tensor& logits) {  // [B, T, V] -> [B, T, at most 256]
  return slice(logits, 2, 0, std::min(logits.size(2), ByteTokenizer().vocab_size()));
}

std::string answers_text(const CausalLM& model, const Dataset& data) {
  const ByteTokenizer tokenizer;
  std::string lines;
  std::int64_t right = 0;
  const std::vector<Row> rows = rows_of(data.eval_batch(0, std::min(kSampleProblems, data.eval_size())));
  for (const Row& row : rows) {
    const auto answer_start = std::find_if(row.labels.begin(), row.labels.end(), [](std::int64_t id) { return id != kNoLoss; });
    const std::vector<std::int32_t> answer(answer_start, row.labels.end());
    const auto prompt = std::span(row.ids).first(static_cast<std::size_t>(answer_start - row.labels.begin()) + 1);
    const std::vector<std::int32_t> given =
        generate(model, prompt, {.max_new_tokens = static_cast<std::int64_t>(answer.size()), .temperature = 0, .vocab_size = tokenizer.vocab_size()});
    // An answer ends its line; print it without.
    const auto on_one_line = [&](const std::vector<std::int32_t>& ids) {
      std::string text = tokenizer.decode(ids);
      text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
      return text;
    };
    right += given == answer;
    lines += tokenizer.decode(prompt) + on_one_line(given) +
             (given == answer ? "  right\n" : "  wrong, the answer is " + on_one_line(answer) + "\n");
  }
  return concat_text("Problems not seen in training: ", right, " of ", rows.size(),
                     " right. Answers are written from the last digit to the first.\n\n", lines);
}

std::string continuation_text(const CausalLM& model, const Dataset& data, std::uint64_t seed) {
  const ByteTokenizer tokenizer;
  const Row row = rows_of(data.eval_batch(0, 1)).front();
  const auto prompt = std::span(row.ids).first((row.ids.size() + 1) / 2);
  const std::vector<std::int32_t> continuation =
      generate(model, prompt, {.max_new_tokens = kSampleTokens, .temperature = 0.8, .top_k = 40, .seed = seed,
                               .vocab_size = tokenizer.vocab_size()});
  return concat_text("Held-out text:\n\n", tokenizer.decode(prompt), "\n\nContinued by the model:\n\n",
                     tokenizer.decode(continuation), "\n");
}

}  // namespace

std::int64_t count_labels(const Batch& batch) {
  const std::vector<std::int64_t> labels = batch.labels.to_vector<std::int64_t>();
  return static_cast<std::int64_t>(labels.size()) - std::count(labels.begin(), labels.end(), kNoLoss);
}

EvalResult evaluate(CausalLM& model, const Dataset& data, std::int64_t batch_size, std::int64_t eval_iters) {
  const EvalMode mode(model);
  const Device device = model.device();
  const std::int64_t examples = data.has_exact_match() ? data.eval_size() : std::min(data.eval_size(), batch_size * eval_iters);
  double loss_sum = 0;
  std::int64_t labels = 0, matches = 0;
  for (std::int64_t first = 0; first < examples; first += batch_size) {
    const Batch batch = data.eval_batch(first, std::min(batch_size, examples - first));
    const Tensor logits = model.forward(batch.input_ids.to(device));  // [B, T, V]
    loss_sum += cross_entropy(logits, batch.labels.to(device), {.reduction = LossReduction::sum}).item();
    labels += count_labels(batch);
    if (data.has_exact_match()) matches += count_exact_matches(byte_logits(logits), batch.labels);
  }
  EvalResult result{.loss = loss_sum / static_cast<double>(labels)};
  if (data.has_exact_match()) result.exact_match = static_cast<double>(matches) / static_cast<double>(examples);
  return result;
}

std::string sample_text(CausalLM& model, const Dataset& data, std::uint64_t seed) {
  const EvalMode mode(model);
  return data.has_exact_match() ? answers_text(model, data) : continuation_text(model, data, seed);
}

}  // namespace heddle::nn
