#include "lockstep/data/sampler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>

#include "data/files.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Checks lines of sampler_cases.py; returns how many.
int64_t check_cases(std::istream& lines) {
  int64_t count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    std::istringstream words(line);
    int64_t length = 0, epoch = 0;
    Shard part;
    SamplerOptions options;
    std::string colon;
    words >> length >> part.count >> part.index >> options.seed >> epoch >> options.shuffle >>
        options.drop_last >> colon;
    std::vector<int64_t> expected;
    for (int64_t index = 0; words >> index;) expected.push_back(index);

    DistributedSampler sampler(length, part, options);
    sampler.set_epoch(epoch);
    EXPECT_EQ(sampler.indices(), expected) << line;
  }
  return count;
}

TEST(DistributedSampler, B65_EqualsRecordedPython) {
  std::ifstream recorded(LOCKSTEP_SOURCE_DIR "/tests/data/sampler_cases.txt");
  EXPECT_EQ(check_cases(recorded), 1025);
}

TEST(DistributedSampler, B65_EqualsLivePython) {
  constexpr int kCases = 200;
  const test::Folder folder;
  std::mt19937_64 random(3);
  std::string cases;
  for (int i = 0; i < kCases; ++i) {
    const auto length = 1 + random() % (i % 20 == 0 ? 60'000 : 300);
    const auto world = 1 + random() % 9;
    cases += fmt::format("{} {} {} {} {} {} {}\n", length, world, random() % world,
                         random() >> (2 + random() % 60), random() % 100, random() % 4 != 0 ? 1 : 0,
                         random() % 2);
  }
  test::write(folder / "cases", cases);
  const std::string command =
      fmt::format("{} {}/tests/data/sampler_cases.py < {} > {}", LOCKSTEP_PEERS_PYTHON,
                  LOCKSTEP_SOURCE_DIR, folder / "cases", folder / "out");
  ASSERT_EQ(std::system(command.c_str()), 0)
      << "needs a Python with torch at " << LOCKSTEP_PEERS_PYTHON << " (LOCKSTEP_PEERS_PYTHON)";
  std::ifstream out(folder / "out");
  EXPECT_EQ(check_cases(out), kCases);
}

std::vector<std::vector<int64_t>> split(int64_t length, int64_t world, SamplerOptions options,
                                        int64_t epoch = 0, int64_t position = 0) {
  std::vector<std::vector<int64_t>> ranks;
  for (int64_t rank = 0; rank < world; ++rank) {
    DistributedSampler sampler(length, {rank, world}, options);
    sampler.restore({epoch, position, options.seed, length, options.shuffle});
    EXPECT_EQ(static_cast<int64_t>(sampler.indices().size()), sampler.size());
    ranks.push_back(sampler.indices());
  }
  return ranks;
}

std::vector<int64_t> all_sorted(const std::vector<std::vector<int64_t>>& ranks) {
  std::vector<int64_t> all;
  for (const auto& rank : ranks) all.insert(all.end(), rank.begin(), rank.end());
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<int64_t> counted(int64_t length) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < length; ++i) numbers.push_back(i);
  return numbers;
}

TEST(DistributedSampler, ExactSplitOfTheGuides) {
  EXPECT_THAT(split(10, 3, {.shuffle = false, .exact = true}),
              ElementsAre(ElementsAre(0, 3, 6, 9), ElementsAre(1, 4, 7), ElementsAre(2, 5, 8)));
}

TEST(DistributedSampler, B65_ExactHasEverySampleOnce) {
  for (const int64_t length : {0, 1, 2, 7, 100}) {
    for (const int64_t world : {1, 2, 3, 4, 7}) {
      EXPECT_EQ(all_sorted(split(length, world, {.exact = true})), counted(length));
    }
  }
}

