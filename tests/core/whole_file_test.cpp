#include "core/files/whole_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <thread>

#include "support/folder.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

TEST(WholeFile, ReplacesAFileAndLeavesNothingBesideIt) {
  const Folder folder;
  EXPECT_EQ(write_whole_file(folder / "a", "old"), 0);
  EXPECT_EQ(write_whole_file(folder / "a", "new"), 0);
  EXPECT_EQ(contents(folder / "a"), "new");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
}

TEST(WholeFile, ReplacesWhatALinkLeadsTo) {
  const Folder folder;
  fs::create_directory(folder / "far");
  write(folder / "far/a", "old");
  fs::create_symlink("far/a", folder / "link");
  EXPECT_EQ(write_whole_file(folder / "link", "new"), 0);
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(contents(folder / "far/a"), "new");
}

// The link was replaced.
TEST(WholeFile, MakesWhatALinkLeadsTo) {
  const Folder folder;
  fs::create_directory(folder / "far");
  fs::create_symlink("far/second", folder / "first");
  fs::create_symlink(folder / "far/a", folder / "far/second");
  EXPECT_EQ(write_whole_file(folder / "first", "new"), 0);
  EXPECT_TRUE(fs::is_symlink(folder / "first"));
  EXPECT_TRUE(fs::is_symlink(folder / "far/second"));
  EXPECT_EQ(contents(folder / "far/a"), "new");
  fs::create_symlink("none/a", folder / "nowhere");
  EXPECT_EQ(write_whole_file(folder / "nowhere", "x"), ENOENT);
  fs::create_symlink("circle", folder / "circle");
  EXPECT_EQ(write_whole_file(folder / "circle", "x"), 0);  // in its place
  EXPECT_EQ(contents(folder / "circle"), "x");
}

// Who could not read a report could read the one that replaced it.
TEST(WholeFile, HasTheRightsThatOpenLeaves) {
  const Folder folder;
  const auto rights = [&](const char* name) {
    struct stat status {};
    EXPECT_EQ(stat((folder / name).c_str(), &status), 0);
    return status.st_mode & 07777;
  };
  const mode_t before = umask(027);
  EXPECT_EQ(write_whole_file(folder / "new", "a"), 0);
  EXPECT_EQ(rights("new"), 0640U);
  for (const mode_t mode : {0600, 0666}) {
    EXPECT_EQ(chmod((folder / "new").c_str(), mode), 0);
    EXPECT_EQ(write_whole_file(folder / "new", "b"), 0);
    EXPECT_EQ(rights("new"), mode);
  }
  umask(before);
}

// As /dev/stdout is one: renamed onto, it would be gone for every other program.
TEST(WholeFile, WritesIntoAStream) {
  const Folder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", folder / "link");
  EXPECT_TRUE(is_stream(folder / "link"));
  std::string read;
  std::thread reader([&] { read = contents(folder / "pipe"); });
  EXPECT_EQ(write_whole_file(folder / "link", "the page"), 0);
  reader.join();
  EXPECT_EQ(read, "the page");
  EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
  EXPECT_FALSE(is_stream(folder.path()));
  EXPECT_FALSE(is_stream(folder / "none"));
}

TEST(WholeFile, ANewOneTakesNoOthersPlace) {
  const Folder folder;
  EXPECT_EQ(write_new_file(folder / "a", "mine"), 0);
  EXPECT_EQ(write_new_file(folder / "a", "other"), EEXIST);
  EXPECT_EQ(contents(folder / "a"), "mine");
  fs::create_symlink("nowhere", folder / "link");
  EXPECT_EQ(write_new_file(folder / "link", "other"), EEXIST);
  EXPECT_FALSE(fs::exists(folder / "nowhere"));
}

TEST(WholeFile, RemovesAFileButNoLinkAndNoStream) {
  const Folder folder;
  write(folder / "a", "old");
  fs::create_symlink("a", folder / "link");
  remove_whole_file(folder / "link");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(contents(folder / "a"), "");
  remove_whole_file(folder / "a");
  EXPECT_FALSE(fs::exists(folder / "a"));
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", folder / "stdout");
  remove_whole_file(folder / "stdout");
  remove_whole_file(folder / "pipe");
  EXPECT_TRUE(fs::is_symlink(folder / "stdout"));
  EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
}

TEST(WholeFile, SaysWhatFailed) {
  const Folder folder;
  EXPECT_EQ(write_whole_file(folder / "none/a", "x"), ENOENT);
  EXPECT_EQ(write_whole_file(folder.path(), "x"), EISDIR);
  EXPECT_EQ(write_whole_file("/dev/full", "x"), ENOSPC);
}

}  // namespace
}  // namespace lockstep::test
