// What ranks find out together beside gradients is exact, and the same on all of them.
#include "lockstep/parallel/metrics.h"

#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include "lockstep/data/sampler.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

class MetricWorlds : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, MetricWorlds,
                         ::testing::Values(Ranks{"auto", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                           Ranks{"gloo", 3}),
                         name_of);

// Sample i scores 10 i and i.
at::Tensor scores_of(const std::vector<int64_t>& samples) {
  at::Tensor rows = at::empty({static_cast<int64_t>(samples.size()), 2});
  for (size_t i = 0; i < samples.size(); ++i) {
    rows[i][0] = 10.0 * samples[i];
    rows[i][1] = static_cast<double>(samples[i]);
  }
  return rows;
}

TEST_P(MetricWorlds, GatheredRowsAreTheSamplesEachOnceInTheirOrder) {
  spawn(GetParam(), [](World& world) {
    for (const int64_t length : {1, 5, 6, 7, 12}) {
      for (const bool exact : {true, false}) {
        SCOPED_TRACE(::testing::Message() << length << " samples, exact " << exact);
        const data::DistributedSampler sampler(length, Shard{world.rank(), world.size()},
                                               {.shuffle = false, .exact = exact});
        const auto mine = sampler.indices();
        std::vector<int64_t> every(length);
        std::iota(every.begin(), every.end(), 0);
        const at::Tensor all =
            gather_for_metrics(scores_of(mine), world.group(), {.samples = length});
        EXPECT_TRUE(at::equal(all, scores_of(every)));

        // Batch by batch, with an empty one where this rank has run out.
        std::vector<at::Tensor> parts;
        constexpr int64_t kBatch = 2;
        for (int64_t first = 0; first * world.size() < length; first += kBatch) {
          const auto begin = std::min<int64_t>(first, std::ssize(mine));
          const auto end = std::min<int64_t>(first + kBatch, std::ssize(mine));
          const int64_t left = length - first * world.size();
          parts.push_back(gather_for_metrics(
              scores_of({mine.begin() + begin, mine.begin() + end}), world.group(),
              {.samples = std::min<int64_t>(left, kBatch * world.size())}));
        }
        EXPECT_TRUE(at::equal(at::cat(parts), all));
      }
    }
    const at::Tensor labels =
        gather_for_metrics(at::full({2}, world.rank(), at::kLong), world.group());
    EXPECT_EQ(labels.scalar_type(), at::kLong);
    EXPECT_EQ(labels.sum().item<int64_t>(), world.size() * (world.size() - 1));
  });
}

TEST_P(MetricWorlds, SumsAndVerdictsAreAlikeOnAllRanks) {
  spawn(GetParam(), [](World& world) {
    const int n = world.size();
    EXPECT_EQ(sum_over_ranks(1.5 + world.rank(), world), 1.5 * n + n * (n - 1) / 2);
    const at::Tensor confusion = at::full({2, 2}, world.rank() + 1, at::kLong);
    const at::Tensor sum = sum_over_ranks(confusion, world);
    EXPECT_TRUE(at::equal(sum, at::full({2, 2}, n * (n + 1) / 2, at::kLong)));
    EXPECT_EQ(confusion[0][0].item<int64_t>(), world.rank() + 1);
    EXPECT_TRUE(any_rank(world.rank() == n - 1, world));
    EXPECT_EQ(every_rank(world.rank() == 0, world), n == 1);
    EXPECT_FALSE(any_rank(false, world));
    EXPECT_TRUE(every_rank(true, world));
    const at::Tensor loss = at::full({}, world.rank(), at::kDouble).requires_grad_();
    EXPECT_EQ(global_loss(loss, world).item<double>(), (n - 1) / 2.0);
    EXPECT_FALSE(global_loss(loss, world).requires_grad());
    for (const auto dtype : {at::kLong, at::kByte}) {
      const at::Tensor mean = global_loss(at::full({}, world.rank(), dtype), world);
      EXPECT_EQ(mean.scalar_type(), at::kDouble);
      EXPECT_EQ(mean.item<double>(), (n - 1) / 2.0);
    }
  });
}

