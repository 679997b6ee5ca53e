#include "plan/words.h"

#include <gtest/gtest.h>

namespace lockstep::plan {
namespace {

TEST(Words, ATimeHasTheUnitOfWhatItIsRoundedTo) {
  EXPECT_EQ(seconds_text(999.4e-6), "999 us");
  EXPECT_EQ(seconds_text(999.6e-6), "1 ms");
  EXPECT_EQ(seconds_text(0.9994), "999 ms");
  EXPECT_EQ(seconds_text(0.9996), "1 s");
  EXPECT_EQ(seconds_text(86400 * 999.4), "999 days");
  EXPECT_EQ(seconds_text(86400 * 12345.0), "12345 days");
}

TEST(Words, BytesAndCountsHaveTheUnitOfWhatTheyAreRoundedTo) {
  EXPECT_EQ(bytes_text(999.4 * 1024), "999 KiB");
  EXPECT_EQ(bytes_text(999.6 * 1024), "0.976 MiB");
  EXPECT_EQ(bytes_text(-999.6 * 1024), "-0.976 MiB");
  EXPECT_EQ(bytes_text(0x1p50), "1 PiB");
  EXPECT_EQ(count_text(999.4), "999");
  EXPECT_EQ(count_text(999.6), "1 k");
  EXPECT_EQ(count_text(2e15), "2 P");
}

}  // namespace
}  // namespace lockstep::plan
