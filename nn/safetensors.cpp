#include "nn/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>
#include <string_view>

#include "kernels/runtime/check.h"
#include "nn/atomic_file.h"
#include "nn/safetensors_header.h"

namespace heddle::nn {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data are little endian and copied as they are");

constexpr std::int64_t kLengthBytes = 8;  // the header's length, an unsigned 64-bit integer, comes first

struct DTypeName {
  DType dtype;
  std::string_view name;
};

constexpr std::array kDTypeNames = {
    DTypeName{DType::f64, "F64"}, DTypeName{DType::f32, "F32"}, DTypeName{DType::bf16, "BF16"},
    DTypeName{DType::f16, "F16"}, DTypeName{DType::i64, "I64"}, DTypeName{DType::i32, "I32"},
    DTypeName{DType::u8, "U8"},   DTypeName{DType::boolean, "BOOL"},
};

std::string_view format_name(DType dtype) {
  const auto is_it = [dtype](const DTypeName& entry) { return entry.dtype == dtype; };
  return std::find_if(kDTypeNames.begin(), kDTypeNames.end(), is_it)->name;
}

// The header's text, read only after its claimed length has been checked against the file and the cap.
std::string read_header(const FileDescriptor& file, const std::filesystem::path& path, std::int64_t nbytes,
                        const std::string& where) {
  HEDDLE_CHECK(nbytes >= kLengthBytes, where, ": the file has ", nbytes, " bytes, at least ", kLengthBytes, " are needed");
  std::uint64_t length = 0;
  read_exactly(file, path, &length, kLengthBytes, 0);
  HEDDLE_CHECK(length >= 2, where, ": header length ", length, " is too small, at least 2 is needed");
  HEDDLE_CHECK(length <= static_cast<std::uint64_t>(kMaxSafetensorsHeader), where, ": header length ", length,
               " is above the limit of ", kMaxSafetensorsHeader, "; is it a safetensors file?");
  HEDDLE_CHECK(length <= static_cast<std::uint64_t>(nbytes - kLengthBytes), where, ": header length ", length,
               " does not fit in the file, which has ", nbytes - kLengthBytes, " bytes after the length");
  std::string text(length, '\0');
  read_exactly(file, path, text.data(), static_cast<std::int64_t>(length), kLengthBytes);
  return text;
}

// JSON string literal; `what` names the text in the error for bytes that JSON cannot hold.
std::string json_string(const std::string& text, const std::string& what) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    throw Error(concat_text(what, " is not valid UTF-8"));
  }
}

using NamedTensor = std::pair<std::string, Tensor>;

// The order of the reference writer: descending element size, which keeps the data aligned, then name.
std::vector<const NamedTensor*> file_order(const std::vector<NamedTensor>& tensors, const std::string& where) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& entry : tensors) {
    const std::string what = where + ": " + describe_tensor_name(entry.first);
    HEDDLE_CHECK(entry.second.defined(), what, " is undefined");
    HEDDLE_CHECK(entry.first != kSafetensorsMetadata, what, " has a reserved name");
    order.push_back(&entry);
  }
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) { return a->first < b->first; });
  for (std::size_t i = 1; i < order.size(); ++i)
    HEDDLE_CHECK(order[i]->first != order[i - 1]->first, where, ": ", describe_tensor_name(order[i]->first),
                 " is given twice");
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return dtype_size(a->second.dtype()) > dtype_size(b->second.dtype());
  });
  return order;
}

