#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "nn/safetensors.h"

namespace heddle::nn {

// The cap of the reference implementation, on reading and on writing.
inline constexpr std::int64_t kMaxSafetensorsHeader = 100'000'000;
inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";

struct SafetensorsHeader {
  std::map<std::string, SafetensorsInfo> tensors;
  std::map<std::string, std::string> metadata;
};

// Parses the JSON text and checks it against `data_nbytes`, the number of bytes that follow it in the file. Errors
// (listed at SafetensorsFile) start with `where`, the printable name of the file.
SafetensorsHeader parse_safetensors_header(std::string_view text, std::int64_t data_nbytes, const std::string& where);

// "tensor 'NAME'" for messages, safe to print and cut to a readable length.
std::string describe_tensor_name(std::string_view name);

}  // namespace heddle::nn
