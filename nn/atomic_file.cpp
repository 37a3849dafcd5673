#include "nn/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <functional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "kernels/runtime/check.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporaryMark = ".tmp-";

fs::path parent_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// "runs/x/" names the folder runs/x: without this its temporary sibling would lie inside it.
fs::path without_trailing_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

// Calls create(sibling) with names next to `target` until one is free. `create` returns whether it made the entry, and
// otherwise leaves the reason in errno.
fs::path make_sibling(const fs::path& target, const std::function<bool(const fs::path&)>& create) {
  for (int attempt = 0;; ++attempt) {
    fs::path sibling = target;
    sibling += concat_text(kTemporaryMark, ::getpid(), "-", attempt);
    if (create(sibling)) return sibling;
    if (errno == EEXIST || errno == ENOTEMPTY) continue;
    HEDDLE_CHECK(errno != ENOENT, "cannot write ", printable_path(target), ": the folder ",
                 printable_path(parent_of(target)), " does not exist; create it first");
    throw_file_error("cannot write", target, errno);
  }
}

// Whether a name is one that make_sibling gives.
bool is_temporary_name(const std::string& name) {
  const std::size_t mark = name.rfind(kTemporaryMark);
  if (mark == std::string::npos || mark == 0) return false;
  const std::string suffix = name.substr(mark + kTemporaryMark.size());
  int matched = -1;
  std::sscanf(suffix.c_str(), "%*[0-9]-%*[0-9]%n", &matched);
  return matched == static_cast<int>(suffix.size());
}

void remove_leftovers(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
    if (is_temporary_name(entry.path().filename().native())) leftovers.push_back(entry.path());
  if (error) throw_file_error("cannot list", folder, error.value());
  for (const fs::path& leftover : leftovers) {
    fs::remove_all(leftover, error);
    if (error) throw_file_error("cannot remove", leftover, error.value());
  }
}

// Locks a folder that was just made. Fails with EEXIST where another process took it for abandoned; that it cannot be locked is no failure.
bool lock_folder(const fs::path& folder, FileDescriptor& lock) {
  lock = FileDescriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  const bool is_open = lock.get() >= 0;
  struct stat status {};
  const bool is_lost = is_open ? ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK : errno == ENOENT;
  if (!is_lost && (!is_open || (::fstat(lock.get(), &status) == 0 && status.st_nlink > 0))) return true;
  errno = EEXIST;
  return false;
}

[[noreturn]] void refuse_existing(const fs::path& target) {
  throw Error(concat_text("cannot write folder ", printable_path(target), ": it exists, and a new one was to be written; give another name"));
}

// Renames, and returns whether that worked, with the reason in errno. File systems without RENAME_NOREPLACE (NFS) get the plain call, which
// replaces nothing but an empty folder.
bool rename_folder(const fs::path& from, const fs::path& to, unsigned flags) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0) return true;
  return flags == RENAME_NOREPLACE && errno == EINVAL && ::rename(from.c_str(), to.c_str()) == 0;
}

// Removes what processes that are gone left of writing the folder `target`: a lock on it ended with them.
void remove_abandoned(const fs::path& target) {
  const std::string start = target.filename().native() + std::string(kTemporaryMark);
  std::error_code ignored;
  std::vector<fs::path> siblings;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent_of(target), ignored)) {
    const std::string name = entry.path().filename().native();
    if (name.starts_with(start) && name.rfind(kTemporaryMark) == start.size() - kTemporaryMark.size() && is_temporary_name(name))
      siblings.push_back(entry.path());
  }
  for (const fs::path& sibling : siblings) {
    FileDescriptor lock(::open(sibling.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (lock.get() >= 0 && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) fs::remove_all(sibling, ignored);
  }
}

}  // namespace

