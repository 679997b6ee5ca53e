#include "lockstep/checkpoint/directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>

#include "checkpoint/format/directory/latest.h"
#include "checkpoint_format/small_checkpoint.h"
#include "core/network/address.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Directory;
using checkpoint::newest_checkpoint;
using checkpoint::Published;
using checkpoint::Retention;
using checkpoint::to_remove;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> names(const std::string& path) {
  return checkpoint::names_in(checkpoint::system_files(), path);
}

TEST(Directory, PublishesAndFindsTheNewest) {
  const Folder folder;
  const std::string path = folder / "a/b/";
  EXPECT_EQ(newest_checkpoint(path), std::nullopt);
  EXPECT_TRUE(checkpoint::list_checkpoints(path).checkpoints.empty());
  Directory directory(path);
  EXPECT_EQ(newest_checkpoint(path), std::nullopt);
  EXPECT_TRUE(checkpoint::list_checkpoints(path).checkpoints.empty());
  EXPECT_EQ(save(directory, 10, 1), folder / "a/b/step-00000010");
  EXPECT_EQ(save(directory, 20, 2), folder / "a/b/step-00000020");
  EXPECT_EQ(value_of(*newest_checkpoint(directory.path())), 2);
  EXPECT_THAT(contents(path + "latest"), testing::StartsWith("step-00000020 "));
  EXPECT_THAT(names(path), ElementsAre(".lock", "latest", "step-00000010", "step-00000020"));
}

// As a child that lets go of all it has copies of.
TEST(Directory, TheEndOfAChildsCopyLeavesWhatTheParentWrites) {
  const Folder folder;
  auto directory = std::make_unique<Directory>(folder.path());
  const std::string begun = directory->begin(10);
  const pid_t child = fork();
  if (child == 0) {
    directory.reset();
    _exit(0);
  }
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(std::filesystem::exists(begun));
  directory.reset();
  EXPECT_FALSE(std::filesystem::exists(begun));
}

// After a restart from an earlier step the newest is what was saved last, not the highest step.
TEST(Directory, AStepThatIsSavedAgainReplacesNone) {
  const Folder folder;
  Directory directory(folder.path());
  save(directory, 20, 1);
  save(directory, 30, 2);
  EXPECT_EQ(save(directory, 20, 3), folder / "step-00000020.1");
  EXPECT_EQ(value_of(*newest_checkpoint(folder.path())), 3);
  EXPECT_EQ(save(directory, 20, 4), folder / "step-00000020.2");
  directory.retain({.keep_last = 2});
  EXPECT_THAT(names(folder.path()),
              ElementsAre(".lock", "latest", "step-00000020.1", "step-00000020.2"));
}

// By hand, while a job saves: it is not to be removed twice.
TEST(Directory, ACheckpointThatSomebodyHasRemovedIsGone) {
  const Folder folder;
  Directory directory(folder.path());
  for (int step = 1; step <= 3; ++step) save(directory, step, 1.0F * step);
  std::filesystem::remove_all(folder / "step-00000001");
  directory.retain({.keep_last = 2});
  save(directory, 4, 4);
  directory.retain({.keep_last = 2});
  EXPECT_THAT(names(folder.path()),
              ElementsAre(".lock", "latest", "step-00000003", "step-00000004"));
}

// With all that was saved: nothing is written to a directory that has been made again since, which
// another job may hold.
TEST(Directory, OneThatIsRemovedWhileAJobSavesIsAnError) {
  const Folder folder;
  const std::string path = folder / "runs";
  Directory directory(path);
  save(directory, 1, 1);
  std::filesystem::remove_all(path);
  EXPECT_THAT(message_of<CheckpointError>([&] { save(directory, 2, 2); }),
              AllOf(HasSubstr(path), HasSubstr("No such file or directory")));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Directory, OneThatCannotBeWrittenIsAnError) {
  EXPECT_THAT(message_of<CheckpointError>([] { Directory directory("/proc/lockstep/runs"); }),
              HasSubstr("[checkpoint] /proc/lockstep: cannot be made: "));
}

// For a group that shares a folder.
TEST(Directory, HasTheRightsThatTheUmaskLeaves) {
  const Folder folder;
  const mode_t before = umask(002);
  auto& files = checkpoint::system_files();
  EXPECT_EQ(files.make_directory(folder / "a"), 0);
  EXPECT_EQ(files.close(files.open(folder / "a/b", O_WRONLY | O_CREAT)), 0);
  umask(before);
  namespace fs = std::filesystem;
  EXPECT_EQ(fs::status(folder / "a").permissions(), fs::perms(0775));
  EXPECT_EQ(fs::status(folder / "a/b").permissions(), fs::perms(0664));
}

