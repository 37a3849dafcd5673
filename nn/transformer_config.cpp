#include "nn/transformer_config.h"

#include "kernels/attention/attention.h"

namespace heddle::nn {
namespace {

constexpr EnumNames<Architecture> kArchitectures{kArchitectureNames};
constexpr EnumNames<Activation> kActivations{kActivationNames};
constexpr double kMaxLayers = 10'000;  // ten times the deepest models there are

}  // namespace

TransformerConfig TransformerConfig::resolved() const {
  TransformerConfig out = *this;
  out.num_key_value_heads = kv_heads();
  out.head_dim = head_size();
  out.intermediate_size = ffn_size();
  out.tie_word_embeddings = tied();
  out.hidden_act = activation();
  out.attention_bias = has_attention_bias();
  out.mlp_bias = has_mlp_bias();
  return out;
}

std::vector<Field> fields(TransformerConfig& c) {
  const Range positive = count_from(1);
  return {
      {"architecture", choice(c.architecture, kArchitectures), {.required = true}},
      {"vocab_size", &c.vocab_size, {.range = positive}},
      {"hidden_size", &c.hidden_size, {.range = positive, .required = true}},
      {"num_hidden_layers", &c.num_hidden_layers, {.range = between(1, kMaxLayers), .required = true}},
      {"num_attention_heads", &c.num_attention_heads, {.range = positive, .required = true}},
      {"num_key_value_heads", &c.num_key_value_heads, {.range = positive, .derived = "num_attention_heads"}},
      {"head_dim", &c.head_dim, {.range = between(1, kAttentionMaxHeadSize), .derived = "hidden_size / num_attention_heads"}},
      {"intermediate_size", &c.intermediate_size, {.range = positive, .derived = "4 * hidden_size"}},
      {"max_position_embeddings", &c.max_position_embeddings, {.range = positive, .required = true}},
      {"tie_word_embeddings", &c.tie_word_embeddings, {.derived = "true for gpt2, false for llama"}},
      {"hidden_act", choice(c.hidden_act, kActivations), {.derived = "gelu_new for gpt2, silu for llama"}},
      {"layer_norm_epsilon", &c.layer_norm_epsilon, {.range = above(0)}},
      {"rms_norm_eps", &c.rms_norm_eps, {.range = above(0)}},
      {"rope_theta", &c.rope_theta, {.range = above(0)}},
      {"attention_bias", &c.attention_bias, {.derived = "true for gpt2, false for llama"}},
      {"mlp_bias", &c.mlp_bias, {.derived = "true for gpt2, false for llama"}},
      {"qk_norm", &c.qk_norm, {}},
      {"resid_pdrop", &c.resid_pdrop, {.range = from_below(0, 1)}},
      {"embd_pdrop", &c.embd_pdrop, {.range = from_below(0, 1)}},
      {"initializer_range", &c.initializer_range, {.range = at_least(0)}},
  };
}

std::vector<Conflict> conflicts(const TransformerConfig& c) {
  std::vector<Conflict> out;
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  const std::int64_t heads = c.num_attention_heads;
  const bool has_whole_heads = c.head_dim || heads <= 0 || c.hidden_size % heads == 0;
  if (!has_whole_heads) {
    out.push_back({"hidden_size", "a multiple of", "num_attention_heads", number(heads), number(c.hidden_size)});
  }
  if (!c.head_dim && c.head_size() > kAttentionMaxHeadSize) {
    const std::string at_most = "at most " + number(kAttentionMaxHeadSize) + " times";
    out.push_back({"hidden_size", at_most, "num_attention_heads", number(heads), number(c.hidden_size)});
  }
  if (c.kv_heads() > 0 && heads % c.kv_heads() != 0) {
    out.push_back({"num_attention_heads", "a multiple of", "num_key_value_heads", number(c.kv_heads()), number(heads)});
  }
  const std::string architecture(name_of(kArchitectures, c.architecture));
  if (c.is_llama() && has_whole_heads && c.head_size() % 2 != 0) {
    out.push_back({"head_dim", "an even number for", "architecture", architecture, number(c.head_size())});
  }
  const bool is_gated = c.activation() == Activation::silu;
  if (is_gated != c.is_llama()) {
    const std::string_view fitting = c.is_llama() ? "silu for" : "gelu, gelu_new or gelu_pytorch_tanh for";
    const std::string_view given = name_of(kActivations, c.activation());
    out.push_back({"hidden_act", std::string(fitting), "architecture", architecture, std::string(given)});
  }
  return out;
}

void validate(const TransformerConfig& config) {
  TransformerConfig copy = config;
  require_valid("model", fields(copy), conflicts(copy));
}

}  // namespace heddle::nn
