#include "nn/atomic_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/runtime/check.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::TempFolder;

// Contents of version `version` of a file: long enough to take several writes, and different at both ends.
std::string contents(int version) { return std::string(40'000, static_cast<char>('a' + version)); }

// Runs `work` in a child process, which exits 0 when it returns and 1 when it throws.
pid_t start_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    work();
  } catch (...) {
    ::_exit(1);
  }
  ::_exit(0);
}

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

// Kills a fresh child that runs `work` with SIGKILL as it enters its first system call, then another as it enters its
// second, and so on until one finishes. Calls `check` after every death; returns the number of kills, -1 if this
// machine does not allow tracing.
int kill_at_every_system_call(const std::function<void()>& work, const std::function<void()>& check) {
  for (int kills = 0;; ++kills) {
    const pid_t child = start_child([&work] {
      if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) throw Error("ptrace is not allowed");
      ::raise(SIGSTOP);
      work();
    });
    int status = wait_for(child);
    if (!WIFSTOPPED(status)) return -1;
    // The child stops at every entry and every exit.
    for (int stops = 2 * kills + 1; stops > 0 && WIFSTOPPED(status); --stops) {
      ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
      status = wait_for(child);
    }
    const bool finished = !WIFSTOPPED(status);
    if (!finished) {
      ::kill(child, SIGKILL);
      wait_for(child);
    }
    check();
    if (finished) {
      EXPECT_EQ(status, 0);
      return kills;
    }
  }
}

// Names in a folder, in order.
std::vector<std::string> entries(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().native());
  std::sort(names.begin(), names.end());
  return names;
}

// Writes a folder of two files that both hold `version`.
void write_pair(const fs::path& target, int version) {
  AtomicFolder folder(target);
  write_file(folder.path() / "one", contents(version));
  write_file(folder.path() / "two", contents(version));
  folder.commit();
}

// Whether the folder holds both files of `version`, whole.
bool holds_pair(const fs::path& folder, int version) {
  return read_file(folder / "one") == contents(version) && read_file(folder / "two") == contents(version);
}

// --- One file ---

TEST(AtomicFile, CommitReplacesTheContents) {
  const TempFolder folder;
  write_file(folder / "f", contents(0));

  write_file(folder / "f", contents(1));

  EXPECT_EQ(read_file(folder / "f"), contents(1));
  EXPECT_EQ(entries(folder.path()), std::vector<std::string>{"f"});
}

TEST(AtomicFile, NothingChangesBeforeCommit) {
  const TempFolder folder;
  write_file(folder / "f", "old");
  {
    AtomicFile file(folder / "f");
    file.write("new");

    EXPECT_EQ(read_file(folder / "f"), "old");
  }
  EXPECT_EQ(read_file(folder / "f"), "old");
  EXPECT_EQ(entries(folder.path()), std::vector<std::string>{"f"});
}

TEST(AtomicFile, TwoWritersOfOneNameDoNotMix) {
  const TempFolder folder;
  AtomicFile first(folder / "f");
  AtomicFile second(folder / "f");
  first.write("first");
  second.write("second");

  second.commit();
  first.commit();

  EXPECT_EQ(read_file(folder / "f"), "first");
}

TEST(AtomicFile, KillAtEverySystemCallLeavesOldOrNew) {
  const TempFolder folder;
  const auto path = folder / "f";
  write_file(path, contents(0));
  int n_old = 0;
  int n_new = 0;

  const int kills = kill_at_every_system_call([&path] { write_file(path, contents(1)); },
                                              [&] {
                                                const std::string found = read_file(path);
                                                n_old += found == contents(0) ? 1 : 0;
                                                n_new += found == contents(1) ? 1 : 0;
                                                if (found != contents(0)) write_file(path, contents(0));
                                              });

  if (kills < 0) GTEST_SKIP() << "this machine does not allow ptrace";
  EXPECT_EQ(n_old + n_new, kills + 1);
  // At least open, write, fsync and rename come before the new contents; the folder's sync comes after.
  EXPECT_GE(n_old, 4);
  EXPECT_GE(n_new, 1);
}

