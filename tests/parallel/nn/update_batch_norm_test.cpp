// update_batch_norm() on any number of ranks is PyTorch's update_bn in one process.
#include "lockstep/parallel/update_batch_norm.h"

#include <gmock/gmock.h>

#include <stdexcept>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/weight_average.h"
#include "parallel/python.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using torch::nn::BatchNorm1d;
using torch::nn::BatchNormOptions;

// As in reference.py: six batches, the first of 8 samples.
at::Tensor batch(int number) {
  const at::Tensor rows = at::arange(28 * 3, at::kFloat).reshape({28, 3});
  const at::Tensor own = number == 0 ? rows.narrow(0, 0, 8) : rows.narrow(0, 4 + 4 * number, 4);
  return own * own.cos();
}

void expect_statistics(const BatchNorm1d& norm, const std::vector<double>& expected) {
  for (int c = 0; c < 3; ++c) {
    EXPECT_NEAR(norm->running_mean[c].item<double>(), expected.at(c), 1e-4);
    EXPECT_NEAR(norm->running_var[c].item<double>(), expected.at(3 + c), 1e-2);
  }
  EXPECT_EQ(norm->num_batches_tracked.item<double>(), expected.at(6));
}

// The ranks take 6, then 4 and 2, then 3, 2 and 1 batches.
TEST(UpdateBatchNorm, IsPythonsOnAnyNumberOfRanks) {
  const auto python = python_numbers("update_bn");
  const std::vector<std::vector<int>> counts{{6}, {4, 2}, {3, 2, 1}};
  for (const auto& count : counts) {
    spawn(static_cast<int>(count.size()), [&](World& world) {
      BatchNorm1d norm(BatchNormOptions(3).momentum(0.4));
      torch::nn::Sequential net(norm);
      norm->running_mean.fill_(7);
      net->eval();
      int first = 0;
      for (int rank = 0; rank < world.rank(); ++rank) first += count[rank];
      EXPECT_EQ(update_batch_norm(*net, world,
                                  [&] {
                                    for (int i = 0; i < count[world.rank()]; ++i) {
                                      const auto y = net->forward(batch(first + i));
                                      EXPECT_FALSE(y.requires_grad());
                                    }
                                  }),
                1u);
      expect_statistics(norm, python);
      EXPECT_EQ(norm->options.momentum(), 0.4);
      EXPECT_FALSE(net->is_training());
      EXPECT_FALSE(norm->is_training());
      const auto all = world.group().all_gather_bytes(
          std::string(static_cast<const char*>(norm->running_var.const_data_ptr()),
                      norm->running_var.nbytes()));
      for (const auto& other : all) EXPECT_EQ(other, all.front());
    });
  }
}

// The batch of a synchronous layer is that of all ranks, however the layer came to be one.
TEST(UpdateBatchNorm, OfSynchronousLayers) {
  spawn(2, [](World& world) {
    torch::nn::Sequential replaced{BatchNorm1d(3)};
    BatchNorm1d kept(3);
    torch::nn::Sequential overridden(kept);
    convert_sync_batch_norm(replaced, world);
    convert_sync_batch_norm(overridden, world);
    auto whole = BatchNorm1d(BatchNormOptions(3).momentum(std::nullopt));
    for (int i = 0; i < 3; ++i) whole->forward(at::cat({batch(1 + i), batch(3 + i)}));
    for (auto* net : {&replaced, &overridden}) {
      update_batch_norm(**net, world, [&] {
        for (int i = 0; i < 3; ++i) (*net)->forward(batch((world.rank() == 0 ? 1 : 3) + i));
      });
      const auto buffers = (*net)->named_buffers();
      EXPECT_TRUE(at::allclose(buffers["0.running_mean"], whole->running_mean, 1e-5, 1e-5));
      EXPECT_TRUE(at::allclose(buffers["0.running_var"], whole->running_var, 1e-5, 1e-5));
      EXPECT_EQ(buffers["0.num_batches_tracked"].item<int64_t>(), 3);
    }
  });
}

