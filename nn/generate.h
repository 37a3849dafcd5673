#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "autograd/tensor.h"

namespace heddle::nn {

class CausalLM;

struct SamplingOptions {
  std::int64_t max_new_tokens = 100;
  double temperature = 1.0;  // >= 0; 0 takes the most probable id
  std::int64_t top_k = 0;    // keeps the k most probable ids; 0 keeps all
  double top_p = 1.0;        // in (0, 1]: keeps the fewest most probable ids whose probabilities sum to at least top_p
  std::uint64_t seed = 0;
  std::int64_t vocab_size = 0;  // takes only ids below it, where a tokenizer has fewer than the model; 0: any
};

// Throws heddle::ConfigError naming every option out of bounds.
void validate(const SamplingOptions& options);

// The distribution the next id is drawn from: softmax(logits / temperature), cut to top_k, then to top_p of what is
// left, and scaled to sum 1. Among equal logits the lowest ids are kept first.
//   logits [V], in float64; -inf is a probability of 0
// Throws heddle::Error if a logit is NaN or +inf, or all are -inf.
std::vector<double> sampling_distribution(std::span<const double> logits, const SamplingOptions& options);

// int64 [1, S] -> logits [1, S, V].
using LogitsFn = std::function<Tensor(const Tensor& ids)>;

// Continues `prompt` by options.max_new_tokens ids and returns those. Every step recomputes the last `max_context`
// ids, without recording a graph. The result is a function of the logits, the prompt and the options.
// Throws heddle::Error if the prompt is empty or max_context < 1, and as validate and sampling_distribution do.
std::vector<std::int32_t> generate(const LogitsFn& logits, std::span<const std::int32_t> prompt, std::int64_t max_context,
                                   const SamplingOptions& options);

// The same from a model in evaluation mode, on the device of its parameters.
std::vector<std::int32_t> generate(const CausalLM& model, std::span<const std::int32_t> prompt, const SamplingOptions& options);

}  // namespace heddle::nn
