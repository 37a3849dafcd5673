#pragma once

#include <string>
#include <vector>

#include "nn/attention.h"
#include "nn/embedding.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "nn/transformer_config.h"

namespace heddle::nn {

// What every block of one forward pass shares.
struct ForwardState {
  Tensor positions;              // int64 [S]
  Generator* dropout = nullptr;  // draws the masks; dropout is off when null
};

// Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x)).
class TransformerBlock final : public Module {
 public:
  TransformerBlock(const TransformerConfig& config, const std::string& kernel, const ModuleOptions& options,
                   Generator& generator);
  void forward(Residual& stream, const ForwardState& state) const;  // [B, S, hidden_size]

 private:
  std::shared_ptr<Norm> input_layernorm_;
  std::shared_ptr<MultiHeadAttention> self_attn_;
  std::shared_ptr<Norm> post_attention_layernorm_;
  std::shared_ptr<Mlp> mlp_;
  double dropout_;
};

// Embeddings, blocks and the final norm; everything but the head.
class Transformer final : public Module {
 public:
  Transformer(const TransformerConfig& config, const std::string& kernel, const ModuleOptions& options, Generator& generator);
  Tensor forward(const Tensor& ids, const ForwardState& state) const;  // int64 [B, S] -> [B, S, hidden_size]
  const Tensor& token_weight() const { return embed_tokens_->weight(); }

 private:
  std::shared_ptr<Embedding> embed_tokens_;
  std::shared_ptr<Embedding> embed_positions_;  // null for llama
  std::vector<std::shared_ptr<TransformerBlock>> layers_;
  std::shared_ptr<Norm> norm_;
  double dropout_;
};

// A decoder-only language model in the architecture of GPT-2 or Llama (see TransformerConfig). Matrices start from
// N(0, initializer_range), those that write to the residual stream from N(0, initializer_range / sqrt(2 layers)) as in
// GPT-2; norms at 1, biases at 0. A tied head is the embedding itself: one tensor, listed once.
class CausalLM final : public Module {
 public:
  // `kernel` names the attention variant. Throws heddle::ConfigError if the config is not valid.
  CausalLM(const TransformerConfig& config, const ModuleOptions& options, Generator& generator,
           const std::string& kernel = "auto");

  // Logits [B, S, vocab_size] of ids int64 [B, S], 1 <= S <= max_position_embeddings. In training mode `dropout` draws
  // the dropout masks; it must be given if the config has dropout.
  Tensor forward(const Tensor& ids, Generator* dropout = nullptr) const;
  const TransformerConfig& config() const { return config_; }
  Device device() const { return model_->token_weight().device(); }

 private:
  TransformerConfig config_;
  std::shared_ptr<Transformer> model_;
  std::shared_ptr<LinearBase> lm_head_;  // null when tied
  Tensor positions_;                     // int64 [max_position_embeddings]: 0, 1, 2, ...
};

}  // namespace heddle::nn