std::string header_text(const std::vector<const NamedTensor*>& order, const std::map<std::string, std::string>& metadata,
                        const std::map<std::string, std::string>& byte_dtypes, const std::string& where) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += concat_text('"', kSafetensorsMetadata, "\":{");
    for (const auto& [key, value] : metadata) {
      const std::string what = concat_text(where, ": metadata '", printable(key), '\'');
      text += json_string(key, what) + ":" + json_string(value, what) + ",";
    }
    text.back() = '}';
    text += ",";
  }
  std::int64_t begin = 0;
  for (const NamedTensor* entry : order) {
    const auto& [name, tensor] = *entry;
    const std::int64_t end = begin + tensor.nbytes();
    text += json_string(name, where + ": " + describe_tensor_name(name)) + ":{\"dtype\":\"";
    const auto byte_dtype = byte_dtypes.find(name);
    HEDDLE_CHECK(byte_dtype == byte_dtypes.end() || tensor.dtype() == DType::u8, where, ": ", describe_tensor_name(name), " is ", tensor.dtype(),
                 "; only uint8 can stand for another dtype");
    text += byte_dtype == byte_dtypes.end() ? format_name(tensor.dtype()) : std::string_view(byte_dtype->second);
    text += "\",\"shape\":[";
    for (int d = 0; d < tensor.rank(); ++d) text += concat_text(d > 0 ? "," : "", tensor.shape()[d]);
    text += concat_text("],\"data_offsets\":[", begin, ",", end, "]},");
    begin = end;
  }
  if (text.back() == ',') text.pop_back();
  text += '}';
  // Spaces up to a multiple of 8, so that the data start aligned.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  HEDDLE_CHECK(static_cast<std::int64_t>(text.size()) <= kMaxSafetensorsHeader, where, ": the header takes ", text.size(),
               " bytes, above the limit of ", kMaxSafetensorsHeader, "; write fewer tensors to a file");
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)), file_(open_for_reading(path_)) {
  const std::string where = concat_text("safetensors: ", printable_path(path_));
  const std::int64_t nbytes = file_size(file_, path_);
  const std::string text = read_header(file_, path_, nbytes, where);
  data_offset_ = kLengthBytes + static_cast<std::int64_t>(text.size());
  SafetensorsHeader header = parse_safetensors_header(text, nbytes - data_offset_, where);
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& entry : tensors_) names.push_back(entry.first);
  return names;
}

const SafetensorsInfo& SafetensorsFile::info(const std::string& name) const {
  const auto found = tensors_.find(name);
  HEDDLE_CHECK(found != tensors_.end(), "safetensors: ", printable_path(path_), " has no ", describe_tensor_name(name),
               " among its ", tensors_.size(), " tensors");
  return found->second;
}

Tensor SafetensorsFile::read(const std::string& name) const {
  const SafetensorsInfo& entry = info(name);
  const std::string what = concat_text("safetensors: ", printable_path(path_), ": ", describe_tensor_name(name));
  const auto is_it = [&entry](const DTypeName& known) { return known.name == entry.dtype; };
  const auto known = std::find_if(kDTypeNames.begin(), kDTypeNames.end(), is_it);
  HEDDLE_CHECK(known != kDTypeNames.end(), what, " has dtype ", printable(entry.dtype.substr(0, 40)),
               "; heddle reads F64, F32, BF16, F16, I64, I32, U8 and BOOL");
  const Tensor tensor = Tensor::empty(entry.shape, known->dtype);
  auto* bytes = static_cast<unsigned char*>(tensor.mutable_view().data);
  read_exactly(file_, path_, bytes, entry.nbytes(), data_offset_ + entry.begin);
  if (known->dtype == DType::boolean) {
    // Another value in a C++ bool is undefined behaviour at its first use.
    const auto* bad = std::find_if(bytes, bytes + entry.nbytes(), [](unsigned char byte) { return byte > 1; });
    HEDDLE_CHECK(bad == bytes + entry.nbytes(), what, " of dtype BOOL holds byte ", static_cast<int>(*bad), " at element ",
                 bad - bytes, "; only 0 and 1 are legal");
  }
  return tensor;
}

Tensor SafetensorsFile::read_bytes(const std::string& name) const {
  const SafetensorsInfo& entry = info(name);
  constexpr std::array<std::string_view, 4> kByteDtypes = {"U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"};
  HEDDLE_CHECK(std::find(kByteDtypes.begin(), kByteDtypes.end(), entry.dtype) != kByteDtypes.end(), "safetensors: ", printable_path(path_), ": ",
               describe_tensor_name(name), " has dtype ", printable(entry.dtype.substr(0, 40)), ", not U8, F8_E4M3, F8_E5M2 or F8_E8M0");
  const Tensor tensor = Tensor::empty(entry.shape, DType::u8);
  read_exactly(file_, path_, tensor.mutable_view().data, entry.nbytes(), data_offset_ + entry.begin);
  return tensor;
}

void write_safetensors(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata, const std::map<std::string, std::string>& byte_dtypes) {
  const std::string where = concat_text("safetensors: ", printable_path(path));
  const std::vector<const NamedTensor*> order = file_order(tensors, where);
  const std::string header = header_text(order, metadata, byte_dtypes, where);
  const auto length = static_cast<std::uint64_t>(header.size());
  AtomicFile file(path);
  file.write(&length, kLengthBytes);
  file.write(header);
  for (const NamedTensor* entry : order) {
    const Tensor host = entry->second.to(kCpu);
    const Tensor dense = host.is_contiguous() ? host : host.clone();
    file.write(dense.view().data, dense.nbytes());
  }
  file.commit();
}

}  // namespace heddle::nn
