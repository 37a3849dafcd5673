#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/runtime/random.h"
#include "nn/data.h"
#include "nn/transformer.h"

// A model and data small enough to train in a test.
namespace heddle::test {

inline nn::TransformerConfig tiny_config(nn::Architecture architecture = nn::Architecture::gpt2) {
  nn::TransformerConfig config;
  config.architecture = architecture;
  config.vocab_size = 11;
  config.hidden_size = 12;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 3;
  config.num_key_value_heads = architecture == nn::Architecture::llama ? 1 : 3;
  config.intermediate_size = 20;
  config.max_position_embeddings = 9;
  return config;
}

inline nn::CausalLM tiny_model(const nn::TransformerConfig& config, std::uint64_t seed = 1, DType dtype = DType::f32) {
  Generator generator{seed};
  return nn::CausalLM(config, {.dtype = dtype}, generator);
}

// Rows of 7 random ids below 11 that mostly count upwards, about a fifth of the labels without loss.
class TinyData final : public nn::Dataset {
 public:
  explicit TinyData(std::int64_t train_size = 13, std::int64_t eval_size = 5) : Dataset(/*seed=*/3) {
    set_sizes(train_size, eval_size, 7);
  }

  bool has_exact_match() const override { return false; }
  std::string describe() const override { return concat_text("tiny data of ", train_size(), " examples"); }

 private:
  void write_example(nn::Split split, std::int64_t index, std::span<std::int64_t> ids,
                     std::span<std::int64_t> labels) const override {
    std::int64_t id = 0;
    for (std::size_t t = 0; t <= ids.size(); ++t) {
      const auto random = philox(split == nn::Split::train ? 1 : 2, static_cast<std::uint64_t>(index), t);
      id = random[0] % 4 == 0 ? random[1] % 11 : (id + 1) % 11;
      if (t > 0) labels[t - 1] = random[2] % 5 == 0 ? nn::kNoLoss : id;
      if (t < ids.size()) ids[t] = id;
    }
  }
};

inline std::vector<std::vector<double>> values_of(const std::vector<nn::NamedTensor>& tensors) {
  std::vector<std::vector<double>> out;
  for (const nn::NamedTensor& named : tensors) out.push_back(named.tensor.to_doubles());
  return out;
}

}  // namespace heddle::test
