#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace heddle::test {

// The bytes of a file: length of the header, header, data. Made here by hand, not by the writer under test.
inline std::string file_bytes(const std::string& header, const std::string& data = "") {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return bytes + header + data;
}

inline void write_raw(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace heddle::test
