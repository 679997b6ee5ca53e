// Memory that is handed from process to process: what comes is what was meant, or nothing is
// mapped.
#include "comm/shm/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "lockstep/core/error.h"
#include "support/folder.h"

// A timer whose signal comes so often that no more than 4 MiB are taken in between.
static int g_interrupted = -1;  // how often it has; -1 where there is none

extern "C" int posix_fallocate(int fd, off_t offset, off_t length) {
  if (g_interrupted >= 0 && length > 4 << 20) return ++g_interrupted < 100 ? EINTR : ENOSPC;
  return fallocate(fd, 0, offset, length) == 0 ? 0 : errno;
}

namespace lockstep::comm {
namespace {

constexpr int64_t kBytes = 8192;

TEST(SharedSegment, IsHandedOver) {
  const std::string door = Door::own().address();
  ASSERT_FALSE(door.empty());
  const Segment one = Segment::create(kBytes, {door}), two = Segment::create(kBytes, {door});
  const SegmentHandle first = one.handle(), second = two.handle();
  one.data()[0] = 'a';
  two.data()[0] = 'b';
  // In any order, and once.
  EXPECT_EQ(Segment::attach(second).data()[0], 'b');
  const Segment again = Segment::attach(first);
  EXPECT_EQ(again.data()[0], 'a');
  again.data()[1] = 'c';
  EXPECT_EQ(one.data()[1], 'c');
  EXPECT_THROW((void)Segment::attach(first), CommError);
}

TEST(SharedSegment, HasANameUntilAllHaveItWhereADoorIsOutOfReach) {
  Segment segment = Segment::create(kBytes, {"lockstep-nobody"});
  const SegmentHandle handle = segment.handle();
  ASSERT_NE(handle.path[0], '\0');
  segment.data()[5] = 'x';
  EXPECT_EQ(Segment::attach(handle).data()[5], 'x');
  segment.close_handle();
  EXPECT_FALSE(std::filesystem::exists(handle.path));
  EXPECT_THROW((void)Segment::attach(handle), CommError);
}

TEST(SharedSegment, HasItsPagesWhereATimerInterrupts) {
  g_interrupted = 0;
  const Segment segment = Segment::create(32 << 20, {"lockstep-nobody"});
  g_interrupted = -1;
  struct stat file {};
  ASSERT_EQ(stat(segment.handle().path, &file), 0);
  EXPECT_EQ(file.st_size, 32 << 20);
  EXPECT_GE(file.st_blocks * 512, 32 << 20);
}

// A file system that is full later would end a rank with SIGBUS.
TEST(SharedSegment, HasItsPagesWhereItHasAName) {
  constexpr int64_t kMany = 1 << 20;
  const Segment segment = Segment::create(kMany, {"lockstep-nobody"});
  struct stat file {};
  ASSERT_EQ(stat(segment.handle().path, &file), 0);
  EXPECT_GE(file.st_blocks * 512, kMany);
}

TEST(SharedSegment, AStrangersDescriptorIsNotMapped) {
  const Segment segment = Segment::create(kBytes, {});
  const test::Folder folder{test::Folder::On::Disk};
  const std::string file = folder / "stranger";
  std::ofstream(file) << std::string(kBytes, 's');
  const Fd fd(open(file.c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_FALSE(Door::hand_over(Door::own().address(), segment.handle().cookie, fd.get()));
  EXPECT_THROW((void)Segment::attach(segment.handle()), CommError);
  SegmentHandle named = segment.handle();
  std::copy(file.begin(), file.end(), named.path);
  EXPECT_THROW((void)Segment::attach(named), CommError);
}

TEST(SharedSegment, StrangersMessagesAreNoUse) {
  const Segment segment = Segment::create(kBytes, {Door::own().address()});
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(Door::hand_over(Door::own().address(), new_cookie(), 0));
  EXPECT_EQ(Segment::attach(segment.handle()).size(), kBytes);
}

}  // namespace
}  // namespace lockstep::comm