AtomicFile::AtomicFile(fs::path target) : target_(std::move(target)) {
  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0) {
    HEDDLE_CHECK(!S_ISDIR(status.st_mode), "cannot write ", printable_path(target_), ": it is a folder; give a file name");
    HEDDLE_CHECK(S_ISREG(status.st_mode), "cannot write ", printable_path(target_), ": it is not a regular file");
  }
  temporary_ = make_sibling(target_, [this](const fs::path& sibling) {
    file_ = FileDescriptor(::open(sibling.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    return file_.get() >= 0;
  });
}

AtomicFile::~AtomicFile() {
  if (!committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, std::int64_t nbytes) {
  const auto* bytes = static_cast<const char*>(data);
  while (nbytes > 0) {
    const ssize_t count = ::write(file_.get(), bytes, static_cast<std::size_t>(nbytes));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_file_error("cannot write", target_, errno);
    bytes += count;
    nbytes -= count;
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) throw_file_error("cannot sync", target_, errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) throw_file_error("cannot replace", target_, errno);
  committed_ = true;
  sync_to_disk(parent_of(target_));
}

void write_file(const fs::path& target, std::string_view contents) {
  AtomicFile file(target);
  file.write(contents);
  file.commit();
}

AtomicFolder::AtomicFolder(fs::path target, Existing existing) : target_(without_trailing_slash(target)), existing_(existing) {
  std::error_code error;
  if (existing_ == Existing::refused && fs::exists(fs::symlink_status(target_, error))) refuse_existing(target_);
  const fs::file_status status = fs::status(target_, error);
  HEDDLE_CHECK(!fs::exists(status) || fs::is_directory(status), "cannot write folder ", printable_path(target_),
               ": it exists and is not a folder");
  remove_abandoned(target_);
  temporary_ = make_sibling(target_, [this](const fs::path& sibling) { return ::mkdir(sibling.c_str(), 0777) == 0 && lock_folder(sibling, lock_); });
}

AtomicFolder::~AtomicFolder() {
  // Empties the folder that did not get the name: the new one before commit, the old one after an exchange.
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

void AtomicFolder::commit() {
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(temporary_)) sync_to_disk(entry.path());
  sync_to_disk(temporary_);
  // A plain rename onto a folder that holds files is refused by the system; an exchange is atomic as well.
  std::error_code error;
  const unsigned flags = existing_ == Existing::refused ? RENAME_NOREPLACE : fs::exists(target_, error) ? RENAME_EXCHANGE : 0;
  if (!rename_folder(temporary_, target_, flags)) {
    if (existing_ == Existing::refused && (errno == EEXIST || errno == ENOTEMPTY || errno == ENOTDIR)) refuse_existing(target_);
    throw_file_error(flags == RENAME_EXCHANGE ? "cannot replace folder" : "cannot write folder", target_, errno);
  }
  sync_to_disk(parent_of(target_));
}

void remove_folder(const fs::path& folder) {
  const fs::path target = without_trailing_slash(folder);
  HEDDLE_CHECK(fs::is_directory(fs::symlink_status(target)), "cannot remove ", printable_path(target),
               ": it is not a folder");
  const fs::path aside = make_sibling(target, [&target](const fs::path& sibling) {
    return ::rename(target.c_str(), sibling.c_str()) == 0;
  });
  std::error_code error;
  fs::remove_all(aside, error);
  if (error) throw_file_error("cannot remove", aside, error.value());
}

OutputFolder::OutputFolder(fs::path folder) : folder_(std::move(folder)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) throw_file_error("cannot create output folder", folder_, error.value());
  // Asked apart from opening the lock file, which may exist from an earlier run in a folder made read-only since.
  if (::access(folder_.c_str(), W_OK | X_OK) != 0) throw_file_error("cannot write to output folder", folder_, errno);

  const fs::path lock_path = folder_ / ".lock";
  lock_ = FileDescriptor(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (lock_.get() < 0) throw_file_error("cannot open", lock_path, errno);
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    HEDDLE_CHECK(errno != EWOULDBLOCK, "output folder ", printable_path(folder_),
                 " is in use by another run; wait for it to end or choose another folder");
    throw_file_error("cannot lock", lock_path, errno);
  }
  remove_leftovers(folder_);
}

}  // namespace heddle::nn
