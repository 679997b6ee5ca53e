// What strangers of this host can do to the socket over which ranks hand each other memory:
// nothing.
#include "comm/shm/door.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <string>

#include "core/process/descriptors.h"
#include "support/door_stranger.h"

namespace lockstep::comm {
namespace {

std::string bytes_of(const Cookie& cookie) {
  return {reinterpret_cast<const char*>(cookie.data()), sizeof cookie};
}

TEST(Door, DescriptorsThatNobodyAskedForAreClosed) {
  const Fd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  static_cast<void>(Door::own().take(new_cookie()));
  const int64_t before = descriptors().used;
  const Cookie cookie = new_cookie();
  for (const size_t count : {2U, 3U, 250U}) {
    ASSERT_TRUE(test::send_to_door(Door::own().address(), bytes_of(cookie), null.get(), count));
    EXPECT_FALSE(Door::own().take(cookie)) << count;
    EXPECT_EQ(descriptors().used, before) << count;
  }
  ASSERT_TRUE(test::send_to_door(Door::own().address(), "too short", null.get(), 1));
  ASSERT_TRUE(
      test::send_to_door(Door::own().address(), bytes_of(cookie) + "too long", null.get(), 1));
  ASSERT_TRUE(test::send_to_door(Door::own().address(), bytes_of(cookie), null.get(), 0));
  EXPECT_FALSE(Door::own().take(cookie));
  EXPECT_EQ(descriptors().used, before);
}

TEST(Door, GivesWhatIsAskedForHoweverManyOthersHaveCome) {
  const Fd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(test::send_to_door(Door::own().address(), bytes_of(new_cookie()), null.get(), 1));
    EXPECT_FALSE(Door::own().take(new_cookie()));
  }
  const std::array cookies{new_cookie(), new_cookie()};
  for (const Cookie& cookie : cookies)
    ASSERT_FALSE(Door::hand_over(Door::own().address(), cookie, null.get()));
  EXPECT_TRUE(Door::own().take(cookies[1]));
  EXPECT_TRUE(Door::own().take(cookies[0]));
}

}  // namespace
}  // namespace lockstep::comm
