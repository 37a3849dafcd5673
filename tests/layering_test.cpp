#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>

#include "tests/support/source_tree.h"

// The include arrows of the architecture, and where each outside library may be named.

namespace heddle {
namespace {

using test::SourceFile;
using test::source_files;

// What each layer may include, itself apart.
const std::map<std::string, std::vector<std::string>> kMayInclude = {
    {"kernels", {}},
    {"autograd", {"kernels"}},
    {"nn", {"kernels", "autograd"}},
    {"quant", {"kernels", "autograd", "nn"}},
    {"lora", {"kernels", "autograd", "nn"}},
    {"configs", {"kernels", "autograd", "nn", "quant", "lora"}},
    {"examples", {"kernels", "autograd", "nn", "quant", "lora", "configs"}},
};

struct LibraryRule {
  const char* library;
  std::regex header;
  std::regex allowed;  // paths
};

const std::vector<LibraryRule> kLibraries = {
    {"CUDA", std::regex(R"(cuda|cublas|nccl|mma\.h|cutlass)"), std::regex(R"(kernels/.*)")},
    {"yaml-cpp", std::regex(R"(yaml-cpp/.*)"), std::regex(R"(configs/.*)")},
    {"Eigen", std::regex(R"((unsupported/)?Eigen/.*)"), std::regex(R"(kernels/.*)")},
    {"threads", std::regex(R"(thread|future|omp\.h)"), std::regex(R"(kernels/runtime/parallel\.cpp)")},
};

// Calls check(file, line number, line) for every line of every layer.
template <typename Check>
void for_each_line(const Check& check) {
  for (const auto& [layer, unused] : kMayInclude)
    for (const SourceFile& file : source_files(layer))
      for (std::size_t i = 0; i < file.lines.size(); ++i) check(file, i + 1, file.lines[i]);
}

TEST(Layering, ProjectIncludesPointDownwards) {
  const std::regex include(R"re(#include "(\w+)/.*")re");
  for_each_line([&](const SourceFile& file, std::size_t line, const std::string& text) {
    std::smatch match;
    if (!std::regex_search(text, match, include) || match[1] == file.folder()) return;
    const auto& allowed = kMayInclude.at(file.folder());
    EXPECT_NE(std::find(allowed.begin(), allowed.end(), match[1]), allowed.end()) << file.path << ':' << line << ": " << text;
  });
}

TEST(Layering, OutsideLibrariesStayInTheirFolders) {
  const std::regex include(R"re(#include [<"](.*)[>"])re");  // a library's header may be quoted as well
  for_each_line([&](const SourceFile& file, std::size_t line, const std::string& text) {
    std::smatch match;
    if (!std::regex_search(text, match, include)) return;
    for (const LibraryRule& rule : kLibraries) {
      if (!std::regex_search(match[1].first, match[1].second, rule.header)) continue;
      EXPECT_TRUE(std::regex_match(file.path, rule.allowed)) << file.path << ':' << line << ": " << rule.library << ": " << text;
    }
  });
}

TEST(Layering, HeadersUseNoNamespace) {
  for_each_line([](const SourceFile& file, std::size_t line, const std::string& text) {
    if (!file.is_header()) return;
    EXPECT_EQ(text.find("using namespace"), std::string::npos) << file.path << ':' << line;
  });
}

TEST(Layering, FilesStayShort) {
  for (const char* folder : {"kernels", "autograd", "nn", "quant", "lora", "configs", "examples", "tests"})
    for (const SourceFile& file : source_files(folder))
      EXPECT_LE(file.lines.size(), file.folder() == "kernels" ? 800u : 500u) << file.path;
}

TEST(Layering, EveryLayerIsSearched) {
  for (const char* folder : {"kernels", "autograd", "nn"}) EXPECT_GT(source_files(folder).size(), 5u) << folder;
}

}  // namespace
}  // namespace heddle
