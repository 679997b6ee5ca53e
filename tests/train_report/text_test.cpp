#include "train/report/text.h"

#include <gtest/gtest.h>

namespace lockstep::train {
namespace {

TEST(ReportText, AShortTimeHasTheUnitOfWhatItIsRoundedTo) {
  EXPECT_EQ(short_time(850e-6), "850 us");
  EXPECT_EQ(short_time(999.4e-6), "999 us");
  EXPECT_EQ(short_time(999.6e-6), "1 ms");
  EXPECT_EQ(short_time(12.34e-3), "12.3 ms");
  EXPECT_EQ(short_time(0.9994), "999 ms");
  EXPECT_EQ(short_time(0.9996), "1 s");
  EXPECT_EQ(short_time(999.4), "999 s");
  EXPECT_EQ(short_time(1500), "25 min 0 s");
}

TEST(ReportText, AMemoryHasTheUnitOfWhatItIsRoundedTo) {
  EXPECT_EQ(memory_text(512.34e6), "512.3 MB");
  EXPECT_EQ(memory_text(999.94e6), "999.9 MB");
  EXPECT_EQ(memory_text(999.96e6), "1.0 GB");
}

}  // namespace
}  // namespace lockstep::train
