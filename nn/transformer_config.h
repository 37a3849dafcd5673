#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "nn/config_field.h"

namespace heddle::nn {

enum class Architecture { gpt2, llama };
enum class Activation { gelu, gelu_tanh, silu };

inline constexpr std::array<std::pair<std::string_view, Architecture>, 2> kArchitectureNames{
    {{"gpt2", Architecture::gpt2}, {"llama", Architecture::llama}}};

// Hugging Face spellings; the first name of a value is the one written.
inline constexpr std::array<std::pair<std::string_view, Activation>, 4> kActivationNames{
    {{"gelu", Activation::gelu}, {"gelu_new", Activation::gelu_tanh}, {"gelu_pytorch_tanh", Activation::gelu_tanh},
     {"silu", Activation::silu}}};

// A decoder-only transformer, keys spelt as in Hugging Face configs.
//   gpt2   LayerNorm, learned positions, an MLP of two matrices
//   llama  RMSNorm, rotary positions, a gated MLP of three matrices (SwiGLU)
// Sizes of 0 must be set by the caller. Optionals have defaults that depend on other keys: read them through the
// functions of the same subject.
struct TransformerConfig {
  Architecture architecture = Architecture::gpt2;
  std::int64_t vocab_size = 256;
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::optional<std::int64_t> num_key_value_heads = {};
  std::optional<std::int64_t> head_dim = {};
  std::optional<std::int64_t> intermediate_size = {};
  std::int64_t max_position_embeddings = 0;
  std::optional<bool> tie_word_embeddings = {};
  std::optional<Activation> hidden_act = {};
  double layer_norm_epsilon = 1e-5;  // gpt2
  double rms_norm_eps = 1e-6;        // llama, and the q/k norms of both
  double rope_theta = 10000;         // llama
  std::optional<bool> attention_bias = {};
  std::optional<bool> mlp_bias = {};
  bool qk_norm = false;  // RMSNorm over each head of q and k, before rotary positions
  double resid_pdrop = 0;
  double embd_pdrop = 0;
  double initializer_range = 0.02;

  bool is_llama() const { return architecture == Architecture::llama; }
  std::int64_t kv_heads() const { return num_key_value_heads.value_or(num_attention_heads); }
  std::int64_t head_size() const { return head_dim.value_or(hidden_size / std::max<std::int64_t>(num_attention_heads, 1)); }
  std::int64_t ffn_size() const { return intermediate_size.value_or(4 * hidden_size); }
  bool tied() const { return tie_word_embeddings.value_or(!is_llama()); }
  Activation activation() const { return hidden_act.value_or(is_llama() ? Activation::silu : Activation::gelu_tanh); }
  bool has_attention_bias() const { return attention_bias.value_or(!is_llama()); }
  bool has_mlp_bias() const { return mlp_bias.value_or(!is_llama()); }

  // The same model with every optional filled in.
  TransformerConfig resolved() const;

  friend bool operator==(const TransformerConfig&, const TransformerConfig&) = default;
};

// The fields point into `config`.
std::vector<Field> fields(TransformerConfig& config);

// Rules between keys: whole heads, whole groups of query heads, even rotary heads, an activation the architecture has.
std::vector<Conflict> conflicts(const TransformerConfig& config);

// Throws heddle::ConfigError naming every key out of bounds and every conflict.
void validate(const TransformerConfig& config);

}  // namespace heddle::nn
