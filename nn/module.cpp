#include "nn/module.h"

#include <algorithm>

namespace heddle::nn {

void Module::register_parameter(std::string name, const Tensor& parameter) {
  Tensor leaf = parameter;
  leaf.set_requires_grad(true);
  parameters_.push_back({std::move(name), leaf});
}

void Module::collect(const std::string& prefix, std::vector<NamedTensor>& out) const {
  for (const auto& [name, tensor] : parameters_) {
    const bool is_tied = std::any_of(out.begin(), out.end(), [&](const NamedTensor& seen) {
      return seen.tensor.impl_ptr() == tensor.impl_ptr();
    });
    if (!is_tied) out.push_back({prefix + name, tensor});
  }
  for (const Child& child : children_) child.get()->collect(prefix + child.name + ".", out);
}

std::vector<NamedTensor> Module::parameters() const {
  std::vector<NamedTensor> out;
  collect("", out);
  return out;
}

std::vector<NamedTensor> Module::trainable_parameters() const {
  std::vector<NamedTensor> out = parameters();
  std::erase_if(out, [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
  return out;
}

std::vector<NamedTensor> Module::training_state() const {
  std::vector<NamedTensor> out = state_;
  for (const auto& [name, module] : modules())
    for (const NamedTensor& state : module->state_) out.push_back({name + "." + state.name, state.tensor});
  return out;
}

std::vector<NamedModule> Module::modules() const {
  std::vector<NamedModule> out;
  for (const Child& child : children_) {
    const std::shared_ptr<Module> module = child.get();
    out.push_back({child.name, module});
    for (NamedModule& below : module->modules()) out.push_back({child.name + "." + below.name, below.module});
  }
  return out;
}

void Module::freeze() {
  for (NamedTensor& parameter : parameters()) {
    parameter.tensor.set_requires_grad(false);
    parameter.tensor.set_grad({});
  }
}

void Module::train(bool on) {
  training_ = on;
  for (const Child& child : children_) child.get()->train(on);
}

void Module::replace_child(const std::string& name, const std::shared_ptr<Module>& module) {
  for (const Child& child : children_) {
    if (name == child.name) {
      HEDDLE_CHECK(child.set(module), "replace_child: the slot '", name, "' takes another kind of module");
      module->train(training_);
      return;
    }
    if (name.starts_with(child.name + ".")) return child.get()->replace_child(name.substr(child.name.size() + 1), module);
  }
  throw Error(concat_text("replace_child: there is no child named '", name, "'"));
}

}  // namespace heddle::nn
