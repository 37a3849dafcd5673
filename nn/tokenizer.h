#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace heddle::nn {

// Text as token ids: one id a byte, 0 to 255. Any bytes encode, UTF-8 or not, and decode(encode(s)) is s.
class ByteTokenizer {
 public:
  std::int64_t vocab_size() const { return 256; }
  std::vector<std::int32_t> encode(std::string_view text) const;
  // Throws heddle::Error naming the first id outside the vocabulary.
  std::string decode(std::span<const std::int32_t> ids) const;
};

}  // namespace heddle::nn
