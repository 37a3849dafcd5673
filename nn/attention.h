#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nn/linear.h"
#include "nn/norm.h"

namespace heddle::nn {

struct MultiHeadAttentionConfig {
  std::int64_t hidden_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;  // num_heads must be a multiple of it
  std::int64_t head_dim = 0;
  bool has_bias = false;                 // on all four projections
  bool is_causal = true;
  std::optional<double> rope_theta;  // rotary positions when set
  bool qk_norm = false;              // RMSNorm over each head of q and k, before rotary positions
  double qk_norm_eps = 1e-6;
  double initializer_range = 0.02;
  double output_range = 0.02;    // initial standard deviation of o_proj
  std::string kernel = "auto";   // attention variant
};

// o_proj(attention(q_proj(x), k_proj(x), v_proj(x))). Grouped-query when num_kv_heads < num_heads. The projections are
// slots ("q_proj", "k_proj", "v_proj", "o_proj") that replace_child can fill with other kinds of LinearBase. The weights of the first
// three lie one after another in memory: as plain layers, also under adapters, they are one product.
class MultiHeadAttention final : public Module {
 public:
  MultiHeadAttention(const MultiHeadAttentionConfig& config, const ModuleOptions& options, Generator& generator);

  // x [B, S, hidden_size] -> the same. positions int64 [S] for rotary positions; 0..S-1 when undefined. `dropout` is for projections
  // that have some.
  Tensor forward(const Tensor& x, const Tensor& positions = {}, Generator* dropout = nullptr) const;

 private:
  MultiHeadAttentionConfig config_;
  std::shared_ptr<LinearBase> q_proj_, k_proj_, v_proj_, o_proj_;
  std::shared_ptr<RMSNorm> q_norm_, k_norm_;  // null without qk_norm
};

// int64 [count] on a device: start, start + 1, ...
Tensor position_ids(std::int64_t start, std::int64_t count, Device device);

}  // namespace heddle::nn