TEST(Directory, ASecondWriterIsToldWhoIsFirst) {
  const Folder folder;
  {
    const Directory first(folder.path());
    EXPECT_THAT(message_of<CheckpointError>([&] { Directory second(folder.path()); }),
                AllOf(HasSubstr(folder.path()), HasSubstr(fmt::format("process {} on ", getpid())),
                      HasSubstr("writes checkpoints here already, and is this process: another "
                                "Checkpointer of it holds the directory. Destroy that one first")));
    const pid_t pid = fork();
    if (pid == 0) {
      const auto told = message_of<CheckpointError>([&] { Directory second(folder.path()); });
      _exit(told.find(fmt::format("process {} on ", getppid())) == std::string::npos ||
            told.find("give this job another directory, or end that one") == std::string::npos);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
  Directory after(folder.path());
}

// Whose lock is refused to others the first times that they ask.
struct RefusingFiles : checkpoint::FileSystem {
  explicit RefusingFiles(int times) : left(times) {}
  int lock(int fd) override {
    if (left == 0) return FileSystem::lock(fd);
    --left;
    errno = EWOULDBLOCK;
    return -1;
  }
  int left;
};

// A killed process has its lock until the kernel has closed its files.
TEST(Directory, WaitsForAWriterThatIsEnding) {
  const Folder folder;
  const pid_t ended = fork();
  if (ended == 0) _exit(0);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, ended, &info, WEXITED | WNOWAIT), 0);
  const std::string lock = folder.path() + "/.lock";
  const auto says = [&](pid_t pid) {
    std::ofstream(lock) << fmt::format("process {} on {}\n", pid, host_name());
  };
  says(ended);
  RefusingFiles three(3);
  Directory(folder.path(), three);
  EXPECT_EQ(three.left, 0);
  says(getppid());
  three.left = 3;
  EXPECT_THAT(message_of<CheckpointError>([&] { Directory(folder.path(), three); }),
              HasSubstr(fmt::format("process {} on", getppid())));
  EXPECT_EQ(three.left, 1);
  waitpid(ended, nullptr, 0);
}

// A name that is still the one before it, for a moment after another has taken the lock.
TEST(Directory, TheNameOfAnEarlierWriterIsNotThatOfWhoHasJustLocked) {
  const Folder folder;
  std::ofstream(folder / ".lock") << "process 1 on another-host\n";
  RefusingFiles once(1);
  Directory(folder.path(), once);
  EXPECT_EQ(once.left, 0);
}

TEST(Directory, LeftoversOfAnEarlierSaveGo) {
  const Folder folder;
  std::filesystem::create_directories(folder / ".tmp-step-00000005");
  write(folder / ".tmp-step-00000005/shard-0-of-1.safetensors", "half");
  write(folder / ".tmp-latest", "half");
  write(folder / "mine.txt", "not ours");
  Directory directory(folder.path());
  save(directory, 5, 1);
  EXPECT_THAT(names(folder.path()), ElementsAre(".lock", "latest", "mine.txt", "step-00000005"));
}

// An export into the directory is still being written, or was killed.
TEST(Directory, LeftoversOfOthersStay) {
  const Folder folder;
  std::filesystem::create_directories(folder / ".tmp-step-00000005.1-0123456789abcdef");
  const std::vector<std::string> others{
      ".tmp-",           ".tmp-latest-best", ".tmp-net.safetensors",  ".tmp-step-",
      ".tmp-step-00-12", ".tmp-step-1.",     ".tmp-step-12345678900", ".tmp-step-best.safetensors"};
  for (const auto& name : others) write(folder / name, "others'");
  EXPECT_THAT(checkpoint::verify_directory(folder.path()).unfinished,
              ElementsAre(".tmp-step-00000005.1-0123456789abcdef", ".tmp-step-12345678900"));
  Directory directory(folder.path());
  save(directory, 5, 1);
  for (const auto& name : others) {
    EXPECT_EQ(std::filesystem::exists(folder / name), name != ".tmp-step-12345678900") << name;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / ".tmp-step-00000005.1-0123456789abcdef"));
}

// As a rank does whose job was restarted without it: rank 0 and its lock have gone, and it still
// writes.
TEST(Directory, WhatARankOfAnEndedJobWritesGoesIntoNoNewCheckpoint) {
  const Folder folder;
  const std::string name = "/shard-1-of-2.safetensors";
  std::string begun;
  {
    Directory ended(folder.path());
    begun = ended.begin(5);
  }
  Directory next(folder.path());
  const std::string again = next.begin(5);
  EXPECT_NE(again, begun);
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { checkpoint::OutputFile(checkpoint::system_files(), begun + name); }),
              AllOf(HasSubstr(begun + name), HasSubstr("No such file or directory")));
  EXPECT_FALSE(std::filesystem::exists(again + name));
}

