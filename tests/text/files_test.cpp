// What is on the disk when a file has been written.
#include "text/files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "support/folder.h"

namespace {

// The inodes that this process has brought to the disk.
std::set<ino_t>& synced() {
  static std::set<ino_t> all;
  return all;
}

ino_t inode_of(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

}  // namespace

extern "C" int fsync(int fd) {
  struct stat status {};
  if (fstat(fd, &status) == 0) synced().insert(status.st_ino);
  return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace lockstep::test {
namespace {

// Without the folder's the name may be lost where the power fails, or lead to the old file.
TEST(WrittenFile, AndItsNameAreOnTheDisk) {
  const Folder folder;
  text::write_file(folder / "a", "text");
  EXPECT_TRUE(synced().contains(inode_of(folder / "a")));
  EXPECT_TRUE(synced().contains(inode_of(folder.path())));
}

// For a group that shares a folder.
TEST(WrittenFile, HasTheRightsThatTheUmaskLeaves) {
  const Folder folder;
  const mode_t before = umask(002);
  text::write_file(folder / "a", "text");
  umask(before);
  EXPECT_EQ(std::filesystem::status(folder / "a").permissions(), std::filesystem::perms(0664));
}

}  // namespace
}  // namespace lockstep::test
