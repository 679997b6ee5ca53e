// Random transforms: what they draw belongs to seed, epoch and sample, and to nothing else.
#include "lockstep/data/transform.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <random>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/draws.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kImages = 37;

const TensorDataset& blank_images() {
  static const TensorDataset set(at::zeros({kImages, 2, 3}), at::arange(kImages));
  return set;
}

// What each sample of an epoch became, by its number.
using Results = std::map<int64_t, at::Tensor>;

void read_into(Results& results, Loader& loader, int64_t epoch, int64_t steps = kImages) {
  for (auto [x, y] : loader.epoch(epoch)) {
    for (int64_t i = 0; i < y.size(0); ++i) results[y[i].item<int64_t>()] = x[i].clone();
    if (--steps == 0) break;
  }
}

Results read_ranks(int64_t world, const LoaderOptions& options, int64_t epoch = 3) {
  Results results;
  for (int64_t rank = 0; rank < world; ++rank) {
    Loader loader(blank_images(), Shard{rank, world}, options);
    read_into(results, loader, epoch);
  }
  EXPECT_EQ(std::ssize(results), kImages);
  return results;
}

bool equal(const Results& a, const Results& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.equal(y.second);
  });
}

Sample noisy(Sample sample) {
  return {torch::dropout(sample.data + torch::randn_like(sample.data), 0.5, true), sample.target};
}

Sample drawing(Sample sample, at::Generator generator) {
  std::mt19937 own(generator.current_seed());
  return {sample.data + at::rand({2, 3}, generator) + static_cast<double>(own() % 100),
          sample.target};
}

TEST(Transform, ASampleIsTreatedAlikeWhereverItIsMade) {
  for (const Transform& transform : {Transform(noisy), Transform(drawing)}) {
    const LoaderOptions plain{.batch_size = 4, .seed = 5, .transforms = {transform}};
    const Results expected = read_ranks(1, plain);
    for (const int64_t world : {1, 2, 3}) {
      for (const int64_t batch_size : {1, 4, 7}) {
        for (const int64_t workers : {0, 1, 3}) {
          LoaderOptions options = plain;
          options.batch_size = batch_size;
          options.workers = workers;
          EXPECT_TRUE(equal(read_ranks(world, options), expected))
              << world << " ranks, batches of " << batch_size << ", " << workers << " workers";
        }
      }
    }
    LoaderOptions other = plain;
    other.seed = 6;
    EXPECT_FALSE(equal(read_ranks(1, other), expected));
    EXPECT_FALSE(equal(read_ranks(1, plain, 4), expected));
  }
}

TEST(Transform, AResumedRunTreatsItsSamplesAlike) {
  const LoaderOptions options{.batch_size = 4, .seed = 5, .prefetch = 2, .transforms = {noisy}};
  const Results expected = read_ranks(1, options);
  Results results;
  Loader first(blank_images(), Shard{0, 1}, options);
  read_into(results, first, 3, 4);
  for (const int64_t rank : {0, 1}) {
    Loader second(blank_images(), Shard{rank, 2}, options);
    second.restore(first.state());
    read_into(results, second, 3);
  }
  EXPECT_TRUE(equal(results, expected));
}

TEST(Transform, OfABatchDependsOnTheBatchAlone) {
  const LoaderOptions plain{
      .batch_size = 4,
      .seed = 5,
      .transforms = {[](Batch b) {
                       return Batch{b.data + torch::rand_like(b.data), b.target};
                     },
                     [](Batch b) {
                       const auto order = torch::randperm(b.target.size(0));
                       return Batch{b.data[order[0]] + b.data, b.target};
                     }}};
  const Results expected = read_ranks(2, plain);
  for (const int64_t workers : {0, 1, 4}) {
    LoaderOptions options = plain;
    options.workers = workers;
    EXPECT_TRUE(equal(read_ranks(2, options), expected)) << workers;
  }
}

