// Who may write to a directory of checkpoints.
#include "checkpoint/format/directory/folder_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <latch>
#include <thread>
#include <utility>

#include "checkpoint/format/directory/latest.h"
#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/error.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Directory;
using checkpoint::newest_checkpoint;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

// Of a job whose directory another one has now.
auto says_replaced(const std::string& path) {
  return AllOf(HasSubstr("[checkpoint] " + path + ": was removed or replaced while this run was "),
               HasSubstr(".lock there is not the file that it has locked"));
}

// By hand, and the next job starts in the same place while the first goes on.
TEST(FolderLock, AJobWritesNothingIntoADirectoryThatAnotherHasMadeAgain) {
  const Folder folder;
  const std::string path = folder / "runs";
  Directory first(path);
  for (int step = 1; step <= 3; ++step) save(first, step, 1);
  std::filesystem::remove_all(path);
  Directory second(path);
  save(second, 1, 2);
  second.begin(2);
  const auto before = checkpoint::names_in(checkpoint::system_files(), path);
  EXPECT_THAT(message_of<CheckpointError>([&] { save(first, 4, 1); }), says_replaced(path));
  EXPECT_THAT(message_of<CheckpointError>([&] { first.retain({.keep_last = 1}); }),
              says_replaced(path));
  EXPECT_EQ(checkpoint::names_in(checkpoint::system_files(), path), before);
  EXPECT_EQ(value_of(*newest_checkpoint(path)), 2);
}

// The files of the save are still there then.
TEST(FolderLock, AJobWhoseLockIsRemovedWhileItSavesPublishesNothing) {
  const Folder folder;
  Directory first(folder.path());
  save(first, 1, 1);
  first.begin(2);
  std::filesystem::remove(folder / ".lock");
  const Directory second(folder.path());
  EXPECT_THAT(message_of<CheckpointError>([&] { first.publish({.step = 2, .world = 1}); }),
              says_replaced(folder.path()));
  EXPECT_EQ(newest_checkpoint(folder.path()), folder / "step-00000001");
}

// A run that has claimed the directory and saved nothing yet has nothing to lose there.
TEST(FolderLock, ADirectoryThatIsRemovedBeforeTheFirstSaveIsMadeAgain) {
  const Folder folder;
  const std::string path = folder / "runs";
  const auto claim = checkpoint::FolderLock::of_checkpoints(path);
  std::filesystem::remove_all(path);
  Directory directory(path);
  save(directory, 1, 1);
  save(directory, 2, 2);
  EXPECT_EQ(value_of(*newest_checkpoint(path)), 2);
}

// Mends `latest` as slowly as a busy disk, until a writer has asked for the lock.
struct SlowFiles : checkpoint::FileSystem {
  int rename(const std::string& from, const std::string& to) override {
    mending.count_down();
    refused.wait();
    return FileSystem::rename(from, to);
  }
  std::latch mending{1}, refused{1};
};
struct AskingFiles : checkpoint::FileSystem {
  explicit AskingFiles(std::latch& latch) : refused(latch) {}
  int lock(int fd) override {
    const int result = FileSystem::lock(fd);
    const int error = errno;
    if (result != 0 && !std::exchange(was_refused, true)) refused.count_down();
    errno = error;
    return result;
  }
  std::latch& refused;
  bool was_refused = false;
};

// An evaluation restores the newest when the job starts again whose last one was killed.
TEST(FolderLock, AWriterWaitsForAReaderThatMendsLatest) {
  const Folder folder;
  std::string newest;
  {
    Directory killed(folder.path());
    save(killed, 1, 1);
    newest = contents(folder / "latest");
  }
  std::filesystem::remove(folder / "latest");
  SlowFiles slow;
  std::jthread reader([&] { checkpoint::mend_latest(folder.path(), slow); });
  slow.mending.wait();
  EXPECT_THAT(contents(folder / ".lock"), EndsWith(" (to replace latest)\n"));
  AskingFiles asking(slow.refused);
  EXPECT_EQ(message_of<CheckpointError>([&] {
              Directory writer(folder.path(), asking);
              EXPECT_EQ(contents(folder / "latest"), newest);
              EXPECT_THAT(contents(folder / ".lock"), Not(HasSubstr("latest")));
              save(writer, 2, 2);
            }),
            "nothing");
  EXPECT_TRUE(asking.was_refused);
  if (!asking.was_refused) slow.refused.count_down();  // so that the reader ends
  EXPECT_EQ(value_of(*newest_checkpoint(folder.path())), 2);
}

}  // namespace
}  // namespace lockstep::test
