#include "lockstep/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {
namespace {

using test::message_of;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

// Sample i is (i, -i).
TensorDataset numbers(int64_t size) { return {at::arange(size), -at::arange(size)}; }

std::vector<int64_t> values(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

using Batches = std::vector<std::vector<int64_t>>;

Batches batches_of(Loader& loader, int64_t epoch) {
  Batches batches;
  for (auto [x, y] : loader.epoch(epoch)) {
    EXPECT_TRUE(y.equal(-x));
    batches.push_back(values(x));
  }
  return batches;
}

// Everything below holds without background threads, with one and with two.
class EveryLoader : public testing::TestWithParam<int64_t> {
 protected:
  int64_t prefetch() const { return GetParam(); }
  int64_t workers() const { return GetParam() / 2; }
};
INSTANTIATE_TEST_SUITE_P(Prefetch, EveryLoader, testing::Values(0, 1, 5),
                         testing::PrintToStringParamName());

TEST_P(EveryLoader, CutsTheSamplersOrderIntoBatches) {
  const auto set = numbers(23);
  for (const int64_t world : {1, 2, 3}) {
    for (int64_t rank = 0; rank < world; ++rank) {
      Loader loader(set, Shard{rank, world},
                    {.batch_size = 4, .seed = 3, .prefetch = prefetch(), .workers = workers()});
      DistributedSampler sampler(23, {rank, world}, {.seed = 3});
      for (const int64_t epoch : {0, 1, 0}) {
        sampler.set_epoch(epoch);
        std::vector<int64_t> all;
        const Batches batches = batches_of(loader, epoch);
        for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
        EXPECT_EQ(all, sampler.indices());
        EXPECT_THAT(batches, SizeIs(loader.batches()));
      }
    }
  }
}

TEST_P(EveryLoader, UnshuffledOnTwoRanks) {
  const auto set = numbers(9);
  const LoaderOptions options{
      .batch_size = 2, .shuffle = false, .prefetch = prefetch(), .workers = workers()};
  Loader first(set, Shard{0, 2}, options), second(set, Shard{1, 2}, options);
  EXPECT_THAT(batches_of(first, 0),
              ElementsAre(ElementsAre(0, 2), ElementsAre(4, 6), ElementsAre(8)));
  EXPECT_THAT(batches_of(second, 0),
              ElementsAre(ElementsAre(1, 3), ElementsAre(5, 7), ElementsAre(0)));
}

TEST_P(EveryLoader, DropLastLeavesFullBatches) {
  const auto set = numbers(23);
  for (const int64_t rank : {0, 1, 2}) {
    Loader loader(
        set, Shard{rank, 3},
        {.batch_size = 2, .drop_last = true, .prefetch = prefetch(), .workers = workers()});
    EXPECT_THAT(batches_of(loader, 0), AllOf(SizeIs(3), Each(SizeIs(2))));
  }
}

TEST_P(EveryLoader, ExactEndsUnevenly) {
  const auto set = numbers(5);
  const LoaderOptions options{.batch_size = 1,
                              .shuffle = false,
                              .exact = true,
                              .prefetch = prefetch(),
                              .workers = workers()};
  Loader first(set, Shard{0, 2}, options), second(set, Shard{1, 2}, options);
  EXPECT_THAT(batches_of(first, 0), ElementsAre(ElementsAre(0), ElementsAre(2), ElementsAre(4)));
  EXPECT_THAT(batches_of(second, 0), ElementsAre(ElementsAre(1), ElementsAre(3)));
}

TEST_P(EveryLoader, ExactOnMoreRanksThanSamples) {
  const auto set = numbers(1);
  Loader loader(set, Shard{1, 2}, {.exact = true, .prefetch = prefetch(), .workers = workers()});
  EXPECT_THAT(batches_of(loader, 0), SizeIs(0));
}

TEST_P(EveryLoader, BatchesThatAreKeptStayAsTheyWere) {
  const auto set = numbers(40);
  Loader loader(set, Shard{0, 1},
                {.batch_size = 4, .shuffle = false, .prefetch = prefetch(), .workers = workers()});
  std::vector<at::Tensor> kept;
  for (auto [x, y] : loader.epoch(0)) kept.push_back(x.slice(0, 1, 3));
  EXPECT_TRUE(at::cat(kept).view({10, 2}).equal(
      at::stack({at::arange(1, 40, 4), at::arange(2, 40, 4)}, 1)));
}

TEST_P(EveryLoader, TransformsApplyInTurn) {
  const auto set = numbers(6);
  Loader loader(set, Shard{0, 1},
                {.batch_size = 3,
                 .shuffle = false,
                 .prefetch = prefetch(),
                 .workers = workers(),
                 .transforms = {[](Batch b) {
                                  return Batch{b.data + 1, b.target};
                                },
                                [](Batch b) {
                                  return Batch{b.data * 10, b.target};
                                }}});
  std::vector<int64_t> seen;
  for (auto [x, y] : loader.epoch(0)) {
    for (const int64_t value : values(x)) seen.push_back(value);
  }
  EXPECT_THAT(seen, ElementsAre(10, 20, 30, 40, 50, 60));
}

// Tensors of a transform are its own: they are never written to.
TEST_P(EveryLoader, TransformsTensorsAreNotReused) {
  std::vector<int64_t> memory(2, 7);
  const auto set = numbers(8);
  Loader loader(set, Shard{0, 1},
                {.batch_size = 2,
                 .prefetch = prefetch(),
                 .workers = workers(),
                 .transforms = {[&](Batch b) {
                   return Batch{at::from_blob(memory.data(), {2}, at::kLong), b.target};
                 }}});
  for (auto [x, y] : loader.epoch(0)) EXPECT_THAT(values(x), ElementsAre(7, 7));
}

TEST_P(EveryLoader, AnEpochCanBeLeftAndBegunAnew) {
  const auto set = numbers(100);
  Loader loader(set, Shard{0, 1}, {.batch_size = 5, .prefetch = prefetch(), .workers = workers()});
  const Batches whole = batches_of(loader, 2);
  for (auto [x, y] : loader.epoch(2)) {
    EXPECT_EQ(values(x), whole[0]);
    break;
  }
  EXPECT_EQ(batches_of(loader, 2), whole);
}

TEST_P(EveryLoader, AStepsBatchesStayWhereTheyAre) {
  const auto set = numbers(32);
  Loader loader(set, Shard{0, 1},
                {.batch_size = 2,
                 .shuffle = false,
                 .prefetch = prefetch(),
                 .workers = workers(),
                 .lanes = 4});
  for (auto step : loader.steps(0)) {
    const Batch& first = step.batch(0);
    const auto before = values(first.data.clone());
    step.batch(3);
    ASSERT_EQ(&step.batch(0), &first);
    EXPECT_EQ(values(first.data), before);
  }
}

TEST_P(EveryLoader, EpochMayOutliveItsLoader) {
  const auto set = numbers(6);
  auto loader = std::make_unique<Loader>(
      set, Shard{0, 1},
      LoaderOptions{
          .batch_size = 2, .shuffle = false, .prefetch = prefetch(), .workers = workers()});
  auto epoch = loader->epoch(0);
  loader.reset();
  int64_t next = 0;
  for (auto [x, y] : epoch) {
    EXPECT_THAT(values(x), ElementsAre(next, next + 1));
    next += 2;
  }
  EXPECT_EQ(next, 6);
}

TEST_P(EveryLoader, AnEpochIsGoneThroughOnce) {
  const auto set = numbers(6);
  Loader loader(set, Shard{0, 1}, {.batch_size = 2, .prefetch = prefetch(), .workers = workers()});
  auto epoch = loader.epoch(0);
  EXPECT_EQ(epoch.batches(), 3);
  auto at = epoch.begin();
  ++at;
  EXPECT_EQ(epoch.batches(), 1);
  EXPECT_THROW(epoch.begin(), ConfigError);
}

TEST_P(EveryLoader, ATransformsFailureNamesTheBatch) {
  const auto set = numbers(6);
  Loader loader(set, Shard{0, 1},
                {.batch_size = 3,
                 .shuffle = false,
                 .prefetch = prefetch(),
                 .workers = workers(),
                 .transforms = {[](Batch b) { return b; },
                                [](Batch b) {
                                  return Batch{b.data.view({5}), b.target};
                                }}});
  EXPECT_THAT(
      message_of<DataError>([&] { batches_of(loader, 0); }),
      AllOf(HasSubstr("epoch 0, batch 0 of 2: transform 1 failed on samples 0, 1, 2: shape"),
            testing::Not(HasSubstr("Exception raised from"))));
}

TEST(Loader, TakesTheWorldsRankAndSize) {
  const auto set = numbers(4);
  Loader loader(set, World::solo(), {.batch_size = 3, .shuffle = false});
  EXPECT_THAT(batches_of(loader, 0), ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3)));
}