// The same rank makes a file in the folder of the attempt while the new job removes it.
TEST(Directory, LeftoversThatCannotBeRemovedYetDoNotStopASave) {
  class Busy : public checkpoint::FileSystem {
   public:
    int remove_directory(const std::string& path) override {
      if (path.ends_with(".tmp-step-00000005"))
        test::write(path + "/shard-1-of-2.safetensors", "late");
      return FileSystem::remove_directory(path);
    }
  } busy;
  const Folder folder;
  std::filesystem::create_directories(folder / ".tmp-step-00000005");
  Directory directory(folder.path(), busy);
  save(directory, 6, 1, busy);
  EXPECT_EQ(value_of(*newest_checkpoint(folder.path())), 1);
}

// An evaluation looks for the newest while a training saves: its list of names has one checkpoint,
// which is gone when it is opened.
TEST(Directory, AReaderLooksAgainWhenAWriterHasRemovedWhatItFound) {
  const Folder folder;
  Directory writer(folder.path());
  class Overtaken : public checkpoint::FileSystem {
   public:
    explicit Overtaken(Directory& writer) : writer_(writer) {}
    std::optional<std::vector<std::string>> list(const std::string& path) override {
      auto names = FileSystem::list(path);
      if (path == writer_.path() && step_ < 4) {
        ++step_;
        save(writer_, step_, 1.0F * step_);
        writer_.retain({.keep_last = 1});
      }
      return names;
    }

   private:
    Directory& writer_;
    int step_ = 1;
  } files(writer);
  save(writer, 1, 1);
  EXPECT_EQ(newest_checkpoint(folder.path(), files), folder / "step-00000004");
}

TEST(Directory, ALinkThatLeadsNowhereCannotBeRead) {
  const Folder folder;
  Directory directory(folder.path());
  save(directory, 10, 1);
  std::filesystem::create_symlink("nowhere", folder / "step-00000020");
  EXPECT_THAT(checkpoint::list_checkpoints(folder.path()).unreadable, ElementsAre("step-00000020"));
}

// A job is killed after it has published a checkpoint and before it has replaced `latest`. The next
// one may have nothing left to save.
TEST(Directory, ALatestThatAKilledJobHasNotReplacedIsReplacedByTheNext) {
  const Folder folder;
  const std::string latest = folder / "latest";
  std::string first, second;
  {
    Directory directory(folder.path());
    save(directory, 10, 1);
    first = contents(latest);
    save(directory, 20, 2);
    second = contents(latest);
  }
  for (const std::string& left : {first, std::string("step-0"), std::string()}) {
    left.empty() ? (void)std::filesystem::remove(latest) : write(latest, left);
    checkpoint::mend_latest(folder.path(), checkpoint::system_files());
    EXPECT_EQ(contents(latest), second);
    EXPECT_THAT(checkpoint::verify_directory(folder.path()).directory, ElementsAre());
  }
  EXPECT_THAT(names(folder.path()),
              ElementsAre(".lock", "latest", "step-00000010", "step-00000020"));
}

TEST(Directory, MendingLatestLeavesTheDirectoriesOfOthersAlone) {
  const Folder folder;
  const std::string latest = folder / "latest";
  checkpoint::mend_latest(folder / "nowhere", checkpoint::system_files());
  EXPECT_FALSE(std::filesystem::exists(folder / "nowhere"));
  {
    Directory writer(folder.path());
    checkpoint::mend_latest(folder.path(), checkpoint::system_files());
    save(writer, 10, 1);
    const std::string first = contents(latest);
    save(writer, 20, 2);
    write(latest, first);
    checkpoint::mend_latest(folder.path(), checkpoint::system_files());  // the writer is about to
    EXPECT_EQ(contents(latest), first);
    write(folder / "step-00000020/manifest.json", "{}");
    write(latest, "step-0");
  }
  // It says that the newest that can be read is older than one that cannot.
  checkpoint::mend_latest(folder.path(), checkpoint::system_files());
  EXPECT_EQ(contents(latest), "step-0");
}

TEST(Directory, WhatIsAbandonedLeavesNothing) {
  const Folder folder;
  {
    Directory directory(folder.path());
    write(directory.begin(5) + "/x", "half");
    directory.abandon();
    EXPECT_THAT(names(folder.path()), ElementsAre(".lock"));
    directory.begin(6);
  }
  EXPECT_THAT(names(folder.path()), ElementsAre(".lock"));
}

