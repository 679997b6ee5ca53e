#include "lockstep/core/shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;

std::vector<int64_t> sizes(int64_t length, int64_t count, Remainder remainder) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < count; ++i)
    result.push_back(Shard{i, count}.of(length, remainder).size());
  return result;
}

class ShardTest : public ::testing::TestWithParam<Remainder> {};

TEST_P(ShardTest, PartsCoverTheRangeInOrderAndDifferByOneAtMost) {
  for (int64_t length = 0; length <= 40; ++length) {
    for (int64_t count = 1; count <= 9; ++count) {
      int64_t end = 0;
      for (int64_t index = 0; index < count; ++index) {
        const Range part = Shard{index, count}.of(length, GetParam());
        ASSERT_EQ(part.begin, end) << index << " of " << count << ", " << length;
        ASSERT_GE(part.size(), length / count);
        ASSERT_LE(part.size(), length / count + 1);
        end = part.end;
      }
      ASSERT_EQ(end, length);
    }
  }
}

TEST_P(ShardTest, TheLargestRangeDoesNotOverflow) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ((Shard{999, 1000}.of(kMost, GetParam()).end), kMost);
  EXPECT_GE((Shard{999, 1000}.of(kMost, GetParam()).size()), kMost / 1000);
}

INSTANTIATE_TEST_SUITE_P(All, ShardTest,
                         ::testing::Values(Remainder::First, Remainder::Last, Remainder::Spread),
                         [](const auto& one) -> std::string {
                           return one.param == Remainder::First  ? "First"
                                  : one.param == Remainder::Last ? "Last"
                                                                 : "Spread";
                         });

TEST(Shard, RemainderGoesWhereItIsAskedTo) {
  EXPECT_THAT(sizes(10, 3, Remainder::First), ElementsAre(4, 3, 3));
  EXPECT_THAT(sizes(10, 3, Remainder::Last), ElementsAre(3, 3, 4));
  EXPECT_THAT(sizes(11, 4, Remainder::Last), ElementsAre(2, 3, 3, 3));
  EXPECT_THAT(sizes(10, 4, Remainder::Spread), ElementsAre(2, 3, 2, 3));
}

TEST(Shard, FewerItemsThanPartsLeavesSomeEmpty) {
  EXPECT_THAT(sizes(2, 4, Remainder::First), ElementsAre(1, 1, 0, 0));
}

TEST(Shard, WrongArgumentsAreRefused) {
  EXPECT_THROW((Shard{0, 0}.of(1)), ConfigError);
  EXPECT_THROW((Shard{2, 2}.of(1)), ConfigError);
  EXPECT_THROW((Shard{-1, 2}.of(1)), ConfigError);
  EXPECT_THROW((Shard{0, 2}.of(-1)), ConfigError);
}

}  // namespace
}  // namespace lockstep
