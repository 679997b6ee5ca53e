// What a loader does when a sample cannot be read or a transform fails, and afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <stdexcept>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {
namespace {

using test::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kSamples = 12;

// One of its samples cannot be read until it is mended.
class Torn : public Dataset {
 public:
  explicit Torn(int64_t bad) : bad_(bad) {}
  int64_t size() const override { return kSamples; }
  Batch get_batch(at::IntArrayRef indices) const override {
    for (const int64_t index : indices) {
      if (index == bad_) throw std::runtime_error("page is torn");
    }
    return {at::tensor(indices, at::kLong), -at::tensor(indices, at::kLong)};
  }
  void mend() { bad_ = -1; }

 private:
  std::atomic<int64_t> bad_;
};

class LoaderErrors : public testing::TestWithParam<int64_t> {
 protected:
  LoaderOptions options() const {
    return {.batch_size = 2, .shuffle = false, .prefetch = GetParam(), .workers = GetParam() / 2};
  }
};
INSTANTIATE_TEST_SUITE_P(Prefetch, LoaderErrors, testing::Values(0, 1, 5),
                         testing::PrintToStringParamName());

std::vector<int64_t> first_samples(Loader& loader, int64_t epoch) {
  std::vector<int64_t> all;
  for (auto [x, y] : loader.epoch(epoch)) all.push_back(x[0].item<int64_t>());
  return all;
}

TEST_P(LoaderErrors, TheSampleThatCannotBeReadIsNamed) {
  const Torn set(7);
  Loader loader(set, Shard{1, 2}, options());
  int64_t batches = 0;
  const std::string message = message_of<DataError>([&] {
    for (auto [x, y] : loader.epoch(4)) ++batches;
  });
  EXPECT_EQ(message,
            "[loader] rank 1 of 2, epoch 4, batch 1 of 3: sample 7 cannot be read: page is torn");
  EXPECT_EQ(batches, 1);
}

// A loop that catches the error and goes on must neither wait for ever nor skip a batch that the
// other ranks have.
TEST_P(LoaderErrors, GoingOnGivesTheSameErrorAgain) {
  const Torn set(5);
  Loader loader(set, Shard{0, 1}, options());
  auto epoch = loader.epoch(0);
  auto at = epoch.begin();
  ++at;
  EXPECT_EQ((*at).data[0].item<int64_t>(), 2);
  const SamplerState before = loader.state();
  const std::string message = message_of<DataError>([&] { ++at; });
  EXPECT_THAT(message, HasSubstr("batch 2 of 6: sample 5 cannot be read"));
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(message_of<DataError>([&] { ++at; }), message);
    EXPECT_EQ(message_of<DataError>([&] { (void)*at; }), message);
    EXPECT_FALSE(at == epoch.end());
  }
  EXPECT_EQ(loader.state(), before);
  EXPECT_EQ(epoch.batches(), 4);
}

TEST_P(LoaderErrors, AnEpochAfterAnErrorIsAWholeOne) {
  Torn set(5);
  Loader loader(set, Shard{0, 1}, options());
  EXPECT_THROW(first_samples(loader, 0), DataError);
  EXPECT_THROW(first_samples(loader, 0), DataError);
  set.mend();
  EXPECT_THAT(first_samples(loader, 0), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(first_samples(loader, 1), ElementsAre(0, 2, 4, 6, 8, 10));
}

TEST_P(LoaderErrors, TheStateAfterAnErrorGoesOnBehindTheLastGoodBatch) {
  Torn set(5);
  Loader loader(set, Shard{0, 1}, options()), resumed(set, Shard{0, 1}, options());
  EXPECT_THROW(first_samples(loader, 3), DataError);
  const SamplerState state = loader.state();
  EXPECT_EQ(state.epoch, 3);
  EXPECT_EQ(state.position, 4);
  set.mend();
  resumed.restore(state);
  EXPECT_THAT(first_samples(resumed, 3), ElementsAre(4, 6, 8, 10));
}

// Nothing that is thrown gets lost, whatever it is.
TEST_P(LoaderErrors, WhatIsNoStdExceptionIsADataErrorToo) {
  const TensorDataset set(at::arange(kSamples), at::arange(kSamples));
  LoaderOptions throwing = options();
  throwing.transforms = {[](Batch) -> Batch { throw 42; }};
  Loader loader(set, Shard{0, 1}, throwing);
  EXPECT_THAT(message_of<DataError>([&] { first_samples(loader, 0); }),
              AllOf(HasSubstr("transform 0 failed on samples 0, 1"),
                    HasSubstr("an exception that is not a std::exception")));
}

TEST_P(LoaderErrors, EpochAndLoaderMayEndInAnyOrder) {
  const Torn set(9);
  for (int64_t taken = 0; taken < 4; ++taken) {
    auto loader = std::make_unique<Loader>(set, Shard{0, 1}, options());
    auto first = std::make_unique<Loader::Epoch>(loader->epoch(0));
    Loader::Epoch second = loader->epoch(1);
    auto at = second.begin();
    for (int64_t i = 0; i < taken; ++i) ++at;
    if (taken % 2 == 0) loader.reset();
    first.reset();
    loader.reset();
    EXPECT_EQ((*at).data[0].item<int64_t>(), 2 * taken);
  }
}

TEST_P(LoaderErrors, TwoEpochsAtOnceDoNotMix) {
  const Torn set(-1);
  Loader loader(set, Shard{0, 1}, options());
  Loader::Epoch one = loader.epoch(1), two = loader.epoch(2);
  auto first = one.begin(), second = two.begin();
  for (int64_t i = 0; i < 6; ++i, ++first, ++second) {
    EXPECT_EQ((*first).data[0].item<int64_t>(), 2 * i);
    EXPECT_EQ((*second).data[0].item<int64_t>(), 2 * i);
    EXPECT_EQ(loader.state().epoch, 2);
  }
  EXPECT_TRUE(first == one.end());
  EXPECT_TRUE(second == two.end());
}

}  // namespace
}  // namespace lockstep::data
