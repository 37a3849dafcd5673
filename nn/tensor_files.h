#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "nn/safetensors.h"

namespace heddle::nn {

// Note: Weights in files
// The weights of a model are in its folder as model.safetensors, or split over the files that model.safetensors.index.json names, as Hugging
// Face splits large ones: {"weight_map": {tensor: file}}. What else an index says is not read, as published total sizes need not be right.
// Where there is one, it alone counts: what else lies in the folder is not read either.
inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";

// Whether a folder holds weights. Throws heddle::Error if that cannot be known.
bool has_weights(const std::filesystem::path& folder);

// The tensors of one safetensors file or of several.
class TensorFiles {
 public:
  // Throws heddle::Error as SafetensorsFile does.
  explicit TensorFiles(const std::filesystem::path& file);
  // The weights in a folder. Throws heddle::Error naming the index and what is wrong in it, before any tensor is read: another form, a file that
  // is not there or not in the folder, a tensor that is not in the file it is said to be in or in another one as well, a tensor that it does not
  // name.
  static TensorFiles of_model(const std::filesystem::path& folder);

  std::vector<std::string> names() const;  // in alphabetical order
  bool contains(const std::string& name) const { return places_.count(name) > 0; }
  // Of a tensor, as SafetensorsFile has them. Throw heddle::Error for a name that no file has.
  const SafetensorsInfo& info(const std::string& name) const { return file_of(name).info(name); }
  Tensor read(const std::string& name) const { return file_of(name).read(name); }
  Tensor read_bytes(const std::string& name) const { return file_of(name).read_bytes(name); }

  // The file a tensor is in, for messages; of one that is in none, what would say where it is.
  std::string file_name(const std::string& name) const;
  std::vector<std::filesystem::path> paths() const;  // in alphabetical order

 private:
  TensorFiles() = default;
  void add(const std::filesystem::path& file);
  const SafetensorsFile& file_of(const std::string& name) const;

  std::string title_;  // of the file, or of the index
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t> places_;  // in files_
};

}  // namespace heddle::nn
