#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace heddle::nn {

// A 64-bit hash that tells contents apart which differ by chance or mistake; it is no protection against ones made to be alike.
// FNV-1a over words of eight bytes; the shift lets high bits reach low ones, which multiplication does not.
class Fingerprint {
 public:
  // The last word of a call is filled up with zeros.
  void add(const void* data, std::size_t nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < nbytes; i += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min(nbytes - i, sizeof(word)));
      hash_ = (hash_ ^ word) * 0x100000001B3u;
      hash_ ^= hash_ >> 32;
    }
  }
  void add(std::string_view text) { add(text.data(), text.size()); }

  // 16 hexadecimal digits.
  std::string text() const {
    std::string out(16, '0');
    std::uint64_t rest = hash_;
    for (std::size_t i = out.size(); i-- > 0; rest >>= 4) out[i] = "0123456789abcdef"[rest & 15];
    return out;
  }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325u;
};

}  // namespace heddle::nn
