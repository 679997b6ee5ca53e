#include "core/process/standard_streams.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "support/fork.h"
#include "support/without_stdout.h"

namespace lockstep {
namespace {

ino_t inode_of(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

ino_t inode_of_null() {
  struct stat status {};
  return stat("/dev/null", &status) == 0 ? status.st_ino : 0;
}

TEST(StandardStreams, ThoseThatAreClosedLeadToDevNull) {
  const ino_t in = inode_of(STDIN_FILENO), err = inode_of(STDERR_FILENO);
  ino_t out = 0;
  {
    const test::WithoutStdout closed;
    open_standard_streams();
    out = inode_of(STDOUT_FILENO);
  }
  EXPECT_EQ(out, inode_of_null());
  EXPECT_EQ(inode_of(STDIN_FILENO), in);
  EXPECT_EQ(inode_of(STDERR_FILENO), err);
}

TEST(StandardStreams, AllThreeMayBeClosed) {
  test::in_a_child([] {
    for (const int fd : {0, 1, 2}) close(fd);
    open_standard_streams();
    for (const int fd : {0, 1, 2}) {
      if (inode_of(fd) != inode_of_null()) _exit(1);
    }
    _exit(0);
  });
}

}  // namespace
}  // namespace lockstep