// Dropout in the training draws the same, whether and where transforms draw beside it.
TEST(Transform, LeavesTheDefaultGeneratorAlone) {
  const auto trained = [](const LoaderOptions& options) {
    torch::manual_seed(1);
    Loader loader(blank_images(), Shard{0, 1}, options);
    at::Tensor sum = torch::zeros({});
    for (auto [x, y] : loader.epoch(0)) sum += torch::rand({}) * (1 + y.size(0));
    return sum.item<float>();
  };
  const float expected = trained({.batch_size = 2});
  for (const int64_t workers : {0, 1, 3}) {
    EXPECT_EQ(trained({.batch_size = 2, .workers = workers, .transforms = {noisy}}), expected);
  }
}

// All ways to draw that libtorch has take the thread's numbers: those of a default generator that
// has the same seed.
TEST(Transform, EveryOperatorDrawsTheSamplesNumbers) {
  const auto draw_all = [] {
    const auto ones = torch::ones({6});
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(3, 3).num_layers(2).dropout(0.5));
    std::vector<at::Tensor> all = {
        torch::rand({6}),
        torch::randn({6}),
        torch::randint(100, {6}).to(at::kFloat),
        torch::randperm(6).to(at::kFloat),
        torch::rand_like(ones),
        torch::randint_like(ones, 50),
        torch::bernoulli(ones * 0.5),
        torch::poisson(ones * 3),
        torch::normal(0, 1, {6}),
        at::normal(ones, ones),
        at::binomial(ones * 9, ones * 0.4),
        at::_standard_gamma(ones),
        at::_sample_dirichlet(ones),
        torch::multinomial(ones, 6).to(at::kFloat),
        torch::dropout(ones, 0.5, true),
        torch::alpha_dropout(ones, 0.5, true),
        torch::feature_dropout(torch::ones({6, 2, 2}), 0.5, true).sum({1, 2}),
        torch::rrelu(-ones, 0.1, 0.3, true),
        torch::empty({6}).uniform_(),
        torch::empty({6}).normal_(),
        torch::empty({6}).random_(50),
        torch::empty({6}).exponential_(),
        torch::empty({6}).cauchy_(),
        torch::empty({6}).log_normal_(),
        torch::empty({6}).geometric_(0.3),
        torch::nn::init::xavier_uniform_(torch::empty({2, 3})).flatten(),
        torch::rand({6}, at::detail::getDefaultCPUGenerator()),
        std::get<0>(lstm->forward(torch::ones({1, 2, 3}))).flatten()};
    return torch::stack(all);
  };
  uint64_t seed = 0;
  at::Tensor drawn;
  Loader loader(blank_images(), Shard{0, 1},
                {.batch_size = kImages,
                 .shuffle = false,
                 .transforms = {[&](Batch b) {
                                  // A draw of its own number is what nothing may depend on.
                                  (void)torch::rand({});
                                  return b;
                                },
                                [&](Sample s, at::Generator generator) {
                                  if (s.target.item<int64_t>() == 8) {
                                    seed = generator.current_seed();
                                    drawn = draw_all();
                                  }
                                  return s;
                                }}});
  const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  for (auto [x, y] : loader.epoch(0)) {
  }
  EXPECT_TRUE(at::detail::getDefaultCPUGenerator().get_state().equal(before));
  torch::manual_seed(seed);
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(drawn.equal(draw_all()));
}

// A data set that draws for its samples itself.
class Noise : public Dataset {
 public:
  explicit Noise(bool by_sample) : by_sample_(by_sample) {}
  int64_t size() const override { return kImages; }
  Batch get_batch(at::IntArrayRef indices) const override {
    std::vector<at::Tensor> rows;
    for (const int64_t index : indices) {
      if (by_sample_) draw_for_sample(index);
      rows.push_back(torch::rand({3}));
    }
    return {torch::stack(rows), at::tensor(indices, at::kLong)};
  }

 private:
  bool by_sample_;
};

