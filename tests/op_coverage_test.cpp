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

// Public functions, some of which record another's node. The one that is not differentiable is left out.
std::set<std::string> public_ops() {
  const std::regex declaration(R"(^(Tensor|AttentionResult|std::vector<Tensor>) (\w+)\()");
  std::set<std::string> names;
  for (const auto& file : test::source_files("autograd"))
    for (const std::string& line : file.lines)
      if (std::smatch match; file.path == "autograd/ops.h" && std::regex_search(line, match, declaration)) names.insert(match[2]);
  names.erase("sum_to");
  return names;
}

TEST(OpCoverage, EveryPublicOpHasAGradcheckCaseOfItsName) {
  std::set<std::string> covered;
  for (const nn::GradcheckCase& test : nn::gradcheck_cases()) covered.insert(test.name.substr(0, test.name.find(' ')));
  const std::set<std::string> ops = public_ops();

  ASSERT_GE(ops.size(), 40u) << "the search for functions in autograd/ops.h finds too little";
  for (const std::string& op : ops) EXPECT_TRUE(covered.contains(op)) << op << " has no case in nn/gradcheck_ops.cpp";
}

}  // namespace
}  // namespace heddle
