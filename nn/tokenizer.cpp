#include "nn/tokenizer.h"

#include "kernels/runtime/check.h"

namespace heddle::nn {

std::vector<std::int32_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  ids.reserve(text.size());
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string ByteTokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  text.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    HEDDLE_CHECK(ids[i] >= 0 && ids[i] < vocab_size(), "tokenizer: id ", ids[i], " at position ", i,
                 " is not a byte; ids are 0 to ", vocab_size() - 1);
    text.push_back(static_cast<char>(ids[i]));
  }
  return text;
}

}  // namespace heddle::nn
