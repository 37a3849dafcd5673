#pragma once

#include <string>

#include "nn/transformer_config.h"

namespace heddle::nn {

// Where the Hugging Face model of the same architecture keeps a Linear layer. The names of LlamaForCausalLM are ours.
// GPT2LMHeadModel has one layer for queries, keys and values, whose outputs are theirs in this order.
struct HfLinear {
  std::string name;  // "transformer.h.0.attn.c_attn"
  int part = 0;      // our layer's place in a layer that joins several
  int parts = 1;

  friend bool operator==(const HfLinear&, const HfLinear&) = default;
};

// `name` is the layer's in CausalLM: "model.layers.0.self_attn.q_proj". Throws heddle::Error if the architecture has no such layer.
HfLinear hf_linear(Architecture architecture, const std::string& name);

}  // namespace heddle::nn
