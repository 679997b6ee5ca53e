#include "lockstep/data/steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "support/thrown.h"

namespace lockstep::data {
namespace {

using test::message_of;
using testing::HasSubstr;

TensorDataset numbers(int64_t size) { return {at::arange(size), -at::arange(size)}; }

std::vector<int64_t> values(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

// By step and lane.
using Dealt = std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>>;

Dealt dealt(Loader& loader, int64_t epoch, int64_t first_step = 0) {
  Dealt batches;
  int64_t number = first_step;
  for (auto step : loader.steps(epoch)) {
    for (int64_t lane = step.lanes().begin; lane < step.lanes().end; ++lane) {
      const auto [x, y] = step.batch(lane);
      EXPECT_TRUE(y.equal(-x));
      batches[{number, lane}] = values(x);
    }
    ++number;
  }
  return batches;
}

Dealt dealt_by(int64_t ranks, const LoaderOptions& options, int64_t samples) {
  const auto set = numbers(samples);
  Dealt all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Loader loader(set, Shard{rank, ranks}, options);
    all.merge(dealt(loader, 1));
  }
  return all;
}

class Lanes : public testing::TestWithParam<int64_t> {
 protected:
  LoaderOptions options() const {
    return {
        .batch_size = 3, .seed = 5, .prefetch = GetParam(), .workers = GetParam() / 2, .lanes = 8};
  }
};
INSTANTIATE_TEST_SUITE_P(Prefetch, Lanes, testing::Values(0, 1, 5),
                         testing::PrintToStringParamName());

TEST_P(Lanes, HaveTheSameBatchesOnAnyNumberOfRanks) {
  for (const bool drop_last : {false, true}) {
    LoaderOptions lanes = options();
    lanes.drop_last = drop_last;
    // Those of the plain ranks, were there as many.
    LoaderOptions plain = lanes;
    plain.lanes = 0;
    Dealt expected;
    const auto set = numbers(101);
    for (int64_t lane = 0; lane < 8; ++lane) {
      Loader loader(set, Shard{lane, 8}, plain);
      int64_t number = 0;
      for (auto [x, y] : loader.epoch(1)) expected[{number++, lane}] = values(x);
    }
    for (int64_t ranks = 1; ranks <= 8; ++ranks) {
      EXPECT_EQ(dealt_by(ranks, lanes, 101), expected) << ranks << " ranks";
    }
  }
}

TEST_P(Lanes, ALaneThatIsLeftOutIsNotTheNextOnes) {
  const auto set = numbers(64);
  Loader whole(set, Shard{0, 2}, options()), part(set, Shard{0, 2}, options());
  const auto all = dealt(whole, 0);
  int64_t number = 0;
  for (auto step : part.steps(0)) {
    EXPECT_EQ(values(step.batch(1).data), all.at({number, 1}));
    EXPECT_EQ(values(step.batch(0).data), all.at({number, 0}));  // kept
    ++number;
  }
}

TEST_P(Lanes, AStateOfOneNumberOfRanksAndLanesGoesOnWithAnother) {
  const auto set = numbers(120);
  std::vector<SamplerState> states;
  Dealt rest;
  for (const int64_t ranks : {1, 3, 8}) {
    Loader loader(set, Shard{0, ranks}, options());
    int64_t number = 0;
    for (auto step : loader.steps(2)) {
      (void)step.batch(0);
      if (++number == 2) break;
    }
    states.push_back(loader.state());
  }
  EXPECT_EQ(states[0], states[1]);
  EXPECT_EQ(states[0], states[2]);
  EXPECT_EQ(states[0].position, 2 * 8 * 3);

  // The rest of an uninterrupted epoch, on 3 ranks.
  Loader whole(set, Shard{2, 3}, options()), resumed(set, Shard{2, 3}, options());
  Dealt expected = dealt(whole, 2);
  std::erase_if(expected, [](const auto& item) { return item.first.first < 2; });
  resumed.restore(states[0]);
  EXPECT_EQ(dealt(resumed, 2, 2), expected);

  LoaderOptions fewer = options();
  fewer.lanes = 4;
  Loader other(set, Shard{0, 1}, fewer);
  other.restore(states[0]);
  EXPECT_EQ(other.steps(2).size(), 6);  // of the 72 samples that are left, 12 a step
}

TEST(Steps, ALoopKnowsItsPlaceWhateverTheNumberOfRanks) {
  const auto set = numbers(64);
  std::vector<std::vector<uint64_t>> keys;
  for (const int64_t ranks : {1, 2}) {
    Loader loader(set, Shard{0, ranks}, {.batch_size = 4, .seed = 9, .lanes = 4});
    auto& own = keys.emplace_back();
    for (const int64_t epoch : {0, 1}) {
      for (auto step : loader.steps(epoch)) {
        for (int loop = 0; loop < 2; ++loop) {
          const auto key = step.next_key();
          own.push_back(key.seed ^ static_cast<uint64_t>(key.step));
        }
      }
    }
  }
  EXPECT_EQ(keys[0], keys[1]);
  std::sort(keys[0].begin(), keys[0].end());
  EXPECT_EQ(std::adjacent_find(keys[0].begin(), keys[0].end()), keys[0].end());
}

TEST(Steps, RefuseWhatWouldGiveOtherBatches) {
  const auto set = numbers(64);
  Loader plain(set, Shard{0, 1}), lanes(set, Shard{0, 1}, {.lanes = 2});
  EXPECT_THAT(message_of<ConfigError>([&] { plain.steps(0); }),
              HasSubstr("set LoaderOptions::lanes"));
  EXPECT_THAT(message_of<ConfigError>([&] { lanes.epoch(0); }), HasSubstr("loader.steps(epoch)"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                Loader(set, Shard{0, 3}, {.lanes = 2});
              }),
              HasSubstr("lanes = 2 on 3 ranks"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                Loader(set, Shard{0, 1}, {.exact = true, .lanes = 2});
              }),
              HasSubstr("set either lanes or exact"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                Loader(set, Shard{0, 1}, {.lanes = -1});
              }),
              HasSubstr("lanes = -1"));
  auto steps = lanes.steps(0);
  const Step first = *steps.begin();
  EXPECT_THAT(message_of<ConfigError>([&] { (void)first.batch(2); }),
              HasSubstr("lanes 0 to 1 of 2"));
  EXPECT_THAT(message_of<ConfigError>([&] { steps.begin(); }), HasSubstr("call steps() again"));
}