TEST(AtomicFile, KillAtRandomMomentsLeavesOneVersionWhole) {
  const TempFolder folder;
  const auto path = folder / "f";
  write_file(path, contents(0));
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    const pid_t child = start_child([&path] {
      for (int version = 0;; version = (version + 1) % 20) write_file(path, contents(version));
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    ::kill(child, SIGKILL);
    wait_for(child);

    const std::string found = read_file(path);

    ASSERT_EQ(found, std::string(40'000, found.at(0)));
  }
}

// A file-size limit stands for a full disk: both make write() fail half-way.
TEST(AtomicFile, FailedWriteKeepsTheOldContentsAndCleansUp) {
  const TempFolder folder;
  const auto path = folder / "f";
  write_file(path, "old");

  const pid_t child = start_child([&path] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10'000, 10'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error = error_of([&path] { write_file(path, contents(1)); });
    if (error != "cannot write " + path.native() + ": File too large") throw Error(error);
  });

  EXPECT_EQ(wait_for(child), 0);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(entries(folder.path()), std::vector<std::string>{"f"});
}

// Renaming onto /dev/stdout or a pipe would replace it by a file.
TEST(AtomicFile, PipesAndDevicesAreNotReplaced) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);

  EXPECT_EQ(error_of([&] { write_file(folder / "pipe", "x"); }),
            "cannot write " + (folder / "pipe").native() + ": it is not a regular file");
}

TEST(AtomicFile, MissingFolderIsNamed) {
  const TempFolder folder;
  EXPECT_EQ(error_of([&] { write_file(folder / "none/f", "x"); }),
            "cannot write " + (folder / "none/f").native() + ": the folder " + (folder / "none").native() +
                " does not exist; create it first");
}

TEST(AtomicFile, FolderAsTargetIsRefused) {
  const TempFolder folder;
  EXPECT_EQ(error_of([&] { write_file(folder.path(), "x"); }),
            "cannot write " + folder.path().native() + ": it is a folder; give a file name");
}

TEST(AtomicFile, FileInPlaceOfAFolderIsRefused) {
  const TempFolder folder;
  write_file(folder / "f", "x");
  EXPECT_EQ(error_of([&] { write_file(folder / "f/g", "x"); }),
            "cannot write " + (folder / "f/g").native() + ": Not a directory");
}

// Runs `work` in a child without root's rights, to which permissions do not apply.
int run_unprivileged(const std::function<void()>& work) {
  return wait_for(start_child([&work] {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::setresuid(kNobody, kNobody, kNobody) != 0) throw Error("cannot give up rights");
    work();
  }));
}

TEST(AtomicFile, ReadOnlyFolderGivesTheSystemsText) {
  const TempFolder folder;
  ::chmod(folder.path().c_str(), 0555);

  EXPECT_EQ(run_unprivileged([&] {
              const std::string error = error_of([&] { write_file(folder / "f", "x"); });
              if (error != "cannot write " + (folder / "f").native() + ": Permission denied") throw Error(error);
            }),
            0);
  ::chmod(folder.path().c_str(), 0755);
}

// --- A folder ---

TEST(AtomicFolder, AppearsOnlyAtCommit) {
  const TempFolder folder;
  {
    AtomicFolder checkpoint(folder / "checkpoint-1");
    write_file(checkpoint.path() / "one", "1");

    EXPECT_FALSE(fs::exists(folder / "checkpoint-1"));
  }
  EXPECT_TRUE(entries(folder.path()).empty());

  write_pair(folder / "checkpoint-1/", 1);

  EXPECT_TRUE(holds_pair(folder / "checkpoint-1", 1));
  EXPECT_EQ(entries(folder.path()), std::vector<std::string>{"checkpoint-1"});
}