// Without a keeper each batch lies where the last one lay.
TEST(Loader, MemoryServesAgain) {
  const auto set = numbers(40);
  Loader loader(set, Shard{0, 1}, {.batch_size = 4});
  const void* memory = nullptr;
  for (auto [x, y] : loader.epoch(0)) {
    if (memory == nullptr) memory = x.const_data_ptr();
    EXPECT_EQ(x.const_data_ptr(), memory);
  }
}

TEST(Loader, ABatchLargerThanTheDataIsShort) {
  const auto set = numbers(10);
  Loader loader(set, Shard{0, 2}, {.batch_size = 64});
  EXPECT_THAT(batches_of(loader, 0), ElementsAre(SizeIs(5)));
}

TEST(Loader, MoreMayBeMadeAheadThanThereIs) {
  const auto set = numbers(10);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const LoaderOptions& options :
       {LoaderOptions{.batch_size = 4, .prefetch = kMost},
        LoaderOptions{.batch_size = 4, .prefetch = 2, .workers = kMost},
        LoaderOptions{.batch_size = 4, .workers = kMost}}) {
    Loader loader(set, Shard{0, 1}, options);
    EXPECT_THAT(batches_of(loader, 0), ElementsAre(SizeIs(4), SizeIs(4), SizeIs(2)));
  }
}