TEST(DistributedSampler, B65_OrderDependsOnSeedPlusEpochOnly) {
  DistributedSampler a(50, {0, 1}, {.seed = 4});
  const auto first = a.indices();
  a.set_epoch(1);
  EXPECT_NE(a.indices(), first);
  EXPECT_EQ(a.indices(), DistributedSampler(50, {0, 1}, {.seed = 5}).indices());
  a.set_epoch(0);
  EXPECT_EQ(a.indices(), first);
}

TEST(DistributedSampler, ResumesWhereItStood) {
  for (const bool drop_last : {false, true}) {
    DistributedSampler sampler(29, {1, 3}, {.seed = 2, .drop_last = drop_last});
    sampler.set_epoch(5);
    const auto whole = sampler.indices();
    sampler.advance(4);
    EXPECT_EQ(sampler.state(), (SamplerState{5, 12, 2, 29}));

    DistributedSampler resumed(29, {1, 3}, {.seed = 2, .drop_last = drop_last});
    resumed.restore(sampler.state());
    EXPECT_EQ(resumed.indices(), std::vector<int64_t>(whole.begin() + 4, whole.end()));
    EXPECT_EQ(resumed.indices(), sampler.indices());
  }
}

// Five ranks take a part, then other numbers of ranks the rest: together every sample, none twice.
TEST(DistributedSampler, ResumesOnOtherWorlds) {
  constexpr int64_t kLength = 103, kWorld = 5, kTaken = 7;
  const SamplerOptions options{.seed = 9, .exact = true};
  std::vector<std::vector<int64_t>> before = split(kLength, kWorld, options, 3);
  for (auto& rank : before) rank.resize(kTaken);
  for (const int64_t world : {1, 2, 3, 4, 5, 8}) {
    auto ranks = split(kLength, world, options, 3, kTaken * kWorld);
    ranks.insert(ranks.end(), before.begin(), before.end());
    EXPECT_EQ(all_sorted(ranks), counted(kLength)) << world;
  }
}

// The rest of a padded epoch goes on in the epoch's order, and is padded again.
TEST(DistributedSampler, ResumedPaddingIsThatOfTheNewWorld) {
  EXPECT_THAT(
      split(10, 4, {.shuffle = false}, 0, 4),
      ElementsAre(ElementsAre(4, 8), ElementsAre(5, 9), ElementsAre(6, 0), ElementsAre(7, 1)));
  EXPECT_THAT(split(10, 4, {.shuffle = false, .drop_last = true}, 0, 4),
              ElementsAre(ElementsAre(4), ElementsAre(5), ElementsAre(6), ElementsAre(7)));
}

TEST(DistributedSampler, AdvanceStopsAtTheEnd) {
  DistributedSampler sampler(10, {0, 3}, {});
  sampler.advance(4);
  EXPECT_EQ(sampler.state(), (SamplerState{0, 10, 0, 10}));
  EXPECT_THAT(sampler.indices(), IsEmpty());
  sampler.set_epoch(0);
  sampler.advance(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(sampler.size(), 0);
}

TEST(DistributedSampler, RefusesWhatCannotBe) {
  EXPECT_THAT(message_of<ConfigError>([] {
                DistributedSampler(10, {3, 3});
              }),
              HasSubstr("rank 3 of 3 over 10 samples"));
  EXPECT_THROW(DistributedSampler(10, {-1, 3}), ConfigError);
  EXPECT_THROW(DistributedSampler(-1, {0, 1}), ConfigError);
  EXPECT_THROW(DistributedSampler(10, {0, 1}, {.drop_last = true, .exact = true}), ConfigError);
  DistributedSampler sampler(10, {0, 1});
  EXPECT_THROW(sampler.set_epoch(-1), ConfigError);
  sampler.restore({2, 4, 0, 10});
  EXPECT_THAT(message_of<ConfigError>([&] {
                sampler.restore({0, 11, 0, 10});
              }),
              HasSubstr("position 11 of 10 samples"));
  EXPECT_EQ(sampler.state(), (SamplerState{2, 4, 0, 10}));
}

}  // namespace
}  // namespace lockstep::data
