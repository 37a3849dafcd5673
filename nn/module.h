#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/tensor.h"

namespace heddle::nn {

// Where and in what precision the parameters of a new module live.
struct ModuleOptions {
  DType dtype = DType::f32;
  Device device = kCpu;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

class Module;

struct NamedModule {
  std::string name;
  std::shared_ptr<Module> module;
};

// A tree of layers. A module owns parameters (leaf tensors) and child modules, each under a name; full names join with
// dots and follow Hugging Face: "model.layers.0.self_attn.q_proj.weight". A parameter is trainable exactly when it
// requires a gradient; train() and eval() never change that. Modules are neither copied nor moved: their slots are
// registered by address.
class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // All parameters in registration order, depth first, each tensor once.
  std::vector<NamedTensor> parameters() const;
  std::vector<NamedTensor> trainable_parameters() const;

  // What training has to continue with beside parameters and the optimiser's state, in the same order.
  std::vector<NamedTensor> training_state() const;

  // Every module below this one, depth first.
  std::vector<NamedModule> modules() const;

  // Makes every parameter below untrainable and drops its gradient.
  void freeze();

  // Training mode turns dropout on. It is set for the whole subtree.
  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const { return training_; }

  // Puts `module` in the slot of the named descendant ("model.layers.0.self_attn.q_proj"). Throws if there is no such
  // name or the slot holds another kind of module.
  void replace_child(const std::string& name, const std::shared_ptr<Module>& module);

 protected:
  void register_parameter(std::string name, const Tensor& parameter);
  void register_state(std::string name, const Tensor& state) { state_.push_back({std::move(name), state}); }

  // `slot` must be a member that lives as long as this module.
  template <typename T>
  void register_child(std::string name, std::shared_ptr<T>& slot) {
    children_.push_back({std::move(name), [&slot] { return std::static_pointer_cast<Module>(slot); },
                         [&slot](const std::shared_ptr<Module>& module) {
                           const auto typed = std::dynamic_pointer_cast<T>(module);
                           if (typed != nullptr) slot = typed;
                           return typed != nullptr;
                         }});
  }

 private:
  struct Child {
    std::string name;
    std::function<std::shared_ptr<Module>()> get;
    std::function<bool(const std::shared_ptr<Module>&)> set;  // false if the slot does not take this kind of module
  };

  void collect(const std::string& prefix, std::vector<NamedTensor>& out) const;

  std::vector<NamedTensor> parameters_, state_;
  std::vector<Child> children_;
  bool training_ = true;
};

}  // namespace heddle::nn
