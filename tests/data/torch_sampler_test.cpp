// libtorch's own data loader with our sampler.
#include "lockstep/data/torch_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>

#include "data/files.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

constexpr int64_t kRows = 23;

// Sample i is i.
struct Rows : torch::data::datasets::Dataset<Rows> {
  torch::data::Example<> get(size_t index) override {
    return {torch::tensor(static_cast<int64_t>(index)), torch::tensor(0)};
  }
  std::optional<size_t> size() const override { return kRows; }
};

auto loader_of(const TorchSampler& sampler, size_t batch_size, size_t workers = 0) {
  return torch::data::make_data_loader(Rows().map(torch::data::transforms::Stack<>()), sampler,
                                       torch::data::DataLoaderOptions(batch_size).workers(workers));
}

// What a loop over the loader sees, of `steps` batches at most.
template <typename Loader>
std::vector<int64_t> pass(Loader& loader, int64_t steps = kRows) {
  std::vector<int64_t> all;
  for (auto& batch : *loader) {
    const auto values = batch.data;
    all.insert(all.end(), values.template const_data_ptr<int64_t>(),
               values.template const_data_ptr<int64_t>() + values.numel());
    if (--steps == 0) break;
  }
  return all;
}

std::vector<int64_t> order(Shard part, SamplerOptions options, int64_t epoch) {
  DistributedSampler sampler(kRows, part, options);
  sampler.set_epoch(epoch);
  return sampler.indices();
}

TEST(TorchSampler, EachPassIsTheNextEpoch) {
  for (const size_t workers : {0, 2}) {
    for (const Shard part : {Shard{0, 1}, Shard{1, 2}, Shard{2, 3}}) {
      for (const SamplerOptions options :
           {SamplerOptions{.seed = 4}, SamplerOptions{.seed = 4, .drop_last = true},
            SamplerOptions{.shuffle = false, .exact = true}}) {
        auto loader = loader_of(TorchSampler(kRows, part, options), 4, workers);
        for (const int64_t epoch : {0, 1, 2}) EXPECT_EQ(pass(loader), order(part, options, epoch));
      }
    }
  }
}

TEST(TorchSampler, TakesTheWorldsRankAndSize) {
  auto loader = loader_of(TorchSampler(kRows, World::solo(), {.seed = 4}), 5);
  EXPECT_EQ(pass(loader), order({0, 1}, {.seed = 4}, 0));
}

TEST(TorchSampler, TheEpochMayBeSetFromOutside) {
  lockstep::TorchSampler sampler(kRows, Shard{0, 2}, {.seed = 4});
  auto loader = loader_of(sampler, 4);
  for (const int64_t epoch : {5, 2, 2}) {
    sampler.set_epoch(epoch);
    EXPECT_EQ(pass(loader), order({0, 2}, {.seed = 4}, epoch));
    EXPECT_EQ(sampler.epoch(), epoch);
  }
  EXPECT_EQ(pass(loader), order({0, 2}, {.seed = 4}, 3));
  EXPECT_THROW(sampler.set_epoch(-1), ConfigError);
}

