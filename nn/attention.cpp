#include "nn/attention.h"

#include <numeric>

#include "autograd/ops.h"

namespace heddle::nn {

MultiHeadAttention::MultiHeadAttention(const MultiHeadAttentionConfig& config, const ModuleOptions& options,
                                       Generator& generator)
    : config_(config) {
  HEDDLE_CHECK(config.num_kv_heads > 0 && config.num_heads % config.num_kv_heads == 0, "multi_head_attention: num_heads ",
               config.num_heads, " must be a multiple of num_kv_heads ", config.num_kv_heads);
  const auto add_projection = [&](const char* name, std::shared_ptr<LinearBase>& slot, std::int64_t in, std::int64_t out,
                                  double range) {
    slot = std::make_shared<Linear>(LinearConfig{in, out, config.bias, range}, options, generator);
    register_child(name, slot);
  };
  const std::int64_t q_size = config.num_heads * config.head_dim, kv_size = config.num_kv_heads * config.head_dim;
  add_projection("q_proj", q_proj_, config.hidden_size, q_size, config.initializer_range);
  add_projection("k_proj", k_proj_, config.hidden_size, kv_size, config.initializer_range);
  add_projection("v_proj", v_proj_, config.hidden_size, kv_size, config.initializer_range);
  add_projection("o_proj", o_proj_, q_size, config.hidden_size, config.output_range);
  if (!config.qk_norm) return;
  q_norm_ = std::make_shared<RMSNorm>(config.head_dim, config.qk_norm_eps, options);
  k_norm_ = std::make_shared<RMSNorm>(config.head_dim, config.qk_norm_eps, options);
  register_child("q_norm", q_norm_);
  register_child("k_norm", k_norm_);
}

Tensor MultiHeadAttention::heads(const LinearBase& projection, const Tensor& x, std::int64_t count) const {
  return reshape(projection.forward(x), {x.size(0), x.size(1), count, config_.head_dim});
}

Tensor MultiHeadAttention::forward(const Tensor& x, const Tensor& positions) const {
  HEDDLE_CHECK(x.rank() == 3 && x.size(2) == config_.hidden_size, "multi_head_attention: x must be [B, S, ",
               config_.hidden_size, "], got ", x.shape());
  Tensor q = heads(*q_proj_, x, config_.num_heads);           // [B, S, Hq, D]
  Tensor k = heads(*k_proj_, x, config_.num_kv_heads);        // [B, S, Hkv, D]
  const Tensor v = heads(*v_proj_, x, config_.num_kv_heads);  // [B, S, Hkv, D]
  if (q_norm_ != nullptr) {
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  }
  if (config_.rope_theta) {
    const Tensor at = positions.defined() ? positions : position_ids(0, x.size(1), x.device());
    q = rope(q, at, *config_.rope_theta);
    k = rope(k, at, *config_.rope_theta);
  }
  const Tensor out = attention(q, k, v, {.causal = config_.causal, .kernel = config_.kernel});  // [B, S, Hq, D]
  return o_proj_->forward(reshape(out, {x.size(0), x.size(1), config_.num_heads * config_.head_dim}));
}

Tensor position_ids(std::int64_t start, std::int64_t count, Device device) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), start);
  return Tensor::from_vector(ids, {count}, device);
}

}  // namespace heddle::nn
