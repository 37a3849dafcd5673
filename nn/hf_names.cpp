#include "nn/hf_names.h"

#include <string_view>
#include <utility>

namespace heddle::nn {
namespace {

constexpr std::string_view kLayers = "model.layers.";

struct Renamed {
  std::string_view ours;
  std::string_view theirs;
  int part = 0;
  int parts = 1;
};

constexpr Renamed kGpt2[] = {
    {"self_attn.q_proj", "attn.c_attn", 0, 3}, {"self_attn.k_proj", "attn.c_attn", 1, 3},
    {"self_attn.v_proj", "attn.c_attn", 2, 3}, {"self_attn.o_proj", "attn.c_proj"},
    {"mlp.up_proj", "mlp.c_fc"},               {"mlp.down_proj", "mlp.c_proj"},
};

}  // namespace

HfLinear hf_linear(Architecture architecture, const std::string& name) {
  if (architecture == Architecture::llama || name == "lm_head") return {name};
  const std::size_t dot = name.find('.', kLayers.size());
  if (name.starts_with(kLayers) && dot != std::string::npos)
    for (const auto& [ours, theirs, part, parts] : kGpt2)
      if (std::string_view(name).substr(dot + 1) == ours)
        return {concat_text("transformer.h.", name.substr(kLayers.size(), dot + 1 - kLayers.size()), theirs), part, parts};
  throw Error(concat_text("hf_names: the gpt2 architecture has no linear layer '", name, "'"));
}

}  // namespace heddle::nn
