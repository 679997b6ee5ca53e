// Numbers of any type that are tracked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/world.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

// `int epoch` did not compile, and the compiler did not say which types would.
TEST(Numbers, OfAnyTypeAreSavedAndRestored) {
  const Folder folder;
  Checkpointer checkpoints(World::solo(), folder.path());
  int epoch = -3;
  size_t taken = 7;
  long long samples = 1LL << 40;
  uint8_t stage = 200;
  char letter = 'x';
  wchar_t wide = L'\u00e4';
  float best = 0.1F;
  checkpoints.track("epoch", epoch);
  checkpoints.track("taken", taken);
  checkpoints.track("samples", samples);
  checkpoints.track("stage", stage);
  checkpoints.track("letter", letter);
  checkpoints.track("wide", wide);
  checkpoints.track("best", best);
  checkpoints.save(1);
  epoch = 0, taken = 0, samples = 0, stage = 0, letter = 0, wide = 0, best = 0;
  ASSERT_TRUE(checkpoints.restore_latest());
  EXPECT_EQ(epoch, -3);
  EXPECT_EQ(taken, 7U);
  EXPECT_EQ(samples, 1LL << 40);
  EXPECT_EQ(stage, 200);
  EXPECT_EQ(letter, 'x');
  EXPECT_EQ(wide, L'\u00e4');
  EXPECT_EQ(best, 0.1F);
}

template <class T>
void track_count(const Folder& folder, T& count, int64_t& other, bool saves) {
  Checkpointer checkpoints(World::solo(), folder.path());
  checkpoints.track("another", other);
  checkpoints.track("count", count);
  if (saves) {
    checkpoints.save(1);
  } else {
    checkpoints.restore_latest();
  }
}

TEST(Numbers, MayHaveAnotherTypeInTheNextRun) {
  const Folder first, second;
  int64_t saved = 5, other = 1;
  track_count(first, saved, other, true);
  int as_int = 0;
  track_count(first, as_int, other, false);
  EXPECT_EQ(as_int, 5);
  track_count(second, as_int, other, true);
  saved = 0;
  track_count(second, saved, other, false);
  EXPECT_EQ(saved, 5);
}

TEST(Numbers, ThatDoNotFitAreRefusedAndNothingChanges) {
  const Folder folder;
  int64_t saved = int64_t{1} << 40, other = 1;
  track_count(folder, saved, other, true);
  int as_int = 4;
  other = 2;
  EXPECT_THAT(message_of<CheckpointError>([&] { track_count(folder, as_int, other, false); }),
              HasSubstr("1099511627776 does not fit"));
  EXPECT_EQ(as_int, 4);
  EXPECT_EQ(other, 2);
  size_t most = std::numeric_limits<size_t>::max();
  EXPECT_THAT(message_of<CheckpointError>([&] { track_count(folder, most, other, true); }),
              HasSubstr("18446744073709551615 does not fit into an int64_t, as which it is saved"));
}

// What it had before did not fit into a checkpoint, which was refused as if it were the saved one.
TEST(Numbers, AreRestoredIntoOneThatCouldNotBeSaved) {
  const Folder folder;
  int64_t saved = 5, other = 1;
  track_count(folder, saved, other, true);
  size_t none_yet = std::numeric_limits<size_t>::max();
  track_count(folder, none_yet, other, false);
  EXPECT_EQ(none_yet, 5U);
}

// It became infinite.
TEST(Numbers, ThatAreTooLargeForAFloatAreRefused) {
  const Folder folder;
  double large = 1e300;
  int64_t other = 1;
  track_count(folder, large, other, true);
  float as_float = 4;
  EXPECT_THAT(message_of<CheckpointError>([&] { track_count(folder, as_float, other, false); }),
              HasSubstr("does not fit"));
  EXPECT_EQ(as_float, 4);
  for (const double limit : {-std::numeric_limits<double>::infinity(), double{FLT_MAX}, 1e-300}) {
    large = limit;
    const Folder next;
    track_count(next, large, other, true);
    track_count(next, as_float, other, false);
    EXPECT_EQ(as_float, static_cast<float>(limit));
  }
}

}  // namespace
}  // namespace lockstep::test