TEST(Transform, ADataSetMayDrawToo) {
  const auto read = [](const Noise& set, int64_t batch_size, int64_t workers) {
    Results results;
    Loader loader(set, Shard{0, 1}, {.batch_size = batch_size, .workers = workers});
    read_into(results, loader, 1);
    return results;
  };
  const Noise by_sample(true), by_batch(false);
  EXPECT_TRUE(equal(read(by_sample, 5, 0), read(by_sample, 3, 2)));
  EXPECT_TRUE(equal(read(by_batch, 5, 0), read(by_batch, 5, 2)));
  EXPECT_TRUE(read(by_batch, 5, 0).at(0).size(0) == 3);
  draw_for_sample(1);  // of no loader: nothing happens
}

std::string failure_of(Transform transform, const Dataset& set = blank_images()) {
  return message_of<DataError>([&] {
    Loader loader(set, Shard{0, 2}, {.batch_size = 4, .shuffle = false, .transforms = {transform}});
    for (auto [x, y] : loader.epoch(0)) {
    }
  });
}

TEST(Transform, ABatchKeepsItsSize) {
  const std::string address =
      "[loader] rank 0 of 2, epoch 0, batch 0 of 5: transform 0 failed on samples 0, 2, 4, 6: ";
  EXPECT_EQ(
      failure_of([](Batch b) {
        return Batch{b.data.slice(0, 0, 3), b.target};
      }),
      address +
          "data [3, 2, 3] and target [4] are not a batch of 4 samples, which is dimension 0 of "
          "both; several of one sample go into a dimension of their own");
  EXPECT_THAT(failure_of([](Batch b) {
                return Batch{at::cat({b.data, b.data}), at::cat({b.target, b.target})};
              }),
              HasSubstr("data [8, 2, 3] and target [8] are not a batch of 4 samples"));
  EXPECT_THAT(failure_of([](Batch b) {
                return Batch{b.data.sum(), b.target};
              }),
              HasSubstr("data [] and target [4]"));
  EXPECT_THAT(failure_of([](Batch) { return Batch{}; }),
              HasSubstr("the batch's data is an undefined tensor"));
}

TEST(Transform, MayDropTheTarget) {
  Loader loader(blank_images(), Shard{0, 1}, {.transforms = {[](Sample s) {
                                                return Sample{s.data, {}};
                                              }}});
  for (auto [x, y] : loader.epoch(0)) {
    EXPECT_EQ(x.size(0), kImages);
    EXPECT_FALSE(y.defined());
  }
}

TEST(Transform, SamplesOfABatchNeedOneShape) {
  EXPECT_THAT(
      failure_of([](Sample s) {
        const int64_t width = 1 + s.target.item<int64_t>() / 4;
        return Sample{s.data.slice(1, 0, width), s.target};
      }),
      AllOf(HasSubstr("transform 0 failed on samples 0, 2, 4, 6"),
            HasSubstr("data of sample 0 is float32 [2, 1], that of sample 4 float32 [2, 2]")));
  EXPECT_THAT(failure_of([](Sample s) {
                return Sample{s.data, s.target.item<int64_t>() > 3 ? at::Tensor() : s.target};
              }),
              HasSubstr("target of sample 0 is int64 [], that of sample 4 undefined"));
}

// A data set whose batch is not what was asked for is as wrong as a transform.
TEST(Transform, ADataSetThatGivesOtherSizesIsNamed) {
  class Short : public Dataset {
   public:
    int64_t size() const override { return kImages; }
    Batch get_batch(at::IntArrayRef indices) const override {
      return {at::zeros({std::ssize(indices) - (indices.back() == 6 ? 1 : 0), 2}), {}};
    }
  };
  EXPECT_THAT(
      failure_of([](Batch b) { return b; }, Short()),
      HasSubstr("batch 0 of 5: sample 6 cannot be read: data [0, 2] and target [undefined] are "
                "not a batch of 1 sample"));
}

TEST(Transform, MayBeEmptyOnlyToBeRefused) {
  EXPECT_TRUE(Transform(std::function<Sample(Sample)>()).empty());
  EXPECT_FALSE(Transform(noisy).empty());
}

}  // namespace
}  // namespace lockstep::data