// Those that have come would be left out in all epochs.
TEST(Loader, RefusesADataSetThatHasGrown) {
  struct Growing : Dataset {
    int64_t size() const override { return samples; }
    Batch get_batch(at::IntArrayRef indices) const override {
      return {at::tensor(indices), at::tensor(indices)};
    }
    int64_t samples = 10;
  } set;
  Loader loader(set, Shard{0, 1}), lanes(set, Shard{0, 1}, {.lanes = 2});
  set.samples = 12;
  const auto refusal =
      HasSubstr("the data set has 12 samples, and had 10 when the loader was made");
  EXPECT_THAT(message_of<ConfigError>([&] { (void)loader.epoch(1); }), refusal);
  EXPECT_THAT(message_of<ConfigError>([&] { (void)lanes.steps(1); }), refusal);
  Loader another(set, Shard{0, 1});
  another.restore(loader.state());
  EXPECT_EQ(another.epoch(0).batches(), 1);
}

TEST(Loader, RefusesDropLastThatLeavesNothing) {
  const auto set = numbers(100);
  EXPECT_THAT(message_of<ConfigError>([&] {
                Loader(set, Shard{0, 2}, {.batch_size = 64, .drop_last = true});
              }),
              HasSubstr("batch_size 64 on 2 ranks needs 128 samples, the data set has 100"));
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(message_of<ConfigError>([&] {
                Loader(set, Shard{0, 2}, {.batch_size = kAll, .drop_last = true});
              }),
              HasSubstr("needs 9223372036854775807 samples"));
}

TEST(Loader, RefusesNoSamples) {
  const auto set = numbers(0);
  EXPECT_THAT(message_of<ConfigError>([&] {
                Loader(set, Shard{0, 2});
              }),
              HasSubstr("the data set has 0 samples"));
}

TEST(Loader, RefusesImpossibleOptions) {
  const auto set = numbers(10);
  for (const LoaderOptions& options :
       {LoaderOptions{.batch_size = 0}, LoaderOptions{.prefetch = -1},
        LoaderOptions{.drop_last = true, .exact = true}, LoaderOptions{.workers = -1},
        LoaderOptions{.transforms = {std::function<Batch(Batch)>()}}}) {
    EXPECT_THROW(Loader(set, Shard{0, 1}, options), ConfigError);
  }
  EXPECT_THROW(Loader(set, Shard{2, 2}), ConfigError);
  Loader loader(set, Shard{0, 1});
  EXPECT_THROW(loader.epoch(-1), ConfigError);
}

}  // namespace
}  // namespace lockstep::data
