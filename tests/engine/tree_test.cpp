// The tree above partial sums, against the kernels' own tree over all ranks.
#include "comm/reduce/tree.h"

#include <gmock/gmock.h>

#include <random>

namespace lockstep::comm {
namespace {

using testing::ElementsAre;

TEST(Tree, NodesThatCoverABlockOfRanks) {
  EXPECT_THAT(maximal_nodes({0, 1}, 4), ElementsAre(Range{0, 2}));
  EXPECT_THAT(maximal_nodes({0, 1, 2, 3}, 4), ElementsAre(Range{0, 4}));
  EXPECT_THAT(maximal_nodes({0, 1, 2}, 6), ElementsAre(Range{0, 2}, Range{2, 3}));
  EXPECT_THAT(maximal_nodes({3, 4, 5}, 6), ElementsAre(Range{3, 4}, Range{4, 6}));
  EXPECT_THAT(maximal_nodes({1, 3}, 4), ElementsAre(Range{1, 2}, Range{3, 4}));
  EXPECT_THAT(maximal_nodes({4, 5, 6}, 7), ElementsAre(Range{4, 7}));
}

// Cuts `ranks` ranks into random groups; each sums up its nodes, the tree the rest.
TEST(Tree, AnyGroupingGivesTheSameBits) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  constexpr int64_t kCount = 10000;  // more than a block
  for (int ranks = 2; ranks <= 13; ++ranks) {
    std::vector<std::vector<float>> data(ranks, std::vector<float>(kCount));
    for (auto& values : data) {
      for (float& value : values) value = std::exp(4 * normal(random)) * normal(random);
    }
    std::vector<const void*> sources;
    for (const auto& values : data) sources.push_back(values.data());
    const Reduction average{Element::Float32, Combine::Sum, ranks};
    std::vector<float> expected(kCount);
    void* whole = expected.data();
    reduce(average, sources.data(), ranks, &whole, 1, kCount);

    for (int groups = 1; groups <= ranks; ++groups) {
      std::vector<std::vector<int>> members(groups);
      for (int rank = 0; rank < ranks; ++rank) members[random() % groups].push_back(rank);
      std::vector<Range> nodes;
      for (const auto& group : members) {
        for (const Range& node : maximal_nodes(group, ranks)) nodes.push_back(node);
      }
      std::sort(nodes.begin(), nodes.end(),
                [](const Range& a, const Range& b) { return a.begin < b.begin; });
      std::vector<std::vector<float>> partial;
      std::vector<const void*> parts;
      for (const Range& node : nodes) {
        auto& sum = partial.emplace_back(kCount);
        void* target = sum.data();
        reduce({Element::Float32, Combine::Sum}, sources.data() + node.begin,
               static_cast<int>(node.size()), &target, 1, kCount);
      }
      for (const auto& sum : partial) parts.push_back(sum.data());
      std::vector<float> result(kCount);
      Tree(nodes, ranks).sum(average, parts.data(), {result.data()}, kCount);
      EXPECT_EQ(result, expected) << ranks << " ranks in " << groups << " groups";
    }
  }
}

}  // namespace
}  // namespace lockstep::comm