// One that was not converted is a BatchNorm; one of a part of the ranks takes a batch with those.
TEST(UpdateBatchNorm, CountsBatchesOfSynchronousLayersByTheirGroup) {
  spawn(3, [](World& world) {
    SyncBatchNorm1d alone(BatchNormOptions(3)), paired(BatchNormOptions(3));
    paired->set_group(world.group().split(world.rank() == 2 ? 1 : 0, world.rank()));
    torch::nn::ModuleDict net;
    net->update({{"alone", alone.ptr()}, {"paired", paired.ptr()}});
    update_batch_norm(*net, world, [&] {
      for (int i = 0; i <= world.rank(); ++i) alone->forward(batch(1));
      for (int i = 0; i < (world.rank() == 2 ? 1 : 2); ++i) paired->forward(batch(1));
    });
    EXPECT_EQ(alone->num_batches_tracked.item<int64_t>(), 6);
    EXPECT_EQ(paired->num_batches_tracked.item<int64_t>(), world.rank() == 2 ? 5 : 2);
  });
}

TEST(UpdateBatchNorm, LeavesWhatNoBatchHasPassedAndAllWhenItThrows) {
  isolated([] {
    BatchNorm1d used(3), unused(3);
    torch::nn::ModuleDict net;
    net->update({{"used", used.ptr()}, {"again", used.ptr()}, {"unused", unused.ptr()}});
    used->running_mean.fill_(2);
    unused->running_mean.fill_(3);
    unused->num_batches_tracked.fill_(9);
    used->eval();
    const auto expect_modes = [&] {
      EXPECT_TRUE(net->is_training());
      EXPECT_FALSE(used->is_training());
      EXPECT_TRUE(unused->is_training());
      EXPECT_EQ(used->options.momentum(), 0.1);
    };
    EXPECT_THROW(update_batch_norm(*net, World::solo(),
                                   [&] {
                                     used->forward(batch(1));
                                     throw std::runtime_error("no more data");
                                   }),
                 std::runtime_error);
    EXPECT_EQ(used->running_mean[0].item<float>(), 2);
    EXPECT_EQ(used->num_batches_tracked.item<int64_t>(), 0);
    expect_modes();
    EXPECT_EQ(update_batch_norm(*net, World::solo(), [&] { used->forward(batch(1)); }), 2u);
    EXPECT_TRUE(at::allclose(used->running_mean, batch(1).mean(0)));
    EXPECT_EQ(unused->running_mean[0].item<float>(), 3);
    EXPECT_EQ(unused->num_batches_tracked.item<int64_t>(), 9);
    expect_modes();
    torch::nn::Linear none(2, 2);
    EXPECT_EQ(update_batch_norm(*none, World::solo(), [] { FAIL() << "nothing to do"; }), 0u);
  });
}

// Statistics of averaged weights in a model that trains on: the Ddp does not notice.
TEST(UpdateBatchNorm, OfAveragedWeightsBetweenStepsOfADdp) {
  spawn(2, [](World& world) {
    torch::manual_seed(1);
    torch::nn::Linear linear(3, 3);
    BatchNorm1d norm(3);
    torch::nn::Sequential net(linear, norm, torch::nn::Linear(3, 1));
    Ddp ddp(net, world);
    torch::optim::SGD sgd(net->parameters(), 0.01);
    WeightAverage average(net->parameters(), {.decay = std::nullopt});
    const auto step = [&](int number) {
      ddp.zero_grad();
      net->forward(batch(number)).square().mean().backward();
      sgd.step();
      average.update();
    };
    for (int i = 0; i < 2; ++i) step(1 + i);
    at::Tensor trained;
    {
      const auto applied = average.apply();
      update_batch_norm(*net, world, [&] { net->forward(batch(1 + world.rank())); });
      const at::NoGradGuard no_grad;
      const at::Tensor mean =
          (linear->forward(batch(1)).mean(0) + linear->forward(batch(2)).mean(0)) / 2;
      EXPECT_TRUE(at::allclose(norm->running_mean, mean, 1e-4, 1e-5));
      trained = linear->weight.clone();
    }
    EXPECT_FALSE(at::equal(linear->weight, trained));
    step(3);
  });
}

}  // namespace
}  // namespace lockstep::test