TEST(AtomicFolder, ReplacesAnOlderFolderWhole) {
  const TempFolder folder;
  write_pair(folder / "c", 0);
  write_file(folder / "c/extra", "x");

  write_pair(folder / "c", 1);

  EXPECT_TRUE(holds_pair(folder / "c", 1));
  EXPECT_EQ(entries(folder / "c"), (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(entries(folder.path()), std::vector<std::string>{"c"});
}

// Of the same folder, and of no other; what a living process writes is locked.
TEST(AtomicFolder, RemovesWhatAKilledProcessLeftOfIt) {
  const TempFolder folder;
  for (const char* name : {"c.tmp-1-0", "c.tmp-1-0.tmp-1-0", "d.tmp-1-0", "c.tmp-1", "cc.tmp-1-0"}) fs::create_directories(folder / name / "deep");
  write_file(folder / "c.tmp-1-1", "x");
  AtomicFolder living(folder / "c");
  const std::string first = living.path().filename().native();

  write_pair(folder / "c", 1);

  std::vector<std::string> expected = {"c", "c.tmp-1", "c.tmp-1-0.tmp-1-0", "c.tmp-1-1", "cc.tmp-1-0", "d.tmp-1-0", first};
  std::ranges::sort(expected);
  EXPECT_EQ(entries(folder.path()), expected);
}

TEST(AtomicFolder, FileAsTargetIsRefused) {
  const TempFolder folder;
  write_file(folder / "c", "x");
  EXPECT_EQ(error_of([&] { AtomicFolder checkpoint(folder / "c"); }),
            "cannot write folder " + (folder / "c").native() + ": it exists and is not a folder");
}

// A folder, a file, a dangling link and another writer's folder that have come in the meantime.
TEST(AtomicFolder, ANewOneReplacesNothing) {
  const TempFolder folder;
  const auto target = folder / "c";
  const std::string refusal = "cannot write folder " + target.native() + ": it exists, and a new one was to be written; give another name";
  const std::vector<std::function<void()>> arrivals = {[&] { fs::create_directory(target); }, [&] { write_file(target, "x"); },
                                                       [&] { fs::create_symlink("none", target); }, [&] { write_pair(target, 1); }};
  for (const auto& arrive : arrivals) {
    {
      AtomicFolder late(target, Existing::refused);
      write_file(late.path() / "one", contents(0));
      arrive();

      EXPECT_EQ(error_of([&] { late.commit(); }), refusal);
    }
    EXPECT_EQ(error_of([&] { AtomicFolder later(target, Existing::refused); }), refusal);
    EXPECT_EQ(entries(folder.path()), std::vector<std::string>{"c"});
    fs::remove_all(target);
  }
}

TEST(AtomicFolder, OfTwoWritersOfANewOneTheFirstToEndHasIt) {
  const TempFolder folder;
  AtomicFolder first(folder / "c", Existing::refused), second(folder / "c", Existing::refused);
  write_file(first.path() / "f", "first");
  write_file(second.path() / "f", "second");
  second.commit();

  EXPECT_NE(error_of([&] { first.commit(); }), "no error");
  EXPECT_EQ(read_file(folder / "c/f"), "second");
}

TEST(AtomicFolder, KillAtEverySystemCallLeavesOldOrNew) {
  const TempFolder folder;
  const auto target = folder / "c";
  write_pair(target, 0);
  int n_old = 0;
  int n_new = 0;

  const int kills = kill_at_every_system_call([&target] { write_pair(target, 1); },
                                              [&] {
                                                const bool is_old = holds_pair(target, 0);
                                                n_old += is_old ? 1 : 0;
                                                n_new += holds_pair(target, 1) ? 1 : 0;
                                                const OutputFolder restart(folder.path());
                                                if (!is_old) write_pair(target, 0);
                                              });

  if (kills < 0) GTEST_SKIP() << "this machine does not allow ptrace";
  EXPECT_EQ(n_old + n_new, kills + 1);
  EXPECT_GE(n_old, 8);
  EXPECT_GE(n_new, 1);
  EXPECT_EQ(entries(folder.path()), (std::vector<std::string>{".lock", "c"}));
}

TEST(RemoveFolder, KillAtEverySystemCallLeavesAllOrNothingUnderTheName) {
  const TempFolder folder;
  const auto target = folder / "c";
  write_pair(target, 0);
  int n_whole = 0;
  int n_gone = 0;

  const int kills = kill_at_every_system_call([&target] { remove_folder(target); },
                                              [&] {
                                                const bool exists = fs::exists(target);
                                                n_whole += exists && holds_pair(target, 0) ? 1 : 0;
                                                n_gone += exists ? 0 : 1;
                                                if (!exists) write_pair(target, 0);
                                              });

  if (kills < 0) GTEST_SKIP() << "this machine does not allow ptrace";
  EXPECT_EQ(n_whole + n_gone, kills + 1);
  EXPECT_GE(n_whole, 1);
  EXPECT_GE(n_gone, 1);
}

TEST(RemoveFolder, MissingFolderIsNamed) {
  const TempFolder folder;
  EXPECT_EQ(error_of([&] { remove_folder(folder / "c"); }),
            "cannot remove " + (folder / "c").native() + ": it is not a folder");
}

// --- The output folder ---

TEST(OutputFolder, IsCreatedWithItsParents) {
  const TempFolder folder;

  const OutputFolder output(folder / "runs/tiny");

  EXPECT_TRUE(fs::is_directory(folder / "runs/tiny"));
}

TEST(OutputFolder, SecondWriterIsRefusedUntilTheFirstEnds) {
  const TempFolder folder;
  {
    const OutputFolder first(folder.path());

    EXPECT_EQ(error_of([&] { OutputFolder second(folder.path()); }),
              "output folder " + folder.path().native() +
                  " is in use by another run; wait for it to end or choose another folder");
  }
  EXPECT_EQ(error_of([&] { OutputFolder second(folder.path()); }), "no error");
}

TEST(OutputFolder, LockEndsWithAKilledProcess) {
  const TempFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = start_child([&] {
    const OutputFolder output(folder.path());
    if (::write(ready[1], "x", 1) == 1) ::pause();
  });
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_NE(error_of([&] { OutputFolder output(folder.path()); }), "no error");

  ::kill(child, SIGKILL);
  wait_for(child);

  EXPECT_EQ(error_of([&] { OutputFolder output(folder.path()); }), "no error");
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(OutputFolder, LeftoversOfAnInterruptedRunAreRemovedAndNothingElse) {
  const TempFolder folder;
  fs::create_directories(folder / "checkpoint-5.tmp-123-0/deep");
  for (const char* name : {"f.tmp-1-2", "f", "f.tmp-", "f.tmp-1", "f.tmp-1-x", "f.tmp-1-2.txt", ".tmp-1-2"})
    write_file(folder / name, "x");

  const OutputFolder output(folder.path());

  EXPECT_EQ(entries(folder.path()),
            (std::vector<std::string>{".lock", ".tmp-1-2", "f", "f.tmp-", "f.tmp-1", "f.tmp-1-2.txt", "f.tmp-1-x"}));
}

TEST(OutputFolder, FileInItsPlaceIsRefused) {
  const TempFolder folder;
  write_file(folder / "f", "x");
  EXPECT_EQ(error_of([&] { OutputFolder output(folder / "f"); }),
            "cannot create output folder " + (folder / "f").native() + ": Not a directory");
}

TEST(OutputFolder, ReadOnlyFolderIsRefusedEvenWithALockFileInIt) {
  const TempFolder folder;
  { const OutputFolder output(folder.path()); }
  ::chmod((folder / ".lock").c_str(), 0666);
  ::chmod(folder.path().c_str(), 0555);

  EXPECT_EQ(run_unprivileged([&] {
              const std::string error = error_of([&] { OutputFolder output(folder.path()); });
              if (error != "cannot write to output folder " + folder.path().native() + ": Permission denied")
                throw Error(error);
            }),
            0);
  ::chmod(folder.path().c_str(), 0755);
}

// --- Text for messages ---

TEST(Printable, KeepsUtf8AndEscapesEveryOtherByte) {
  EXPECT_EQ(printable("runs/Загрузки ö 漢 😀"), "runs/Загрузки ö 漢 😀");
  EXPECT_EQ(printable("a\n\x1B\x7F"), "a\\x0A\\x1B\\x7F");
  EXPECT_EQ(printable("\xFF\xC3"), "\\xFF\\xC3");
  // Overlong, surrogate, beyond U+10FFFF, cut short.
  EXPECT_EQ(printable("\xC0\x80"), "\\xC0\\x80");
  EXPECT_EQ(printable("\xE0\x80\x80"), "\\xE0\\x80\\x80");
  EXPECT_EQ(printable("\xED\xA0\x80"), "\\xED\\xA0\\x80");
  EXPECT_EQ(printable("\xF4\x90\x80\x80"), "\\xF4\\x90\\x80\\x80");
  EXPECT_EQ(printable("\xE6\xBC"), "\\xE6\\xBC");
}

}  // namespace
}  // namespace heddle::nn
