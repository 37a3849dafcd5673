#include "nn/tensor_files.h"

#include <climits>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/runtime/check.h"
#include "nn/json_text.h"
#include "nn/safetensors_header.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The files of an index by the names of their tensors.
std::map<std::string, std::string> read_index(const fs::path& path) {
  const json in = read_json(path);
  const std::string where = printable_path(path);
  HEDDLE_CHECK(in.is_object() && in.contains("weight_map") && in.at("weight_map").is_object() && !in.at("weight_map").empty(), where,
               ": there is no weight_map of tensors and their files");
  std::map<std::string, std::string> out;
  for (const auto& [name, file] : in.at("weight_map").items()) {
    const std::string text = file.is_string() ? file.get<std::string>() : file.dump();
    const bool is_name = !text.empty() && text.size() <= NAME_MAX && text != "." && text != ".." && text.find('/') == std::string::npos;
    HEDDLE_CHECK(file.is_string() && is_name, where, ": ", describe_tensor_name(name), " is in \"", printable(shortened(text)),
                 "\", which is not the name of a file in the folder");
    out[name] = text;
  }
  return out;
}

}  // namespace

bool has_weights(const fs::path& folder) { return is_present(folder / kWeightsFile) || is_present(folder / kWeightsIndex); }

TensorFiles::TensorFiles(const fs::path& file) : title_(file.filename().native()) { add(file); }

TensorFiles TensorFiles::of_model(const fs::path& folder) {
  const fs::path path = folder / kWeightsIndex;
  if (!is_present(path)) return TensorFiles(folder / kWeightsFile);
  const std::map<std::string, std::string> index = read_index(path);
  const std::string where = printable_path(path);
  TensorFiles out;
  out.title_ = kWeightsIndex;
  std::set<std::string> files;
  for (const auto& [name, file] : index) files.insert(file);
  for (const std::string& file : files) {
    HEDDLE_CHECK(is_present(folder / file), where, " names ", printable(file), ", which is not there");
    out.add(folder / file);
    for (const std::string& name : out.files_.back().names()) {
      const auto found = index.find(name);
      HEDDLE_CHECK(found != index.end(), where, " does not name ", describe_tensor_name(name), ", which is in ", printable(file));
      HEDDLE_CHECK(found->second == file, where, ": ", describe_tensor_name(name), " is in ", printable(file), ", and to be in ",
                   printable(found->second));
    }
  }
  for (const auto& [name, file] : index)
    HEDDLE_CHECK(out.contains(name), where, ": ", describe_tensor_name(name), " is not in ", printable(file));
  return out;
}

void TensorFiles::add(const fs::path& file) {
  files_.emplace_back(file);
  for (const std::string& name : files_.back().names()) places_[name] = files_.size() - 1;
}

std::vector<std::string> TensorFiles::names() const {
  std::vector<std::string> out;
  for (const auto& [name, place] : places_) out.push_back(name);
  return out;
}

const SafetensorsFile& TensorFiles::file_of(const std::string& name) const {
  const auto found = places_.find(name);
  HEDDLE_CHECK(found != places_.end(), printable(title_), " has no ", describe_tensor_name(name));
  return files_[found->second];
}

std::string TensorFiles::file_name(const std::string& name) const {
  return contains(name) ? file_of(name).path().filename().native() : title_;
}

std::vector<fs::path> TensorFiles::paths() const {
  std::vector<fs::path> out;
  for (const SafetensorsFile& file : files_) out.push_back(file.path());
  return out;
}

}  // namespace heddle::nn