TEST(Steps, AStepIsOverWhenTheLoopGoesOn) {
  const auto set = numbers(8);
  Loader loader(set, Shard{0, 1}, {.batch_size = 1, .lanes = 2});
  auto steps = loader.steps(0);
  auto place = steps.begin();
  const Step first = *place;
  ++place;
  EXPECT_THAT(message_of<ConfigError>([&] { (void)first.batch(0); }),
              HasSubstr("this step is over"));
}

class Broken : public Dataset {
 public:
  int64_t size() const override { return 16; }
  Batch get_batch(at::IntArrayRef indices) const override {
    for (const int64_t index : indices) {
      if (index == 9) throw DataError("sample 9 is damaged");
    }
    return {at::tensor(indices), at::tensor(indices)};
  }
};

TEST_P(Lanes, AnErrorNamesTheLaneAndLeavesTheStateBeforeTheStep) {
  LoaderOptions lanes = options();
  lanes.batch_size = 2;
  lanes.lanes = 4;
  lanes.shuffle = false;
  Loader loader(Broken(), Shard{0, 2}, lanes);
  const auto text = message_of<DataError>([&] {
    for (auto step : loader.steps(0)) {
      (void)step.batch(0);
      (void)step.batch(1);
    }
  });
  EXPECT_THAT(text, HasSubstr("lane 1 of 4, epoch 0, batch 1 of 2"));
  EXPECT_EQ(loader.state().position, 8);
}

}  // namespace
}  // namespace lockstep::data
