#include "autograd/graphviz.h"

#include <gtest/gtest.h>

#include <sstream>

#include "nn/posix_file.h"
#include "nn/trainer.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_run.h"

namespace heddle {
namespace {

TEST(Graphviz, WritesOpsAsBoxesAndLeavesAsEllipses) {
  const Tensor w = test::random_leaf({4, 3}), x = test::random_tensor({2, 3});
  const Tensor y = linear(x, w);
  std::ostringstream out;

  write_graphviz(out, sum(mul(y, y)), {{"weight", w}});

  EXPECT_EQ(out.str(),
            R"(digraph heddle {
  rankdir=BT;
  node [fontname="Helvetica", fontsize=10];
  n0 [shape=box, label="sum\n[]"];
  n1 -> n0;
  n1 [shape=box, label="mul\n[2, 4]"];
  n2 -> n1;
  n2 -> n1;
  n2 [shape=box, label="linear\n[2, 4]"];
  n3 -> n2;
  n3 [shape=ellipse, style=filled, fillcolor="#e8f0fe", label="weight\n[4, 3]"];
}
)");
}

TEST(Graphviz, TensorWithoutGraphIsRefused) {
  std::ostringstream out;

  EXPECT_EQ(test::error_of([&] { write_graphviz(out, Tensor::zeros({2})); }), "write_graphviz: the tensor [2] has no graph");
}

TEST(WriteGraph, NamesEveryParameterAndLeavesTheModelAlone) {
  const test::TempFolder folder;
  const nn::CausalLM model = test::tiny_model(test::tiny_config());

  nn::write_graph(folder / "graph.dot", model, test::TinyData().train_batch(0, 2));

  const std::string dot = nn::read_file(folder / "graph.dot");
  for (const nn::NamedTensor& parameter : model.parameters()) {
    EXPECT_NE(dot.find(parameter.name), std::string::npos) << parameter.name;
    EXPECT_FALSE(parameter.tensor.grad().defined());
  }
}

}  // namespace
}  // namespace heddle
