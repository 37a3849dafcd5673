#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

namespace heddle::nn {

// Text that is safe to print and to store in JSON: printable ASCII and well-formed UTF-8 stay as they are, every other
// byte becomes \xNN. File names are raw bytes and need this before they reach a message or a file we write.
std::string printable(std::string_view bytes);
// A text of unknown length for a message: its first hundred bytes and "..." where it has more.
std::string shortened(std::string_view text);
inline std::string printable_path(const std::filesystem::path& path) { return printable(path.native()); }

// Throws heddle::Error "ACTION PATH: reason", the reason being the system's text for `error` (an errno value).
[[noreturn]] void throw_file_error(std::string_view action, const std::filesystem::path& path, int error);

// Whether there is something at a path. Throws heddle::Error if that cannot be known.
bool is_present(const std::filesystem::path& path);

// An open file, closed on destruction.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// Opens a regular file for reading. Throws heddle::Error naming the path if it cannot be opened or is something else
// (a folder, a pipe).
FileDescriptor open_for_reading(const std::filesystem::path& path);

// Size in bytes of an open file.
std::int64_t file_size(const FileDescriptor& file, const std::filesystem::path& path);

// Reads exactly `nbytes` bytes from position `offset`, by all threads. Throws heddle::Error if the file ends earlier or on a read error.
void read_exactly(const FileDescriptor& file, const std::filesystem::path& path, void* data, std::int64_t nbytes,
                  std::int64_t offset);

// The whole contents of a regular file.
std::string read_file(const std::filesystem::path& path);

// Waits until a file or folder is on the disk.
void sync_to_disk(const std::filesystem::path& path);

}  // namespace heddle::nn
