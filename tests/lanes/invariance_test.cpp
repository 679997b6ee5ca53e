// A run with 8 lanes leaves the same bits on any number of ranks.
#include <gtest/gtest.h>

#include "lanes/training.h"

namespace lockstep {
namespace {

using test::LaneRun;
using test::name_of;
using test::Ranks;
using test::result_of;
using test::train_in_lanes;

uint64_t hash_of(const Ranks& ranks, const LaneRun& run) {
  return result_of(ranks, [&](World& world) { return train_in_lanes(world, run); });
}

class LaneWorlds : public testing::TestWithParam<Ranks> {};

INSTANTIATE_TEST_SUITE_P(On, LaneWorlds,
                         testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3}, Ranks{"shm", 8},
                                         Ranks{"gloo", 2}, Ranks{"tcp", 2}, Ranks{"tcp", 5},
                                         Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"auto", 3, {0, 1, 1}}),
                         name_of);

TEST_P(LaneWorlds, ConvolutionsWithBatchNormAndDropout) {
  const LaneRun run{.model = "conv", .optimizer = "sgd"};
  EXPECT_EQ(hash_of(GetParam(), run), hash_of({"shm", 1}, run));
}

TEST_P(LaneWorlds, ALanguageModelWithADividedOptimizerAndOtherBuckets) {
  LaneRun run{.model = "lstm", .optimizer = "zero"};
  const auto alone = hash_of({"shm", 1}, run);
  run.ddp.bucket_bytes = {512, 2048};
  run.prefetch = 2;
  EXPECT_EQ(hash_of(GetParam(), run), alone);
}

TEST_P(LaneWorlds, ATransformerInBFloat16WithClipping) {
  const LaneRun run{.model = "transformer", .optimizer = "adamw"};
  EXPECT_EQ(hash_of(GetParam(), run), hash_of({"shm", 1}, run));
}

TEST(LaneCounts, ThatAreNoPowersOfTwo) {
  for (const int64_t lanes : {3, 6, 7}) {
    LaneRun run{.lanes = lanes, .steps = 2};
    run.ddp.buffers = Buffers::Average;
    const auto alone = hash_of({"shm", 1}, run);
    EXPECT_NE(alone, 0);
    for (const int ranks : {2, 3}) EXPECT_EQ(hash_of({"shm", ranks}, run), alone) << lanes;
  }
}

// make lanes: all that docs/reproducibility.md promises.
TEST(LaneBars, DISABLED_OneHashForEveryModelOptimizerTransportAndNumberOfRanks) {
  for (const std::string model : {"conv", "lstm", "transformer"}) {
    for (const std::string optimizer : {"sgd", "adamw", "zero"}) {
      LaneRun run{.model = model, .optimizer = optimizer, .steps = 50};
      const auto alone = hash_of({"shm", 1}, run);
      EXPECT_NE(alone, 0);
      std::vector<Ranks> worlds;
      for (const int ranks : {2, 3, 4, 5, 7, 8}) {
        worlds.push_back({"shm", ranks});
        worlds.push_back({"tcp", ranks});
        std::vector<int> hosts;
        for (int rank = 0; rank < ranks; ++rank) hosts.push_back(2 * rank / ranks);
        if (ranks > 2) worlds.push_back({"auto", ranks, hosts});
      }
      int64_t bytes = 200;
      for (const Ranks& world : worlds) {
        run.ddp.bucket_bytes = {bytes, 4 * bytes};
        bytes = bytes * 2 % 100000;
        const auto hash = hash_of(world, run);
        EXPECT_EQ(hash, alone) << world.name() << " " << model << " " << optimizer;
        std::printf("%-12s %-6s %-24s %016lx\n", model.c_str(), optimizer.c_str(),
                    world.name().c_str(), static_cast<unsigned long>(hash));
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
