// Stopping in the middle of an epoch and going on, on the same number of ranks or another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

constexpr int64_t kSize = 101;
const TensorDataset& numbers() {
  static const TensorDataset set(at::arange(kSize), at::arange(kSize));
  return set;
}

SamplerState at(int64_t epoch, int64_t position) {
  return {.epoch = epoch, .position = position, .seed = 6, .length = kSize};
}

struct Read {
  std::vector<int64_t> samples;
  SamplerState state;  // as the loop's body sees it in the last batch read
};

// The samples of `rank`'s next epoch(epoch), of its first `steps` batches at most.
Read read(Loader& loader, int64_t epoch, int64_t steps = kSize) {
  Read result{{}, loader.state()};
  for (auto [x, y] : loader.epoch(epoch)) {
    result.samples.insert(result.samples.end(), x.const_data_ptr<int64_t>(),
                          x.const_data_ptr<int64_t>() + x.numel());
    result.state = loader.state();
    if (--steps == 0) break;
  }
  return result;
}

class LoaderResume : public testing::TestWithParam<int64_t> {
 protected:
  LoaderOptions options(int64_t batch_size = 4) const {
    return {.batch_size = batch_size, .seed = 6, .exact = true, .prefetch = GetParam()};
  }
};
INSTANTIATE_TEST_SUITE_P(Prefetch, LoaderResume, testing::Values(0, 2),
                         testing::PrintToStringParamName());

TEST_P(LoaderResume, ResumedIsUninterrupted) {
  for (const int64_t rank : {0, 1, 2}) {
    LoaderOptions padded = options();
    padded.exact = false;
    Loader whole(numbers(), Shard{rank, 3}, padded), stopped(numbers(), Shard{rank, 3}, padded);
    Loader resumed(numbers(), Shard{rank, 3}, padded);
    const auto expected = read(whole, 2).samples;
    const Read before = read(stopped, 2, 5);
    EXPECT_EQ(before.state, at(2, 60));

    resumed.restore(before.state);
    EXPECT_EQ(resumed.state(), before.state);
    auto samples = before.samples;
    for (const int64_t sample : read(resumed, 2).samples) samples.push_back(sample);
    EXPECT_EQ(samples, expected);
  }
}

