// Loaders over data sets that were written for libtorch's data loader.
#include "lockstep/data/torch_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <optional>
#include <stdexcept>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {
namespace {

namespace datasets = torch::data::datasets;
namespace transforms = torch::data::transforms;
using test::message_of;
using testing::HasSubstr;
using torch::data::Example;
using torch::data::TensorExample;

constexpr size_t kExamples = 11;

// Sample i is (i, i): what people write.
struct Squares : datasets::Dataset<Squares> {
  Example<> get(size_t index) override {
    const auto number = static_cast<float>(index);
    return {torch::full({2}, number), torch::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const override { return kExamples; }
};

// All batches of an epoch, one below the other.
Batch all_of(Loader& loader, int64_t epoch = 0) {
  std::vector<at::Tensor> data, target;
  for (auto [x, y] : loader.epoch(epoch)) {
    data.push_back(x);
    if (y.defined()) target.push_back(y);
  }
  return {torch::cat(data), target.empty() ? at::Tensor() : torch::cat(target)};
}

const LoaderOptions kInOrder{.batch_size = 4, .shuffle = false};

void expect_squares(const Batch& all) {
  EXPECT_TRUE(all.target.equal(torch::arange(static_cast<int64_t>(kExamples))));
  EXPECT_TRUE(all.data.equal(all.target.to(at::kFloat).unsqueeze(1).expand({-1, 2})));
}

TEST(TorchDataset, StackedOrNot) {
  Loader stacked(Squares().map(transforms::Stack<>()), Shard{0, 1}, kInOrder);
  Loader examples(Squares(), Shard{0, 1}, kInOrder);
  Loader shared(datasets::make_shared_dataset<Squares>(), World::solo(), kInOrder);
  Squares kept;
  Loader copied(kept, World::solo(), kInOrder);
  for (Loader* loader : {&stacked, &examples, &shared, &copied}) expect_squares(all_of(*loader));
}

TEST(TorchDataset, IsDividedAmongRanks) {
  Loader loader(Squares(), Shard{1, 3}, kInOrder);
  EXPECT_TRUE(all_of(loader).target.equal(torch::tensor({1, 4, 7, 10}, at::kLong)));
}

TEST(TorchDataset, LibtorchsTransforms) {
  Loader loader(Squares().map(transforms::Normalize<>(1.0, 2.0)).map(transforms::Stack<>()),
                Shard{0, 1}, kInOrder);
  EXPECT_TRUE(all_of(loader).data[3].flatten().equal(torch::full({2}, 1.0F)));
}

TEST(TorchDataset, WithoutTargets) {
  const auto rows = torch::rand({5, 3});
  Loader one_by_one(datasets::TensorDataset(rows), Shard{0, 1}, kInOrder);
  Loader stacked(datasets::TensorDataset(rows).map(transforms::Stack<TensorExample>()), Shard{0, 1},
                 kInOrder);
  for (Loader* loader : {&one_by_one, &stacked}) {
    const Batch all = all_of(*loader);
    EXPECT_TRUE(all.data.equal(rows));
    EXPECT_FALSE(all.target.defined());
  }
}

struct Numbered : datasets::Dataset<Numbered, Example<at::Tensor, int>> {
  Example<at::Tensor, int> get(size_t index) override {
    return {torch::zeros({1}), static_cast<int>(index)};
  }
  std::optional<size_t> size() const override { return kExamples; }
};

TEST(TorchDataset, TargetsThatAreNumbersBecomeTensors) {
  Loader loader(Numbered(), Shard{0, 1}, kInOrder);
  EXPECT_TRUE(all_of(loader).target.equal(torch::arange(static_cast<int64_t>(kExamples))));
}

// Noise from get(), from a mapped lambda, and, by the batch, from a collation.
struct Noisy : datasets::Dataset<Noisy> {
  Example<> get(size_t index) override {
    return {torch::rand({2}), torch::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const override { return kExamples; }
};

auto jittered() {
  return Noisy()
      .map(transforms::Lambda<Example<>>(
          [](Example<> e) { return Example<>(e.data + torch::randn_like(e.data), e.target); }))
      .map(transforms::Stack<>());
}

// Data by target.
at::Tensor sorted(const Batch& all) { return all.data.index_select(0, all.target.argsort()); }

TEST(TorchDataset, WhatASampleDrawsIsItsOwn) {
  const auto read = [](int64_t world, const LoaderOptions& options) {
    std::vector<at::Tensor> data, target;
    for (int64_t rank = 0; rank < world; ++rank) {
      Loader loader(jittered(), Shard{rank, world}, options);
      const Batch part = all_of(loader, 2);
      data.push_back(part.data);
      target.push_back(part.target);
    }
    return sorted({torch::cat(data), torch::cat(target)});
  };
  const at::Tensor expected = read(1, {.batch_size = 4, .seed = 3, .exact = true});
  for (const int64_t world : {1, 2, 3}) {
    for (const int64_t workers : {0, 1, 3}) {
      EXPECT_TRUE(read(world, {.batch_size = 2, .seed = 3, .exact = true, .workers = workers})
                      .equal(expected))
          << world << " ranks, " << workers << " workers";
    }
  }
  EXPECT_FALSE(read(1, {.batch_size = 4, .seed = 4, .exact = true}).equal(expected));
}

TEST(TorchDataset, WhatACollationDrawsIsTheBatchs) {
  const auto read = [](int64_t workers) {
    Loader loader(Noisy().map(transforms::BatchLambda<std::vector<Example<>>, Example<>>(
                      [](std::vector<Example<>> examples) {
                        auto batch = transforms::Stack<>().apply_batch(std::move(examples));
                        return Example<>(batch.data * torch::rand({}), batch.target);
                      })),
                  Shard{0, 1}, {.batch_size = 4, .seed = 3, .workers = workers});
    return all_of(loader, 1).data;
  };
  const at::Tensor expected = read(0);
  for (const int64_t workers : {1, 3}) EXPECT_TRUE(read(workers).equal(expected));
}

// Takes the batch's mean away, as a set does that pads to a batch's longest sample, and has its
// get_batch() from a class below it.
struct Centred : datasets::Dataset<Centred> {
  Example<> get(size_t index) override {
    return {torch::full({1}, static_cast<double>(index)), torch::tensor(0)};
  }
  std::vector<Example<>> get_batch(at::ArrayRef<size_t> indices) override {
    auto batch = datasets::Dataset<Centred>::get_batch(indices);
    double mean = 0;
    for (const size_t i : indices) {
      mean += static_cast<double>(i) / static_cast<double>(indices.size());
    }
    const at::Tensor noise = torch::rand({1});
    for (auto& example : batch) {
      example.data -= mean;
      example.target = noise;
    }
    return batch;
  }
  std::optional<size_t> size() const override { return 8; }
};
struct StillCentred : Centred {
  using SelfType = StillCentred;
};

TEST(TorchDataset, AGetBatchOfItsOwnHasTheWholeBatch) {
  const LoaderOptions options{.batch_size = 4, .seed = 3, .shuffle = false};
  Loader plain(Centred(), Shard{0, 1}, options), derived(StillCentred(), Shard{0, 1}, options);
  Loader mapped(Centred().map(transforms::Stack<>()), Shard{0, 1}, options);
  Loader shared(datasets::make_shared_dataset<Centred>(), Shard{0, 1}, options);
  for (Loader* loader : {&plain, &derived, &mapped, &shared}) {
    const Batch all = all_of(*loader);
    EXPECT_TRUE(all.data.flatten()
                    .to(at::kDouble)
                    .equal(torch::arange(8).remainder(4).to(at::kDouble) - 1.5));
    // What it draws is the batch's.
    EXPECT_TRUE(all.target[0].equal(all.target[3]));
    EXPECT_FALSE(all.target[3].equal(all.target[4]));
    EXPECT_TRUE(all.target.equal(all_of(plain).target));
  }
}

// A set that two threads may not use at once, in three threads.
struct Alone : datasets::Dataset<Alone> {
  Alone() = default;
  Alone(Alone&& other) noexcept : datasets::Dataset<Alone>(other) {}
  Alone(const Alone& other) : datasets::Dataset<Alone>(other), is_copy(true) {}
  Example<> get(size_t index) override {
    if (readers.fetch_add(1) != 0) throw std::logic_error("two readers");
    const auto number = static_cast<int64_t>(index);
    Example<> result{torch::full({2}, static_cast<float>(number)), torch::tensor(number)};
    --readers;
    return result;
  }
  std::optional<size_t> size() const override { return kExamples; }
  std::atomic<int> readers = 0;
  bool is_copy = false;
};

// The same, which cannot be copied.
struct Only : datasets::Dataset<Only> {
  Only() = default;
  Only(Only&&) = default;
  Example<> get(size_t index) override { return alone.get(index); }
  std::optional<size_t> size() const override { return kExamples; }
  Alone alone;
};

// The same, which has no second file descriptor, say.
struct Fails : datasets::Dataset<Fails> {
  Fails() = default;
  Fails(Fails&&) = default;
  Fails(const Fails& other) : datasets::Dataset<Fails>(other) {
    throw std::runtime_error("too many open files");
  }
  Example<> get(size_t index) override { return alone.get(index); }
  std::optional<size_t> size() const override { return kExamples; }
  Alone alone;
};

TEST(TorchDataset, ThreadsDoNotShareASet) {
  LoaderOptions options = kInOrder;
  options.batch_size = 1;
  options.workers = 3;
  for (int round = 0; round < 10; ++round) {
    Loader copies(Alone(), Shard{0, 1}, options), one(Only(), Shard{0, 1}, options);
    Loader fails(Fails(), Shard{0, 1}, options);
    expect_squares(all_of(copies));
    expect_squares(all_of(one));
    expect_squares(all_of(fails));
  }
}

// Of gigabytes, perhaps: one for each thread, and no more.
struct Counted : datasets::Dataset<Counted> {
  explicit Counted(std::atomic<int>* made) : copies(made) {}
  Counted(Counted&&) = default;
  Counted(const Counted& other) : datasets::Dataset<Counted>(other), copies(other.copies) {
    ++*copies;
  }
  Example<> get(size_t index) override {
    return {torch::zeros({1}), torch::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const override { return 2000; }
  std::atomic<int>* copies;
};

TEST(TorchDataset, ThereAreNoMoreSetsThanThreads) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> copies = 0;
    Loader loader(Counted(&copies), Shard{0, 1}, {.batch_size = 1, .prefetch = 40, .workers = 4});
    copies = 0;  // those of handing it over
    for (auto [x, y] : loader.epoch(0)) continue;
    EXPECT_LE(copies, 3) << round;
  }
}

struct Ragged : datasets::Dataset<Ragged> {
  Example<> get(size_t index) override {
    if (index == 5) throw std::runtime_error("page is torn");
    return {torch::zeros({static_cast<int64_t>(index) / 8 + 1}), torch::tensor(0)};
  }
  std::optional<size_t> size() const override { return kExamples; }
};

TEST(TorchDataset, ErrorsNameTheSample) {
  Loader torn(Ragged(), Shard{0, 1}, kInOrder);
  EXPECT_THAT(message_of<DataError>([&] { all_of(torn); }),
              HasSubstr("batch 1 of 3: sample 5 cannot be read: page is torn"));
  Loader ragged(Ragged(), Shard{0, 4}, {.batch_size = 3, .shuffle = false});
  EXPECT_THAT(message_of<DataError>([&] { all_of(ragged); }),
              HasSubstr("samples 0, 4, 8 cannot be read together: data of sample 0 is float32 [1], "
                        "that of sample 8 float32 [2]"));
  EXPECT_THAT(message_of<DataError>([] {
                TorchDataset(Squares()).get_batch(std::vector<int64_t>{3, 11});
              }),
              HasSubstr("[torch data set] sample 11 does not exist: there are 11"));
}

struct Unsized : datasets::Dataset<Unsized> {
  Example<> get(size_t) override { return {}; }
  std::optional<size_t> size() const override { return std::nullopt; }
};

TEST(TorchDataset, OneWithoutASizeIsRefused) {
  EXPECT_THAT(message_of<ConfigError>([] {
                Loader(Unsized(), Shard{0, 1});
              }),
              HasSubstr("size() says nothing"));
}

struct Stream : datasets::StreamDataset<Stream> {
  std::vector<Example<>> get_batch(size_t) override { return {}; }
  std::optional<size_t> size() const override { return 1; }
};
struct Stateful : datasets::StatefulDataset<Stateful> {};

// A Loader of these does not compile, and the compiler says why.
static_assert(AnyTorchDataset<Stream> && !IndexedTorchDataset<Stream>);
static_assert(AnyTorchDataset<Stateful> && !IndexedTorchDataset<Stateful>);
static_assert(IndexedTorchDataset<datasets::MNIST>);
static_assert(!AnyTorchDataset<TensorDataset>);

TEST(TorchDataset, LoadersKeepTheirTemporaries) {
  Loader ours(TensorDataset(torch::arange(3), torch::arange(3)), Shard{0, 1}, kInOrder);
  EXPECT_EQ(all_of(ours).target.sum().item<int64_t>(), 3);
  auto shared = std::make_shared<TensorDataset>(torch::arange(4), torch::arange(4));
  Loader theirs(shared, Shard{0, 1}, kInOrder);
  shared.reset();
  EXPECT_EQ(all_of(theirs).target.sum().item<int64_t>(), 6);
}

}  // namespace
}  // namespace lockstep::data
