#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "nn/gradcheck_suite.h"
#include "tests/support/source_tree.h"

namespace heddle {
namespace {

std::set<std::string> recorded_nodes() {
  const std::regex declaration(R"(\bstruct (\w+Node) final\b)");
  std::set<std::string> names;
  for (const auto& file : test::source_files("autograd"))
    for (const std::string& line : file.lines)
      if (std::smatch match; file.path.starts_with("autograd/ops/") && std::regex_search(line, match, declaration))
        names.insert(match[1]);
  return names;
}

TEST(OpCoverage, EveryNodeHasAGradcheckCase) {
  std::set<std::string> covered;
  for (const nn::GradcheckCase& test : nn::gradcheck_cases()) covered.insert(test.node);
  const std::set<std::string> nodes = recorded_nodes();

  ASSERT_GE(nodes.size(), 20u) << "the search for nodes under autograd/ops/ finds too little";
  for (const std::string& node : nodes) EXPECT_TRUE(covered.contains(node)) << node << " has no case in nn/gradcheck_ops.cpp";
}

}  // namespace
}  // namespace heddle
