// Whether ranks that are bound to cores, or not, have one each.
#include "comm/host/core_sets.h"

#include <gtest/gtest.h>

namespace lockstep::comm {
namespace {

bool has_each(const std::vector<std::vector<int>>& ranks) {
  std::vector<CoreSet> sets;
  for (const auto& cores : ranks) sets.push_back(core_set(cores));
  return each_has_a_core(sets);
}

TEST(CoreSets, UnboundRanksShareWhatThereIs) {
  EXPECT_TRUE(has_each({{0, 1}, {0, 1}}));
  EXPECT_FALSE(has_each({{0, 1}, {0, 1}, {0, 1}}));
}

// As mpirun and `lockstep run --bind cores` leave them: they were taken for ranks on one core.
TEST(CoreSets, RanksThatAreBoundToACoreEachHaveIt) {
  EXPECT_TRUE(has_each({{0}, {1}, {2}, {3}}));
  EXPECT_TRUE(has_each({{0, 1}, {2, 3}}));
  EXPECT_FALSE(has_each({{0}, {0}}));
  EXPECT_FALSE(has_each({{0}, {1}, {1}}));
}

TEST(CoreSets, NodesHaveSeveralRanksEach) {
  EXPECT_TRUE(has_each({{0, 1}, {0, 1}, {2, 3}, {2, 3}}));
  EXPECT_FALSE(has_each({{0, 1}, {0, 1}, {0, 1}, {2, 3}}));
}

TEST(CoreSets, ABoundRankBesideOnesThatAreNot) {
  EXPECT_TRUE(has_each({{0}, {0, 1, 2}, {0, 1, 2}}));
  EXPECT_FALSE(has_each({{0}, {1}, {0, 1}}));
}

TEST(CoreSets, WhatIsNotKnownIsNoCore) {
  EXPECT_FALSE(has_each({{}, {}}));
  EXPECT_FALSE(has_each({{0, 1, 2}, {}}));
  EXPECT_FALSE(has_each({{0}, {1 << 20}}));
}

}  // namespace
}  // namespace lockstep::comm
