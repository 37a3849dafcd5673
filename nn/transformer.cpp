#include "nn/transformer.h"

#include <cmath>

#include "autograd/ops.h"

namespace heddle::nn {
namespace {

std::shared_ptr<Norm> make_norm(const TransformerConfig& config, const ModuleOptions& options) {
  if (config.is_llama()) return std::make_shared<RMSNorm>(config.hidden_size, config.rms_norm_eps, options);
  return std::make_shared<LayerNorm>(config.hidden_size, config.layer_norm_epsilon, options);
}

double residual_range(const TransformerConfig& config) {
  return config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
}

MultiHeadAttentionConfig attention_config(const TransformerConfig& config, const std::string& kernel) {
  return {.hidden_size = config.hidden_size,
          .num_heads = config.num_attention_heads,
          .num_kv_heads = config.kv_heads(),
          .head_dim = config.head_size(),
          .has_bias = config.has_attention_bias(),
          .rope_theta = config.is_llama() ? std::optional(config.rope_theta) : std::nullopt,
          .qk_norm = config.qk_norm,
          .qk_norm_eps = config.rms_norm_eps,
          .initializer_range = config.initializer_range,
          .output_range = residual_range(config),
          .kernel = kernel};
}

MlpConfig mlp_config(const TransformerConfig& config) {
  return {.hidden_size = config.hidden_size,
          .intermediate_size = config.ffn_size(),
          .activation = config.activation(),
          .is_gated = config.is_llama(),
          .has_bias = config.has_mlp_bias(),
          .initializer_range = config.initializer_range,
          .output_range = residual_range(config)};
}

Tensor drop(const Tensor& x, double p, const ForwardState& state) {
  return state.dropout != nullptr ? dropout(x, p, *state.dropout) : x;
}

}  // namespace

TransformerBlock::TransformerBlock(const TransformerConfig& config, const std::string& kernel, const ModuleOptions& options,
                                   Generator& generator)
    : input_layernorm_(make_norm(config, options)),
      self_attn_(std::make_shared<MultiHeadAttention>(attention_config(config, kernel), options, generator)),
      post_attention_layernorm_(make_norm(config, options)),
      mlp_(std::make_shared<Mlp>(mlp_config(config), options, generator)),
      dropout_(config.resid_pdrop) {
  register_child("input_layernorm", input_layernorm_);
  register_child("self_attn", self_attn_);
  register_child("post_attention_layernorm", post_attention_layernorm_);
  register_child("mlp", mlp_);
}

void TransformerBlock::forward(Residual& stream, const ForwardState& state) const {
  stream.branch = drop(self_attn_->forward(input_layernorm_->forward(stream), state.positions, state.dropout), dropout_, state);
  stream.branch = drop(mlp_->forward(post_attention_layernorm_->forward(stream), state.dropout), dropout_, state);
}

Transformer::Transformer(const TransformerConfig& config, const std::string& kernel, const ModuleOptions& options,
                         Generator& generator)
    : dropout_(config.embd_pdrop) {
  const double range = config.initializer_range;
  embed_tokens_ = std::make_shared<Embedding>(config.vocab_size, config.hidden_size, range, options, generator);
  register_child("embed_tokens", embed_tokens_);
  if (!config.is_llama()) {
    embed_positions_ = std::make_shared<Embedding>(config.max_position_embeddings, config.hidden_size, range, options, generator);
    register_child("embed_positions", embed_positions_);
  }
  layers_.resize(static_cast<std::size_t>(config.num_hidden_layers));  // before any slot is registered by address
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    layers_[i] = std::make_shared<TransformerBlock>(config, kernel, options, generator);
    register_child(concat_text("layers.", i), layers_[i]);
  }
  norm_ = make_norm(config, options);
  register_child("norm", norm_);
}

Tensor Transformer::forward(const Tensor& ids, const ForwardState& state) const {
  Tensor x = embed_tokens_->forward(ids);  // [B, S, hidden]
  if (embed_positions_ != nullptr) x = add(x, embed_positions_->forward(state.positions));
  Residual stream = {drop(x, dropout_, state)};
  for (const auto& layer : layers_) layer->forward(stream, state);
  return norm_->forward(stream);
}

CausalLM::CausalLM(const TransformerConfig& config, const ModuleOptions& options, Generator& generator,
                   const std::string& kernel)
    : config_((validate(config), config.resolved())),
      model_(std::make_shared<Transformer>(config_, kernel, options, generator)),
      positions_(position_ids(0, config_.max_position_embeddings, options.device)) {
  register_child("model", model_);
  if (config_.tied()) return;
  lm_head_ = std::make_shared<Linear>(LinearConfig{config_.hidden_size, config_.vocab_size, false, config_.initializer_range},
                                      options, generator);
  register_child("lm_head", lm_head_);
}

Tensor CausalLM::forward(const Tensor& ids, Generator* dropout) const {
  HEDDLE_CHECK(ids.rank() == 2 && ids.size(1) >= 1 && ids.size(1) <= config_.max_position_embeddings,
               "causal_lm: ids must be [B, S] with S in 1..", config_.max_position_embeddings, ", got ", ids.shape());
  const bool wants_dropout = is_training() && (config_.resid_pdrop > 0 || config_.embd_pdrop > 0);
  HEDDLE_CHECK(!wants_dropout || dropout != nullptr, "causal_lm: the config has dropout; give a generator or call eval()");
  const ForwardState state = {.positions = slice(positions_, 0, 0, ids.size(1)),
                              .dropout = is_training() ? dropout : nullptr};
  const Tensor hidden = model_->forward(ids, state);  // [B, S, hidden]
  return lm_head_ != nullptr ? lm_head_->forward(hidden, state.dropout) : linear(hidden, model_->token_weight());
}

}  // namespace heddle::nn