TEST(Metrics, RowsThatNoSamplerDealsOutAreRefusedByAll) {
  spawn(2, [](World& world) {
    const auto& group = world.group();
    EXPECT_THROW(gather_for_metrics(at::zeros({world.rank() == 0 ? 1 : 3, 2}), group), ConfigError);
    EXPECT_THROW(gather_for_metrics(at::zeros({2, 2 + world.rank()}), group), ConfigError);
    EXPECT_THROW(gather_for_metrics(at::zeros({}), group), ConfigError);
    EXPECT_THROW(gather_for_metrics(at::zeros({2}), group, {.samples = 5}), ConfigError);
    EXPECT_THROW(global_loss(at::zeros({2}), group), ConfigError);
    EXPECT_EQ(gather_for_metrics(at::ones({2}), group).numel(), 4);
  });
}

// The line search compares losses: each rank's own would take ranks apart.
TEST_P(MetricWorlds, LbfgsTakesTheStepsOfOneProcess) {
  spawn(GetParam(), [](World& world) {
    const auto train = [&](Mlp& net, const Group& group, const std::vector<int>& parts) {
      torch::optim::LBFGS lbfgs(
          net.parameters(),
          torch::optim::LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe"));
      std::vector<at::Tensor> rows;
      for (const int part : parts) rows.push_back(input(part));
      const at::Tensor batch = at::cat(rows).to(at::kDouble);
      for (int step = 0; step < 3; ++step) {
        lbfgs.step([&] {
          lbfgs.zero_grad();
          const at::Tensor loss = (net.forward(batch) - 0.5).square().mean();
          loss.backward();
          return global_loss(loss, group);
        });
      }
    };
    Mlp net, one;
    net.to(at::kDouble);
    one.to(at::kDouble);
    Ddp ddp(net, world.group());
    train(net, world.group(), {world.rank()});
    std::vector<int> all(world.size());
    std::iota(all.begin(), all.end(), 0);
    train(one, Group(), all);
    for (size_t i = 0; i < one.parameters().size(); ++i) {
      at::Tensor first = net.parameters()[i].detach().clone();
      world.group().broadcast(first).wait();
      EXPECT_TRUE(at::equal(first, net.parameters()[i]));
      EXPECT_TRUE(at::allclose(net.parameters()[i], one.parameters()[i], 1e-6, 1e-8));
    }
  });
}

TEST(Metrics, TorchsOwnPlateauSchedulerDecidesAlikeOnAGlobalLoss) {
  spawn(2, [](World& world) {
    const at::Tensor weight = torch::ones({1}).requires_grad_();
    torch::optim::SGD sgd({weight}, 1.0);
    torch::optim::ReduceLROnPlateauScheduler plateau(
        sgd, torch::optim::ReduceLROnPlateauScheduler::min, 0.5F, 0);
    // Rank 0's loss falls and rank 1's rises by more.
    for (int step = 0; step < 4; ++step) {
      const double mine = world.rank() == 0 ? 10 - step : 10 + 2 * step;
      plateau.step(global_loss(at::full({}, mine), world.group()).item<float>());
    }
    const double rate = sgd.param_groups()[0].options().get_lr();
    EXPECT_LT(rate, 1.0);
    EXPECT_EQ(sum_over_ranks(rate, world.group()), 2 * rate);
  });
}

TEST(Metrics, OnlyTheMainRankWrites) {
  spawn(2, [](World& world) {
    ::testing::internal::CaptureStdout();
    world.main_out() << "loss " << 0.5 << std::endl;
    world.main_out() << "again\n" << std::flush;
    EXPECT_EQ(::testing::internal::GetCapturedStdout(),
              world.rank() == 0 ? "loss 0.5\nagain\n" : "");
  });
}

}  // namespace
}  // namespace lockstep::test