// Somebody has put a folder into the first; the others are removed.
TEST(Directory, WhatCannotBeRemovedStopsNoSave) {
  const Folder folder;
  Directory directory(folder.path());
  save(directory, 1, 1);
  save(directory, 2, 2);
  std::filesystem::create_directories(folder / "step-00000001/sub");
  write(folder / "step-00000001/sub/notes.txt", "mine");
  save(directory, 3, 3);
  directory.retain({.keep_last = 1});
  save(directory, 4, 4);
  directory.retain({.keep_last = 1});
  EXPECT_EQ(value_of(*newest_checkpoint(folder.path())), 4);
  const auto left = names(folder.path());
  EXPECT_THAT(left, ElementsAre(".lock", testing::StartsWith(".tmp-step-00000001-"), "latest",
                                "step-00000004"));
  EXPECT_THAT(names(folder / left.at(1)), ElementsAre("sub"));
  std::filesystem::remove_all(folder / left.at(1) + "/sub");
  save(directory, 5, 5);
  EXPECT_THAT(names(folder.path()),
              ElementsAre(".lock", "latest", "step-00000004", "step-00000005"));
}

TEST(Directory, AnUnreadableManifestIsAnErrorUnlessLatestSaysItIsOld) {
  const Folder folder;
  Directory directory(folder.path());
  save(directory, 10, 1);
  save(directory, 20, 2);
  const std::string old = folder / "step-00000010/manifest.json";
  const std::string kept = contents(old);
  write(old, "{}");
  EXPECT_EQ(value_of(*newest_checkpoint(folder.path())), 2);
  write(old, kept);
  write(folder / "step-00000020/manifest.json", "{}");
  EXPECT_THAT(message_of<CheckpointError>([&] { newest_checkpoint(folder.path()); }),
              AllOf(HasSubstr("step-00000020/manifest.json: is damaged"),
                    HasSubstr("The newest readable checkpoint"), HasSubstr("is step-00000010")));
}

TEST(Directory, ADamagedLatestDoesNotMatter) {
  const Folder folder;
  Directory directory(folder.path());
  save(directory, 10, 1);
  save(directory, 20, 2);
  for (const char* text : {"", "step-00000010", "step-00000010 0000000000000000\n"}) {
    write(folder / "latest", text);
    EXPECT_EQ(value_of(*newest_checkpoint(folder.path())), 2);
  }
  std::filesystem::remove(folder / "latest");
  EXPECT_EQ(value_of(*newest_checkpoint(folder.path())), 2);
}

std::vector<Published> history() {
  std::vector<Published> all;
  const double losses[] = {3, 1, 2, 1, 5};
  for (int i = 0; i < 5; ++i) {
    all.push_back({std::to_string(i), (i + 1) * 10, i, {{"loss", losses[i]}}});
  }
  return all;
}

TEST(Retention, KeepsTheNewestTheMultiplesAndTheBest) {
  EXPECT_THAT(to_remove(history(), {}), ElementsAre());
  EXPECT_THAT(to_remove(history(), {.keep_last = 2}), ElementsAre("0", "1", "2"));
  EXPECT_THAT(to_remove(history(), {.keep_last = 9}), ElementsAre());
  EXPECT_THAT(to_remove(history(), {.keep_last = 1, .keep_every = 20}), ElementsAre("0", "2"));
  // The newest in any case.
  EXPECT_THAT(to_remove(history(), {.keep_last = -1}), ElementsAre("0", "1", "2", "3"));
  // Of two that are as good the newer.
  EXPECT_THAT(to_remove(history(), {.keep_last = 1, .best = Retention::Best{"loss"}}),
              ElementsAre("0", "1", "2"));
  EXPECT_THAT(to_remove(history(), {.keep_last = 1, .best = Retention::Best{"loss", 3}}),
              ElementsAre("0"));
  EXPECT_THAT(to_remove(history(), {.keep_last = 1, .best = Retention::Best{"loss", 2, true}}),
              ElementsAre("1", "2", "3"));
  EXPECT_THAT(to_remove(history(), {.keep_last = 1, .best = Retention::Best{"accuracy"}}),
              ElementsAre("0", "1", "2", "3"));
  // None that is better than what this run has had.
  const auto limited = [](double limit, bool higher) {
    return Retention{.keep_last = 1, .best = Retention::Best{"loss", 1, higher, limit}};
  };
  EXPECT_THAT(to_remove(history(), limited(2, false)), ElementsAre("0", "1", "3"));
  EXPECT_THAT(to_remove(history(), limited(3, true)), ElementsAre("1", "2", "3"));
  auto with_nan = history();
  with_nan[1].metrics["loss"] = std::nan("");
  EXPECT_THAT(to_remove(with_nan, {.keep_last = 1, .best = Retention::Best{"loss"}}),
              ElementsAre("0", "1", "2"));
}

}  // namespace
}  // namespace lockstep::test
