#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace heddle::test {

struct SourceFile {
  std::string path;  // from the repository root, "kernels/gemm/gemm.h"
  std::vector<std::string> lines;

  std::string folder() const { return path.substr(0, path.find('/')); }
  bool is_header() const { return path.ends_with(".h") || path.ends_with(".cuh"); }
};

// The C++ and CUDA files under one of the repository's folders; none if the folder does not exist.
inline std::vector<SourceFile> source_files(const std::string& folder) {
  const std::filesystem::path root = HEDDLE_SOURCE_DIR;
  std::vector<SourceFile> files;
  if (!std::filesystem::is_directory(root / folder)) return files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
    const std::string extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp" && extension != ".cu" && extension != ".cuh") continue;
    SourceFile file{std::filesystem::relative(entry.path(), root).generic_string(), {}};
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) file.lines.push_back(line);
    files.push_back(std::move(file));
  }
  return files;
}

}  // namespace heddle::test