TEST_P(LoaderResume, OnAnotherWorldAndBatchSizeNothingComesTwiceOrNever) {
  std::vector<int64_t> before;
  SamplerState state;
  for (const int64_t rank : {0, 1, 2}) {
    Loader loader(numbers(), Shard{rank, 3}, options());
    const Read part = read(loader, 1, 3);
    before.insert(before.end(), part.samples.begin(), part.samples.end());
    state = part.state;
  }
  EXPECT_THAT(before, SizeIs(36));
  for (const int64_t world : {1, 2, 4, 7}) {
    auto all = before;
    for (int64_t rank = 0; rank < world; ++rank) {
      Loader loader(numbers(), Shard{rank, world}, options(5));
      loader.restore(state);
      const Read rest = read(loader, 1);
      all.insert(all.end(), rest.samples.begin(), rest.samples.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_TRUE(at::tensor(all, at::kLong).equal(at::arange(kSize))) << world;
  }
}

TEST_P(LoaderResume, OnlyTheRestoredEpochIsCut) {
  Loader loader(numbers(), Shard{0, 1}, options());
  loader.restore(at(3, 40));
  EXPECT_THAT(read(loader, 3).samples, SizeIs(kSize - 40));
  EXPECT_EQ(loader.state(), at(4, 0));
  EXPECT_THAT(read(loader, 4).samples, SizeIs(kSize));
  EXPECT_THAT(read(loader, 3).samples, SizeIs(kSize));
}

TEST_P(LoaderResume, AfterTheLastBatchNothingIsLeft) {
  Loader loader(numbers(), Shard{1, 2}, options()), resumed(numbers(), Shard{1, 2}, options());
  const Read whole = read(loader, 0);
  EXPECT_EQ(whole.state, at(0, kSize));
  resumed.restore(whole.state);
  EXPECT_THAT(read(resumed, 0).samples, SizeIs(0));
  EXPECT_EQ(resumed.state(), at(1, 0));
}

TEST_P(LoaderResume, RefusesAStateOfOtherData) {
  Loader loader(numbers(), Shard{0, 1}, options());
  loader.restore(at(1, 8));
  EXPECT_THAT(test::message_of<ConfigError>([&] { loader.restore(at(1, kSize + 1)); }),
              HasSubstr("position 102 of 101 samples"));
  EXPECT_EQ(loader.state(), at(1, 8));
}

TEST_P(LoaderResume, DataThatHaveGrownGoOnWithAnEpoch) {
  Loader loader(numbers(), Shard{1, 2}, {.batch_size = 4, .seed = 6});
  Loader other(numbers(), Shard{1, 2}, {.batch_size = 4, .seed = 6});
  SamplerState state = at(3, 0);
  state.length = 99;
  loader.restore(state);
  EXPECT_EQ(loader.state(), at(3, 0));
  EXPECT_EQ(loader.batches_left(), loader.batches());
  auto epoch = loader.epoch(3), whole = other.epoch(3);
  EXPECT_TRUE((*epoch.begin()).data.equal((*whole.begin()).data));
}

// At the end of an epoch the loader stands in the next, whose shuffle begins with its first batch.
TEST(LoaderRest, IsCountedWithoutAShuffle) {
  static int64_t shuffles = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(call.name()) == "aten::randperm") ++shuffles;
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  Loader loader(numbers(), Shard{0, 2}, {.batch_size = 4, .seed = 6, .drop_last = true});
  (void)read(loader, 0);
  const int64_t before = shuffles;
  EXPECT_GT(before, 0);
  EXPECT_EQ(loader.state(), at(1, 0));
  EXPECT_EQ(loader.batches_left(), 12);
  loader.restore(at(0, 88));
  EXPECT_EQ(loader.batches_left(), 1);
  EXPECT_EQ(shuffles, before);
  at::removeCallback(handle);
}

TEST(LoaderMisuse, ThereIsNothingPastTheEnd) {
  for (const int64_t workers : {0, 2}) {
    Loader loader(numbers(), Shard{0, 1}, {.batch_size = 100, .workers = workers});
    auto epoch = loader.epoch(0);
    auto at = epoch.begin();
    ++at;
    ++at;
    EXPECT_TRUE(at == epoch.end());
    EXPECT_THAT(test::message_of<ConfigError>([&] { ++at; }), HasSubstr("++ past the end"));
  }
}

TEST(LoaderMisuse, NoDataSetAndOneThatCannotBeShuffledAreNamed) {
  const std::shared_ptr<const Dataset> none;
  EXPECT_THAT(test::message_of<ConfigError>([&] {
                Loader(none, Shard{0, 1});
              }),
              HasSubstr("the data set is a null pointer"));
  EXPECT_THAT(test::message_of<ConfigError>([] {
                DistributedSampler(int64_t{1} << 55, Shard{0, 1});
              }),
              HasSubstr("there is no memory for their order, which takes 2.88e+08 GB"));
}

TEST_P(LoaderResume, RefusesAStateOfAnotherOrder) {
  const auto refusal_of = [](SamplerState state) {
    Loader loader(numbers(), Shard{0, 1}, {.seed = 6});
    const SamplerState before = loader.state();
    const std::string message = test::message_of<ConfigError>([&] { loader.restore(state); });
    EXPECT_EQ(loader.state(), before);
    return message;
  };
  SamplerState state = at(1, 8);
  state.seed = 7;
  EXPECT_THAT(
      refusal_of(state),
      HasSubstr("the state is of 101 samples, seed 7, shuffled, this is 101 samples, seed 6"));
  state = at(1, 8);
  state.length = 99;
  EXPECT_THAT(refusal_of(state), HasSubstr("the state is of 99 samples"));
  state = at(1, 8);
  state.shuffle = false;
  EXPECT_THAT(refusal_of(state), HasSubstr("seed 6, not shuffled, this is"));
}

}  // namespace
}  // namespace lockstep::data
