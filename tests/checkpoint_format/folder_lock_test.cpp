// Who may write to a directory of checkpoints.
#include "checkpoint/format/directory/folder_lock.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/error.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Directory;
using checkpoint::newest_checkpoint;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

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

}  // namespace
}  // namespace lockstep::test
