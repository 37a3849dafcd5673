#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "autograd/tensor.h"
#include "nn/posix_file.h"

namespace heddle::nn {

// What the header of a safetensors file says about one tensor.
struct SafetensorsInfo {
  std::string dtype;  // the format's spelling: "F32", "BF16", "F8_E4M3", ...
  Shape shape;
  std::int64_t begin = 0;  // byte range [begin, end), from the end of the header
  std::int64_t end = 0;

  std::int64_t nbytes() const { return end - begin; }
};

// A safetensors file open for reading. Format: https://huggingface.co/docs/safetensors, "Format".
//
// The constructor checks the whole header before anything is allocated by a size that the file claims, and throws
// heddle::Error with the file, the tensor and both sizes for: a header length of less than 2, more than 100 MB or more
// than the file; a header that is not a JSON object of the expected form, duplicate names included; sizes and offsets
// that are negative, fractional, reversed or overflow; a byte range that does not match dtype and shape; overlaps,
// holes, and data that ends before or after the file does; a rank above kMaxRank.
// The file is read with pread, never mapped: a tensor stays valid when the file is replaced or removed.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  std::vector<std::string> names() const;  // in alphabetical order
  bool contains(const std::string& name) const { return tensors_.count(name) > 0; }
  const SafetensorsInfo& info(const std::string& name) const;  // throws heddle::Error if there is no such tensor
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // A dense tensor on the host. Dtypes: F64 F32 BF16 F16 I64 I32 U8 BOOL. Throws heddle::Error on another dtype and
  // on a BOOL byte that is neither 0 nor 1.
  Tensor read(const std::string& name) const;

  // The bytes of a tensor of one byte an element, whatever they mean: U8, F8_E4M3, F8_E5M2, F8_E8M0. Throws heddle::Error on another
  // dtype.
  Tensor read_bytes(const std::string& name) const;

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
  std::int64_t data_offset_ = 0;  // where the header ends
  std::map<std::string, SafetensorsInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Writes tensors as one safetensors file, replacing an older one (Note: Safe writing). Any device, dtype, shape and
// strides; the data are written dense, by descending element size, then by name. Throws heddle::Error if a name is
// used twice or is "__metadata__", a name or a metadata text is not UTF-8, a tensor is undefined, or the header
// would pass 100 MB. `byte_dtypes` names the dtypes of uint8 tensors that hold something else: {"w": "F8_E4M3"}.
void write_safetensors(const std::filesystem::path& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {},
                       const std::map<std::string, std::string>& byte_dtypes = {});

}  // namespace heddle::nn
