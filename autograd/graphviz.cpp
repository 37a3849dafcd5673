#include "autograd/graphviz.h"

#include <unordered_map>

#include "autograd/node.h"

namespace heddle {
namespace {

std::string label_of(const Node& node, const std::vector<std::pair<std::string, Tensor>>& names) {
  std::string label(node.name());
  if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(&node)) {
    label = "leaf";
    for (const auto& [name, tensor] : names)
      if (tensor.impl_ptr() == leaf->leaf().impl_ptr()) label = name;
  }
  for (const GradSpec& output : node.outputs()) label += concat_text("\\n", output.shape);
  return label;
}

}  // namespace

void write_graphviz(std::ostream& out, const Tensor& root, const std::vector<std::pair<std::string, Tensor>>& names) {
  HEDDLE_CHECK(root.requires_grad(), "write_graphviz: the tensor ", root.shape(), " has no graph");
  std::unordered_map<const Node*, std::size_t> ids;
  std::vector<const Node*> stack;
  const auto id_of = [&](const Node* node) {
    const auto [entry, is_new] = ids.try_emplace(node, ids.size());
    if (is_new) stack.push_back(node);
    return entry->second;
  };

  out << "digraph heddle {\n  rankdir=BT;\n  node [fontname=\"Helvetica\", fontsize=10];\n";
  const Edge edge = root.gradient_edge();
  id_of(edge.node.get());
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    const bool is_leaf = dynamic_cast<const AccumulateGrad*>(node) != nullptr;
    out << "  n" << ids[node] << " [shape=" << (is_leaf ? "ellipse, style=filled, fillcolor=\"#e8f0fe\"" : "box") << ", label=\""
        << label_of(*node, names) << "\"];\n";
    for (const Edge& input : node->edges())
      if (input) {
        const std::size_t from = id_of(input.node.get());
        out << "  n" << from << " -> n" << ids[node] << ";\n";
      }
  }
  out << "}\n";
}

}  // namespace heddle
