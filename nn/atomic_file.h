#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "nn/posix_file.h"

namespace heddle::nn {

// Note: Safe writing
// Nothing is ever written in place. New contents go to a sibling named NAME.tmp-PID-N, are synced to the disk, and take
// the name in one rename; the folder is synced last. So a reader, and a process that starts after a kill, a full disk
// or a power cut, finds the old contents or the new ones, whole. What an interrupted write leaves behind is a .tmp- sibling;
// an OutputFolder removes those in it, an AtomicFolder those of its own target that no process has locked. A failed write throws
// heddle::Error with the path and the system's reason.

// One file. Destroyed without commit(), it leaves the target as it was and removes what it wrote.
class AtomicFile {
 public:
  // Throws heddle::Error if the target is a folder or another thing that is not a regular file, if its folder is
  // missing or not writable. A symbolic link is replaced, not followed.
  explicit AtomicFile(std::filesystem::path target);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::int64_t nbytes);  // appends
  void write(std::string_view text) { write(text.data(), static_cast<std::int64_t>(text.size())); }
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
  FileDescriptor file_;
  bool committed_ = false;
};

// Replaces or creates a file with the given contents.
void write_file(const std::filesystem::path& target, std::string_view contents);

// What an AtomicFolder does about a target that is there when it is made or at commit().
enum class Existing { replaced, refused };

// A folder that appears whole: fill path() with files, then commit(). An existing target folder is exchanged for the
// new one and removed; with Existing::refused, commit() throws heddle::Error instead. Before commit() the target stays as it was; if
// commit() throws it is the old folder, or the new one that could not be made durable.
class AtomicFolder {
 public:
  // Throws heddle::Error if the target exists and is not a folder or to be refused, or its parent is missing or not writable.
  explicit AtomicFolder(std::filesystem::path target, Existing existing = Existing::replaced);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const std::filesystem::path& path() const { return temporary_; }
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
  Existing existing_;
  FileDescriptor lock_;  // on the temporary folder as it was made, as long as this object lives
};

// Removes a folder so that a kill half-way does not leave part of it under its own name.
void remove_folder(const std::filesystem::path& folder);

// The folder a run writes to, held by this process alone. Creates it with its parents, locks it, and removes what an
// interrupted run left half written. The lock ends with the object or with the process, however it dies.
class OutputFolder {
 public:
  // Throws heddle::Error if the path is a file, the folder cannot be made or written to, or another process holds it.
  explicit OutputFolder(std::filesystem::path folder);

  const std::filesystem::path& path() const { return folder_; }

 private:
  std::filesystem::path folder_;
  FileDescriptor lock_;
};

}  // namespace heddle::nn