TEST(TorchSampler, ResumesInTheMiddleOnAnotherWorld) {
  const SamplerOptions options{.seed = 4, .exact = true};
  for (const size_t workers : {0, 3}) {
    std::vector<int64_t> seen;
    SamplerState state;
    for (const int64_t rank : {0, 1}) {
      TorchSampler sampler(kRows, Shard{rank, 2}, options);
      auto loader = loader_of(sampler, 3, workers);
      pass(loader);
      const auto part = pass(loader, 2);
      seen.insert(seen.end(), part.begin(), part.end());
      state = sampler.state_after(2);
      EXPECT_EQ(state, (SamplerState{1, 12, 4, kRows}));
    }
    for (const int64_t rank : {0, 1, 2}) {
      TorchSampler sampler(kRows, Shard{rank, 3}, options);
      auto loader = loader_of(sampler, 2, workers);
      sampler.restore(state);
      const auto rest = pass(loader);
      seen.insert(seen.end(), rest.begin(), rest.end());
      const int64_t left = (kRows - 12 + 2) / 3;  // of rank 0, which has most
      EXPECT_EQ(sampler.state_after((left + 1) / 2), (SamplerState{2, 0, 4, kRows}));
      EXPECT_EQ(pass(loader), order({rank, 3}, options, 2));
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_TRUE(at::tensor(seen).equal(at::arange(kRows)));
  }
}

TEST(TorchSampler, TheEndOfAnEpochIsTheBeginningOfTheNext) {
  for (const size_t workers : {0, 2}) {
    for (const SamplerOptions options :
         {SamplerOptions{.seed = 4}, SamplerOptions{.seed = 4, .drop_last = true},
          SamplerOptions{.seed = 4, .exact = true}}) {
      for (const int64_t rank : {0, 1}) {
        TorchSampler sampler(kRows, Shard{rank, 2}, options);
        auto loader = loader_of(sampler, 4, workers);
        pass(loader);
        const SamplerState end = sampler.state_after(3);
        EXPECT_EQ(end, (SamplerState{1, 0, 4, kRows}));
        EXPECT_EQ(sampler.epoch(), 0);
        TorchSampler other(kRows, Shard{rank, 2}, options);
        auto rest = loader_of(other, 4, workers);
        for (const SamplerState& saved : {end, SamplerState{0, kRows, 4, kRows}}) {
          other.restore(saved);
          EXPECT_EQ(other.epoch(), 1);
          EXPECT_EQ(pass(rest), order({rank, 2}, options, 1));
        }
      }
    }
  }
}

TEST(TorchSampler, MoreBatchesThanTheEpochHasAreRefused) {
  for (const size_t workers : {0, 2}) {
    TorchSampler sampler(kRows, Shard{1, 2}, {.seed = 4});  // 12 of its own: 3 batches
    auto loader = loader_of(sampler, 4, workers);
    EXPECT_EQ(sampler.state_after(0), (SamplerState{0, 0, 4, kRows}));
    EXPECT_THAT(message_of<ConfigError>([&] { sampler.state_after(1); }),
                HasSubstr("1 batches taken of epoch 0, of which the data loader has asked for 0"));
    pass(loader);
    pass(loader, 2);
    EXPECT_EQ(sampler.state_after(2), (SamplerState{1, 16, 4, kRows}));
    for (const int64_t wrong : {5, -1}) {  // 3 of the epoch before, and these
      EXPECT_THAT(message_of<ConfigError>([&] { sampler.state_after(wrong); }),
                  HasSubstr("set the count to 0 directly before each pass"));
    }
  }
}

TEST(TorchSampler, WithoutWorkersACountOfTheEpochBeforeIsRefusedAtOnce) {
  TorchSampler sampler(kRows, Shard{0, 2}, {.seed = 4});
  auto loader = loader_of(sampler, 4);
  pass(loader, 2);  // left early
  pass(loader, 1);
  EXPECT_THAT(message_of<ConfigError>([&] { sampler.state_after(3); }),
              HasSubstr("3 batches taken of epoch 1, of which the data loader has asked for 1"));
}

TEST(TorchSampler, ACountOfZeroAtTheEndOfAnEpochIsWarnedOfOnce) {
  TorchSampler sampler(kRows, Shard{0, 2}, {.seed = 4});
  auto loader = loader_of(sampler, 4);
  const auto said = [&](int64_t batches) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(sampler.state_after(batches).epoch, batches == 0 ? 0 : 1);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(0), "");
  pass(loader);
  EXPECT_EQ(said(3), "");
  EXPECT_THAT(said(0), HasSubstr("a run that resumes here goes through it again"));
  EXPECT_EQ(said(0), "");
}

TEST(TorchSampler, GoesThroughAnArchive) {
  TorchSampler sampler(kRows, Shard{0, 2}, {.seed = 4});
  auto loader = loader_of(sampler, 3);
  pass(loader);
  const auto before = pass(loader, 2);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(file);

  TorchSampler resumed(kRows, Shard{0, 2}, {.seed = 4}), other(kRows, Shard{0, 2}, {.seed = 5});
  torch::serialize::InputArchive in;
  in.load_from(file);
  resumed.load(in);
  auto rest = loader_of(resumed, 3);
  auto all = before;
  for (const int64_t sample : pass(rest)) all.push_back(sample);
  EXPECT_EQ(all, order({0, 2}, {.seed = 4}, 1));
  EXPECT_THAT(
      message_of<ConfigError>([&] { other.load(in); }),
      HasSubstr("the state is of 23 samples, seed 4, shuffled, this is 23 samples, seed 5"));
}

TEST(TorchSampler, MoreRanksThanSamples) {
  const auto rows = [](const SamplerOptions& options) {
    TorchSampler sampler(1, Shard{1, 2}, options);
    sampler.reset();
    return sampler.next(4);
  };
  EXPECT_THAT(*rows({}), ElementsAre(0));
  EXPECT_EQ(rows({.exact = true}), std::nullopt);
  EXPECT_EQ(rows({.drop_last = true}), std::nullopt);
}

TEST(TorchSampler, FollowsADataSetThatGrows) {
  TorchSampler sampler(4, Shard{0, 1}, {.shuffle = false});
  sampler.reset();
  EXPECT_THAT(*sampler.next(10), SizeIs(4));
  sampler.reset(6);
  EXPECT_THAT(*sampler.next(10), SizeIs(6));
  EXPECT_EQ(sampler.epoch(), 1);
  EXPECT_EQ(sampler.next(10), std::nullopt);
}

TEST(TorchSampler, WarnsOfACountOf0AlsoWhereTheLoaderDropsTheRest) {
  TorchSampler sampler(kRows, Shard{0, 1}, {.shuffle = false});
  auto loader =
      torch::data::make_data_loader(Rows().map(torch::data::transforms::Stack<>()), sampler,
                                    torch::data::DataLoaderOptions(4).drop_last(true));
  EXPECT_THAT(pass(loader), SizeIs(20));
  testing::internal::CaptureStderr();
  sampler.state_after(0);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("epoch 0 is over and 0 batches"));
}

}  // namespace
}  // namespace lockstep::data
