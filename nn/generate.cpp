#include "nn/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "autograd/random.h"
#include "nn/transformer.h"

namespace heddle::nn {
namespace {

// Ids from the most to the least probable; among equals the lowest first.
std::vector<std::size_t> ranked(std::span<const double> logits) {
  std::vector<std::size_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), std::size_t{0});
  std::ranges::stable_sort(ids, [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  return ids;
}

// How many of the first weights reach the fraction top_p of their sum.
std::size_t nucleus_size(std::span<const double> weights, double top_p) {
  const double wanted = top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0;
  std::size_t count = 0;
  while (count < weights.size() && sum < wanted) sum += weights[count++];
  return count;
}

std::int32_t draw(const std::vector<double>& distribution, double u) {
  double sum = 0;
  std::size_t last = 0;
  for (std::size_t id = 0; id < distribution.size(); ++id) {
    if (distribution[id] == 0) continue;
    last = id;
    sum += distribution[id];
    if (u < sum) break;
  }
  return static_cast<std::int32_t>(last);  // also where rounding left the sum just below u
}

}  // namespace

void validate(const SamplingOptions& options) {
  std::string errors;
  const auto require = [&](bool is_good, const char* name, const char* expected, auto got) {
    if (!is_good) errors += concat_text(errors.empty() ? "" : "\n", "generate: ", name, ": expected ", expected, ", got ", got);
  };
  require(options.max_new_tokens >= 0, "max_new_tokens", "integer >= 0", options.max_new_tokens);
  require(options.temperature >= 0 && std::isfinite(options.temperature), "temperature", "number >= 0", options.temperature);
  require(options.top_k >= 0, "top_k", "integer >= 0", options.top_k);
  require(options.vocab_size >= 0, "vocab_size", "integer >= 0", options.vocab_size);
  require(options.top_p > 0 && options.top_p <= 1, "top_p", "number in (0, 1]", options.top_p);
  if (!errors.empty()) throw ConfigError(errors);
}

std::vector<double> sampling_distribution(std::span<const double> logits, const SamplingOptions& options) {
  validate(options);
  HEDDLE_CHECK(!logits.empty(), "generate: there are no logits to sample from");
  for (std::size_t id = 0; id < logits.size(); ++id)
    HEDDLE_CHECK(logits[id] < std::numeric_limits<double>::infinity(), "generate: the logit of id ", id, " is ", logits[id],
                 "; the model's weights may not be finite");
  const std::vector<std::size_t> ids = ranked(logits);
  const double highest = logits[ids[0]];
  HEDDLE_CHECK(std::isfinite(highest), "generate: every logit is -inf; no id can be chosen");

  std::vector<double> distribution(logits.size(), 0.0);
  if (options.temperature == 0) {
    distribution[ids[0]] = 1;
    return distribution;
  }
  const std::size_t candidates = options.top_k > 0 ? std::min(ids.size(), static_cast<std::size_t>(options.top_k)) : ids.size();
  std::vector<double> weights(candidates);
  for (std::size_t i = 0; i < candidates; ++i) weights[i] = std::exp((logits[ids[i]] - highest) / options.temperature);
  if (options.top_p < 1) weights.resize(nucleus_size(weights, options.top_p));
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (std::size_t i = 0; i < weights.size(); ++i) distribution[ids[i]] = weights[i] / sum;
  return distribution;
}

std::vector<std::int32_t> generate(const LogitsFn& logits, std::span<const std::int32_t> prompt, std::int64_t max_context,
                                   const SamplingOptions& options) {
  validate(options);
  HEDDLE_CHECK(!prompt.empty(), "generate: the prompt is empty; give at least one token to continue");
  HEDDLE_CHECK(max_context >= 1, "generate: max_context must be >= 1, got ", max_context);
  const NoGradGuard no_grad;
  Generator generator{options.seed};
  std::vector<std::int64_t> ids(prompt.begin(), prompt.end());
  std::vector<std::int32_t> out;
  for (std::int64_t i = 0; i < options.max_new_tokens; ++i) {
    const std::int64_t context = std::min(max_context, static_cast<std::int64_t>(ids.size()));
    const std::vector<std::int64_t> window(ids.end() - context, ids.end());
    const Tensor scores = logits(Tensor::from_vector(window, {1, context}));  // [1, context, V]
    HEDDLE_CHECK(scores.rank() == 3 && scores.size(0) == 1 && scores.size(1) == context, "generate: needs logits [1, ", context,
                 ", V], got ", scores.describe());
    std::vector<double> last = slice(scores, 1, context - 1, context).to_doubles();
    if (options.vocab_size > 0) last.resize(std::min(last.size(), static_cast<std::size_t>(options.vocab_size)));
    const double u = uniform({}, 0, 1, generator, DType::f64).item();
    out.push_back(draw(sampling_distribution(last, options), u));
    ids.push_back(out.back());
  }
  return out;
}

std::vector<std::int32_t> generate(const CausalLM& model, std::span<const std::int32_t> prompt, const SamplingOptions& options) {
  const Device device = model.device();
  return generate([&](const Tensor& ids) { return model.forward(ids.to(device)); }, prompt,
                  model.config().max_position_embeddings, options);
}

}  // namespace heddle::nn
