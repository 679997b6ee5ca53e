// Memory of a group, which ranks free when they like.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>

#include "support/spawn.h"

namespace lockstep::comm {
namespace {

using test::name_of;
using test::Ranks;
using test::spawn;

class GroupMemoryOf : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, GroupMemoryOf,
                         testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3},
                                         Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

// Rank 0 reads what the others name in their calls, though it has freed its own part of that.
TEST_P(GroupMemoryOf, OneRankMayFreeWhatTheOthersUse) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    at::Tensor mine = group.empty({1000}), other = group.empty({1000});
    if (group.rank() == 0) std::swap(mine, other), other = at::Tensor();
    for (int i = 0; i < 3; ++i) {
      mine.fill_(group.rank());
      group.all_reduce(mine).wait();
      EXPECT_TRUE(at::equal(mine, at::full({1000}, float(group.size() * (group.size() - 1) / 2))));
    }
  });
}

TEST_P(GroupMemoryOf, HasNoNegativeSize) {
  spawn(GetParam(), [](World& world) {
    EXPECT_THROW(world.group().empty({-1}), ConfigError);
    EXPECT_THROW(world.group().shared({2, -1}), ConfigError);
  });
}

int64_t mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:lockstep") != std::string::npos;
  return count;
}

TEST_P(GroupMemoryOf, IsGivenBackWhenAllHaveFreedIt) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int64_t before = mapped_segments();
    for (int i = 0; i < 20; ++i) {
      at::Tensor memory = group.empty({100000});
      memory.fill_(1);
      group.all_reduce(memory).wait();
    }
    group.barrier().wait();
    const at::Tensor last = group.empty({1});
    EXPECT_LE(mapped_segments(), before + 3);
  });
}

}  // namespace
}  // namespace lockstep::comm
