// An average over lanes has the same bits whichever ranks have which lanes.
#include "comm/reduce/node_sum.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "support/spawn.h"

namespace lockstep::comm {
namespace {

using test::name_of;
using test::Ranks;
using test::spawn;

at::Tensor lane_value(int64_t lane, int64_t count, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(100 + static_cast<uint64_t>(lane));
  return at::randn({count}, generator, at::kFloat).to(dtype);
}

at::Tensor tree(Range node, int64_t count, at::ScalarType dtype) {
  if (node.size() == 1) return lane_value(node.begin, count, dtype);
  const auto half = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(node.size() - 1)));
  return tree({node.begin, node.begin + half}, count, dtype) +
         tree({node.begin + half, node.end}, count, dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

class NodeSums : public testing::TestWithParam<Ranks> {};

INSTANTIATE_TEST_SUITE_P(On, NodeSums,
                         testing::Values(Ranks{"shm", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                         Ranks{"shm", 4}, Ranks{"shm", 5}, Ranks{"shm", 7},
                                         Ranks{"shm", 8}, Ranks{"gloo", 2}, Ranks{"tcp", 2},
                                         Ranks{"tcp", 3}, Ranks{"tcp", 4}, Ranks{"tcp", 5},
                                         Ranks{"auto", 3, {0, 0, 1}},
                                         Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"auto", 5, {0, 1, 0, 1, 1}}),
                         name_of);

TEST_P(NodeSums, HaveTheBitsOfTheTreeOverLanes) {
  spawn(GetParam(), [](World& world) {
    for (const int64_t lanes : {8, 9, 12}) {
      const NodeSum sum(world.group(), lanes);
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        for (const int64_t count : {0, 1, 30, 40000}) {
          const at::Tensor expected = tree({0, lanes}, count, dtype).div(lanes);
          for (const bool own_memory : {false, true}) {
            std::vector<at::Tensor> parts;
            for (const Range& node : sum.nodes()) {
              parts.push_back(own_memory && parts.empty() ? world.group().empty({count}, dtype)
                                                          : at::empty({count}, dtype));
              parts.back().copy_(tree(node, count, dtype));
            }
            sum.average(parts, {.label = "lanes"}).wait();
            EXPECT_TRUE(same_bits(parts[0], expected))
                << lanes << " lanes of " << count << " " << dtype << " on " << world.size();
          }
        }
      }
    }
  });
}

TEST(NodeSum, IsOneCallWhereRanksHaveTheTreesShape) {
  for (int ranks = 1; ranks <= 6; ++ranks) {
    spawn(ranks, [&](World& world) {
      const auto is_one = [&](int64_t lanes) {
        return NodeSum(world.group(), lanes).is_one_call();
      };
      // As many lanes as ranks, or 2^k times as many.
      EXPECT_TRUE(is_one(ranks));
      EXPECT_TRUE(is_one(2 * ranks));
      EXPECT_TRUE(is_one(4 * ranks));
      EXPECT_EQ(is_one(8), ranks == 1 || ranks == 2 || ranks == 4);
    });
  }
}

// Two in flight at once.
TEST(NodeSum, MayOverlap) {
  spawn(3, [](World& world) {
    const NodeSum sum(world.group(), 8);
    std::vector<std::vector<at::Tensor>> parts(2);
    for (auto& own : parts) {
      for (const Range& node : sum.nodes()) own.push_back(tree(node, 5000, at::kFloat));
    }
    Work first = sum.average(parts[0]), second = sum.average(parts[1]);
    first.wait();
    second.wait();
    const at::Tensor expected = tree({0, 8}, 5000, at::kFloat).div(8);
    EXPECT_TRUE(same_bits(parts[0][0], expected));
    EXPECT_TRUE(same_bits(parts[1][0], expected));
  });
}

}  // namespace
}  // namespace lockstep::comm
