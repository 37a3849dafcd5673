#include "nn/attention.h"

#include <iterator>
#include <numeric>
#include <utility>

#include "autograd/ops.h"

namespace heddle::nn {

MultiHeadAttention::MultiHeadAttention(const MultiHeadAttentionConfig& config, const ModuleOptions& options,
                                       Generator& generator)
    : config_(config) {
  HEDDLE_CHECK(config.num_kv_heads > 0 && config.num_heads % config.num_kv_heads == 0, "multi_head_attention: num_heads ",
               config.num_heads, " must be a multiple of num_kv_heads ", config.num_kv_heads);
  const std::int64_t q_size = config.num_heads * config.head_dim, kv_size = config.num_kv_heads * config.head_dim;
  const std::int64_t sizes[] = {q_size, kv_size, kv_size};
  const std::pair<const char*, std::shared_ptr<LinearBase>*> slots[] = {{"q_proj", &q_proj_}, {"k_proj", &k_proj_}, {"v_proj", &v_proj_}};
  const Tensor weights = Tensor::empty({q_size + 2 * kv_size, config.hidden_size}, options.dtype, options.device);
  const Tensor biases = Tensor::empty({q_size + 2 * kv_size}, options.dtype, options.device);  // unused without bias
  std::int64_t start = 0;
  for (std::size_t i = 0; i < std::size(slots); start += sizes[i++]) {
    const auto& [name, slot] = slots[i];
    *slot = std::make_shared<Linear>(LinearConfig{config.hidden_size, sizes[i], config.has_bias, config.initializer_range}, options, generator,
                                     slice(weights, 0, start, start + sizes[i]), slice(biases, 0, start, start + sizes[i]));
    register_child(name, *slot);
  }
  o_proj_ = std::make_shared<Linear>(LinearConfig{q_size, config.hidden_size, config.has_bias, config.output_range}, options, generator);
  register_child("o_proj", o_proj_);
  if (!config.qk_norm) return;
  q_norm_ = std::make_shared<RMSNorm>(config.head_dim, config.qk_norm_eps, options);
  k_norm_ = std::make_shared<RMSNorm>(config.head_dim, config.qk_norm_eps, options);
  register_child("q_norm", q_norm_);
  register_child("k_norm", k_norm_);
}

Tensor MultiHeadAttention::forward(const Tensor& x, const Tensor& positions, Generator* dropout) const {
  HEDDLE_CHECK(x.rank() == 3 && x.size(2) == config_.hidden_size, "multi_head_attention: x must be [B, S, ",
               config_.hidden_size, "], got ", x.shape());
  const std::vector<const LinearBase*> slots = {q_proj_.get(), k_proj_.get(), v_proj_.get()};
  std::vector<Tensor> parts;
  // The norms of queries and keys want dense heads, not columns of a wider matrix.
  if (q_norm_ == nullptr) parts = forward_all(slots, x, dropout);
  else
    for (const LinearBase* slot : slots) parts.push_back(slot->forward(x, dropout));
  for (Tensor& part : parts) part = reshape(part, {x.size(0), x.size(1), -1, config_.head_dim});
  Tensor q = parts[0], k = parts[1];  // [B, S, Hq, D], [B, S, Hkv, D]
  const Tensor& v = parts[2];         // [B, S, Hkv, D]
  if (q_norm_ != nullptr) {
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  }
  if (config_.rope_theta) {
    const Tensor at = positions.defined() ? positions : position_ids(0, x.size(1), x.device());
    q = rope(q, at, *config_.rope_theta);
    k = rope(k, at, *config_.rope_theta);
  }
  const Tensor out = attention(q, k, v, {.is_causal = config_.is_causal, .kernel = config_.kernel});  // [B, S, Hq, D]
  return o_proj_->forward(reshape(out, {x.size(0), x.size(1), config_.num_heads * config_.head_dim}), dropout);
}

Tensor position_ids(std::int64_t start, std::int64_t count, Device device) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), start);
  return Tensor::from_vector(ids, {count}, device);
}

}  // namespace heddle::nn
