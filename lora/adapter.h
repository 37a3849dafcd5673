#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lora/lora_config.h"
#include "lora/lora_linear.h"
#include "nn/transformer_config.h"

namespace heddle::lora {

// One adapter in PEFT's sense: of a layer, or of layers of one input that share A because Hugging Face's model has them as one
// (GPT-2's c_attn). The tensors are handles on the live memory.
struct AdaptedLayer {
  std::vector<std::string> names;  // "model.layers.0.self_attn.q_proj"; several share A, and B and magnitude hold their rows in this order
  Tensor a;                        // [r, in]
  Tensor b;                        // [out of all, r]
  Tensor magnitude;                // [out of all] in float32 (float64 of float64 layers), undefined without DoRA
  double alpha = 0;
  double scale = 1;
  Tensor initial_a = {}, initial_b = {};  // with PiSSA: what is adapted is the base less scale * initial_b initial_a
};

// Layers to adapt, and how.
struct LayerPlan {
  std::vector<std::string> names;
  std::int64_t r = 0;
  double alpha = 0;
  double scale = 1;
};

// The names of the linear layers of a model. Throws heddle::Error if one has an adapter attached.
std::vector<std::string> linear_layers(const nn::Module& model);
std::vector<std::string> linear_layers(const nn::TransformerConfig& config);  // of the model it describes

// What the targets of `config` name among layers, in their order. Throws nn::BadValue for a target that matches nothing, with the names
// there are and the nearest of them, and for a layer claimed both by itself and in a c_attn.
std::vector<LayerPlan> plan_layers(const std::vector<std::string>& layers, const LoraConfig& config);

// Whether layers that are not plain may be replaced by plain ones.
enum class Quantised { refused, decoded };

// Trainable factors for layers of a model. The model's own layers are neither written nor copied: attaching, merging and detaching change
// what its slots hold, so several adapters can take turns on one model, and each time it computes the same bits again. Those of a fresh
// adapter are the model's own, with two exceptions: PiSSA, and 16-bit MLPs on CUDA whose first product has a GELU in it, which it has not
// under an adapter.
class Adapter {
 public:
  // Freezes every parameter of the model, then makes the factors of the planned layers from `generator`, in the layers' dtype or the
  // given one (LoraFactors). A of layers that follow each other lie one after another in memory. Nothing is attached yet. Throws
  // heddle::Error, changing nothing, if the model has an adapter attached, has not all of the layers, or for PiSSA of a quantised one.
  Adapter(nn::Module& model, const std::vector<LayerPlan>& plan, const LoraConfig& config, Generator& generator,
          std::optional<DType> dtype = std::nullopt);

  const LoraConfig& config() const { return config_; }
  const std::vector<AdaptedLayer>& layers() const { return layers_; }
  // What training changes, under the names they have in the model while attached.
  std::vector<nn::NamedTensor> parameters() const;

  // The names of layers whose own weights are all zero: an adapter there learns next to nothing.
  std::vector<std::string> zero_layers() const;

  // AdamWOptions::rate_scale: loraplus_lr_ratio for B and for DoRA's norms, 1 for A.
  double rate_scale(const nn::NamedTensor& parameter) const;

  // Puts the adapted layers in the model's slots, or plain layers of the merged weights as they are now, or the model's own layers back.
  // Throws heddle::Error, changing nothing, if a slot holds a layer of another adapter or model. Merging makes plain layers of quantised
  // ones too, larger than they were, and throws unless `quantised` allows that.
  void attach(nn::Module& model) const;
  void merge(nn::Module& model, Quantised quantised = Quantised::refused);
  void detach(nn::Module& model) const;
  // Throws heddle::Error unless the model's slots hold the layers this was made for, adapted or not.
  void check_base(const nn::Module& model) const;

 private:
  struct Slot {
    std::string name;
    std::shared_ptr<nn::LinearBase> own;
    std::shared_ptr<LoraLinear> adapted;
    std::shared_ptr<nn::Linear> merged;  // as of the last merge()
  };

  void check_slots(const nn::Module& model, bool may_be_merged) const;
  void fill_slots(nn::Module& model, std::shared_ptr<nn::LinearBase> (*choose)(const Slot&)) const;

  LoraConfig config_;
  std::vector<AdaptedLayer> layers_;
  std::vector<Slot> slots_;
};

}  // namespace heddle::lora
