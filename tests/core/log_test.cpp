#include "lockstep/core/log.h"

#include <gtest/gtest.h>

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

TEST(Log, LinesCarryTheRank) {
  log::set_rank(3);
  EXPECT_NE(printed([] { log::error("x"); }).find("[lockstep] rank 3"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
