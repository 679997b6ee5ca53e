#include "lockstep/core/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

namespace lockstep {
namespace {

// What `statement` prints on stderr.
template <typename F>
std::string printed(F statement) {
  testing::internal::CaptureStderr();
  statement();
  return testing::internal::GetCapturedStderr();
}

TEST(Log, WarningsAreShownAndDetailsAreNot) {
  EXPECT_TRUE(log::enabled(log::Level::Warn));
  EXPECT_FALSE(log::enabled(log::Level::Info));
  EXPECT_EQ(printed([] { log::info("detail"); }), "");
}

TEST(Log, BracesAndPercentSignsAreText) {
  EXPECT_NE(printed([] { log::warn("{} %d %v"); }).find("{} %d %v\n"), std::string::npos);
}

// The level is read once a process, so in one of its own.
TEST(Log, AWordThatIsNoLevelIsNotSilence) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("LOCKSTEP_LOG", "verbose", 1);
        log::warn("still here");
        _exit(log::enabled(log::Level::Info) ? 1 : 0);
      },
      ::testing::ExitedWithCode(0),
      "LOCKSTEP_LOG='verbose' is none of trace, debug, info, warn, error, off\n(.|\n)*still here");
}

TEST(Log, LinesCarryTheRank) {
  log::set_rank(3);
  EXPECT_NE(printed([] { log::error("x"); }).find("[lockstep] rank 3"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
