#include "nn/posix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <system_error>
#include <vector>

#include "kernels/runtime/check.h"
#include "kernels/runtime/parallel.h"

namespace heddle::nn {
namespace {

// Length of the well-formed UTF-8 character at the start of `text`, 0 if there is none (Unicode 15, table 3-7).
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto between = [](unsigned value, unsigned low, unsigned high) { return value >= low && value <= high; };
  const auto continues = [&](std::size_t i) { return between(byte(i), 0x80, 0xBF); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (between(lead, 0xC2, 0xDF)) return continues(1) ? 2 : 0;
  if (between(lead, 0xE0, 0xEF)) {
    // The second byte's range excludes overlong forms and surrogates.
    const bool second = between(byte(1), lead == 0xE0 ? 0xA0 : 0x80, lead == 0xED ? 0x9F : 0xBF);
    return second && continues(2) ? 3 : 0;
  }
  if (between(lead, 0xF0, 0xF4)) {
    const bool second = between(byte(1), lead == 0xF0 ? 0x90 : 0x80, lead == 0xF4 ? 0x8F : 0xBF);
    return second && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

void read_part(const FileDescriptor& file, const std::filesystem::path& path, char* out, std::int64_t nbytes, std::int64_t offset) {
  std::int64_t done = 0;
  while (done < nbytes) {
    const ssize_t count = ::pread(file.get(), out + done, static_cast<std::size_t>(nbytes - done), offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_file_error("cannot read", path, errno);
    HEDDLE_CHECK(count > 0, "cannot read ", printable_path(path), ": it ends at byte ", offset + done, ", ", nbytes,
                 " bytes were wanted from byte ", offset, "; was it changed while in use?");
    done += count;
  }
}

}  // namespace

std::string printable(std::string_view bytes) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string text;
  while (!bytes.empty()) {
    const auto lead = static_cast<unsigned char>(bytes.front());
    const bool control = lead < 0x20 || lead == 0x7F;
    const std::size_t length = control ? 0 : utf8_length(bytes);
    if (length == 0) {
      text += {'\\', 'x', kHex[lead >> 4], kHex[lead & 15]};
    } else {
      text += bytes.substr(0, length);
    }
    bytes.remove_prefix(length == 0 ? 1 : length);
  }
  return text;
}

std::string shortened(std::string_view text) {
  constexpr std::size_t kMost = 100;
  return text.size() <= kMost ? std::string(text) : concat_text(text.substr(0, kMost), "...");
}

void throw_file_error(std::string_view action, const std::filesystem::path& path, int error) {
  throw Error(concat_text(action, " ", printable_path(path), ": ", std::generic_category().message(error)));
}

bool is_present(const std::filesystem::path& path) {
  std::error_code error;
  const bool found = std::filesystem::exists(path, error);
  if (error) throw_file_error("cannot examine", path, error.value());
  return found;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

FileDescriptor open_for_reading(const std::filesystem::path& path) {
  // O_NONBLOCK: a pipe must be refused below, not waited for. It has no effect on regular files.
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) throw_file_error("cannot open", path, errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_file_error("cannot examine", path, errno);
  HEDDLE_CHECK(!S_ISDIR(status.st_mode), "cannot open ", printable_path(path), ": it is a folder, a file is needed");
  HEDDLE_CHECK(S_ISREG(status.st_mode), "cannot open ", printable_path(path), ": it is not a regular file");
  return file;
}

std::int64_t file_size(const FileDescriptor& file, const std::filesystem::path& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_file_error("cannot examine", path, errno);
  return status.st_size;
}

void read_exactly(const FileDescriptor& file, const std::filesystem::path& path, void* data, std::int64_t nbytes,
                  std::int64_t offset) {
  constexpr std::int64_t kPart = std::int64_t{1} << 23;
  const std::int64_t parts = (nbytes + kPart - 1) / kPart;
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(parts));
  parallel_tasks(parts, [&](std::int64_t i) {
    try {
      read_part(file, path, static_cast<char*>(data) + i * kPart, std::min(kPart, nbytes - i * kPart), offset + i * kPart);
    } catch (...) {
      failures[static_cast<std::size_t>(i)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

std::string read_file(const std::filesystem::path& path) {
  const FileDescriptor file = open_for_reading(path);
  std::string contents(static_cast<std::size_t>(file_size(file, path)), '\0');
  read_exactly(file, path, contents.data(), static_cast<std::int64_t>(contents.size()), 0);
  return contents;
}

void sync_to_disk(const std::filesystem::path& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) throw_file_error("cannot open", path, errno);
  // EINVAL: a file system that cannot sync folders; there is nothing more to do on one.
  if (::fsync(file.get()) != 0 && errno != EINVAL) throw_file_error("cannot sync", path, errno);
}

}  // namespace heddle::nn
