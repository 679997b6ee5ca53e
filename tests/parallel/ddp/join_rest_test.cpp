// A rank without a batch takes part in what follows backward(), too.
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/global_mean.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

// Batches of rank 0, 1 and 2, and rows of each; the third step overflows.
constexpr int kBatchesByRank[] = {2, 4, 0};
constexpr int kOverflowingStep = 2;
int64_t rows_in_batch(int rank, int step) { return 1 + rank + step; }

at::Tensor summed_loss_of(Mlp& net, const std::vector<int>& ranks, int step) {
  std::vector<at::Tensor> rows;
  for (const int rank : ranks) rows.push_back(input(rank, step, rows_in_batch(rank, step)));
  const at::Tensor loss = net.forward(at::cat(rows).to(at::kDouble)).square().sum();
  return step == kOverflowingStep ? loss * std::numeric_limits<double>::infinity() : loss;
}

// One process with the rows of all ranks that have a batch.
double train_on_all(Mlp& net, torch::optim::Optimizer& optimizer, int ranks) {
  GradScaler scaler({}, {.init_scale = 256, .growth_interval = 2});
  LrScheduler schedule(optimizer, exponential_lr(0.5));
  for (int step = 0;; ++step) {
    std::vector<int> active;
    int64_t rows = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if (step >= kBatchesByRank[rank]) continue;
      active.push_back(rank);
      rows += rows_in_batch(rank, step);
    }
    if (active.empty()) return scaler.factor();
    optimizer.zero_grad();
    scaler.scale(summed_loss_of(net, active, step) / rows).backward();
    scaler.unscale_(optimizer);
    clip_grad_norm_(net.parameters(), 0.2);
    scaler.step(optimizer);
    scaler.update();
    schedule.step();
  }
}

TEST(JoinRest, MeansScalersClippingSchedulersAndOptimizersMakeTheSameStepsOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    spawn(ranks, [](World& world) {
      const auto make = zero<FusedAdam>(torch::optim::AdamOptions(0.01));
      for (const bool divided : {false, true}) {
        Mlp net, one;
        net.to(at::kDouble);
        one.to(at::kDouble);
        Ddp ddp(net, world.group());
        std::unique_ptr<torch::optim::Optimizer> adam;
        if (divided) {
          adam = std::make_unique<ZeroOptimizer>(net.parameters(), world.group(), make);
        } else {
          adam = make({net.parameters()});
        }
        GlobalMean mean(world.group());
        GradScaler scaler(world.group(), {.init_scale = 256, .growth_interval = 2});
        LrScheduler schedule(*adam, exponential_lr(0.5));
        parallel::Averager averager(net, {{world.group(), 2}});
        int steps = 0;
        const auto rest = [&] {
          mean.scale_gradients_(net.parameters());
          scaler.unscale_(*adam);
          clip_grad_norm_(net.parameters(), 0.2);
          clip_grad_norm_(net.parameters(), 1e9, {.group = world.group()});
          EXPECT_EQ(scaler.step(*adam), steps != kOverflowingStep);
          scaler.update();
          schedule.step();
          averager.step();
          ++steps;
        };
        Join join({ddp});
        for (int step = 0; step < kBatchesByRank[world.rank()]; ++step) {
          ddp.zero_grad();
          scaler.scale(summed_loss_of(net, {world.rank()}, step)).backward();
          mean.add(rows_in_batch(world.rank(), step));
          rest();
        }
        join.finish(rest);

        const auto whole = make({one.parameters()});
        const double factor = train_on_all(one, *whole, world.size());
        EXPECT_EQ(steps, world.size() == 1 ? 2 : 4);
        EXPECT_EQ(scaler.factor(), factor);
        EXPECT_EQ(adam->param_groups()[0].options().get_lr(),
                  whole->param_groups()[0].options().get_lr());
        for (size_t i = 0; i < one.parameters().size(); ++i) {
          EXPECT_TRUE(at::allclose(net.parameters()[i], one.parameters()[i], 1e-8, 1e-10)) << i;
        }
      }
    });
  }
}

// It took a step with what its last batch had left there in each step of the others.
TEST(JoinRest, AnIgnoredParameterStaysAsItIsOnARankWithoutABatch) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world, {.ignore = {"third.bias"}});
    torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    Join join({ddp});
    for (int step = 0; step <= world.rank(); ++step) {
      sgd.zero_grad();
      square_loss(net, world.rank(), step).backward();
      sgd.step();
    }
    const at::Tensor own = net.third->bias.detach().clone();
    join.finish([&] { sgd.step(); });
    EXPECT_TRUE(at::equal(net.third->bias, own));
    net.third->bias.data().zero_();
    check_same(net, world);
  });
}

// What a gradient holds that no rank computes in a step is a part of the step all the same:
// momentum and weight decay go on, and norms count it. Ranks without a batch took no such part.
struct LateBranch : torch::nn::Module {
  LateBranch()
      : always(register_module("always", torch::nn::Linear(6, 1))),
        once(register_module("once", torch::nn::Linear(6, 300))) {
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) parameter.fill_(0.25);
  }
  at::Tensor loss(int rank, int step) {
    const at::Tensor x = input(rank, step, 3).to(at::kDouble);
    at::Tensor sum = always(x).square().mean();
    return step == 0 ? sum + once(x).square().mean() : sum;
  }
  torch::nn::Linear always, once;
};

TEST(JoinRest, GradientsThatNoRankComputesAreThoseOfARankWithABatch) {
  constexpr int kBatches[] = {1, 3, 2};
  spawn(3, [&](World& world) {
    for (const auto divisor : {Divisor::World, Divisor::Active}) {
      for (const bool divided : {false, true}) {
        const auto make = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
          const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1);
          return std::make_unique<torch::optim::SGD>(std::move(groups), options);
        };
        LateBranch net, one;
        Ddp ddp(net, world);
        std::unique_ptr<torch::optim::Optimizer> sgd = make({net.parameters()});
        if (divided) {
          sgd = std::make_unique<ZeroOptimizer>(net.parameters(), world.group(), make);
        }
        const auto rest = [&] {
          clip_grad_norm_(net.parameters(), 0.2);
          sgd->step();
        };
        Join join({ddp}, {.divisor = divisor});
        for (int step = 0; step < kBatches[world.rank()]; ++step) {
          sgd->zero_grad(/*set_to_none=*/false);
          net.loss(world.rank(), step).backward();
          rest();
        }
        join.finish(rest);
        // After the Join momentum goes on from what it left.
        for (const auto& parameter : net.parameters())
          parameter.mutable_grad() = at::ones_like(parameter);
        sgd->step();

        const auto whole = make({one.parameters()});
        for (int step = 0; step < 3; ++step) {
          whole->zero_grad(/*set_to_none=*/false);
          at::Tensor sum = at::zeros({}, at::kDouble);
          int active = 0;
          for (int rank = 0; rank < 3; ++rank) {
            if (step < kBatches[rank]) sum = sum + one.loss(rank, step), ++active;
          }
          (sum / (divisor == Divisor::World ? 3 : active)).backward();
          clip_grad_norm_(one.parameters(), 0.2);
          whole->step();
        }
        for (const auto& parameter : one.parameters())
          parameter.mutable_grad() = at::ones_like(parameter);
        whole->step();
        for (const auto& item : one.named_parameters()) {
          EXPECT_TRUE(at::allclose(net.named_parameters()[item.key()], item.value(), 1e-10, 1e-12))
              << item.key() << (divided ? " divided" : "");
        }
        check_same(net, world);
      }
    }
  });
}

// An optimizer goes on with the momentum of a parameter that was frozen while it had a gradient.
TEST(JoinRest, GradientsOfFrozenParametersAreThoseOfARankWithABatch) {
  spawn(3, [](World& world) {
    for (const auto divisor : {Divisor::World, Divisor::Active}) {
      Mlp net;
      Ddp ddp(net, world);
      torch::optim::SGD sgd(net.parameters(),
                            torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
      square_loss(net, world.rank()).backward();
      sgd.step();
      net.first->weight.set_requires_grad(false);
      ddp.refresh();
      Join join({ddp}, {.divisor = divisor});
      for (int step = 1; step <= world.rank(); ++step) {
        sgd.zero_grad(/*set_to_none=*/false);
        square_loss(net, world.rank(), step).backward();
        sgd.step();
      }
      join.finish([&] { sgd.step(); });
      check_same(net, sgd, world);
    }
  });
}

struct ManyLayouts : torch::nn::Module {
  ManyLayouts() {
    torch::manual_seed(0);
    head = register_module("head", torch::nn::Linear(2, 2));
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 2).sparse(true)));
    pairs = register_parameter("pairs", at::randn({3}, at::kComplexFloat));
    filter = register_parameter("filter",
                                at::randn({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    nothing = register_parameter("nothing", at::empty({0, 2}));
  }
  at::Tensor loss(int rank, bool all) {
    const at::Tensor sum = head(at::full({1, 2}, 1.0 + rank)).square().sum();
    if (!all) return sum;
    return sum + table(torch::tensor({rank, 4, 4})).square().sum() + nothing.sum() +
           at::view_as_real(pairs * (1 + rank)).square().sum() + (filter.square() * rank).sum();
  }
  torch::nn::Linear head{nullptr};
  torch::nn::Embedding table{nullptr};
  at::Tensor pairs, filter, nothing;
};

TEST(JoinRest, GradientsThatNoRankComputesMayHaveAnyLayout) {
  spawn(3, [](World& world) {
    for (const auto divisor : {Divisor::World, Divisor::Active}) {
      ManyLayouts net;
      Ddp ddp(net, world);
      net.loss(world.rank(), true).backward();
      std::map<std::string, at::Tensor> before;
      for (const auto& item : net.named_parameters()) {
        before[item.key()] = item.value().grad().clone();
      }
      int steps = 0;
      const auto check = [&] {
        ++steps;
        for (const auto& item : net.named_parameters()) {
          const at::Tensor &was = before.at(item.key()), &gradient = item.value().grad();
          ASSERT_TRUE(gradient.defined()) << item.key();
          EXPECT_EQ(gradient.layout(), was.layout()) << item.key();
          const auto dense = [](const at::Tensor& one) {
            return one.is_sparse() ? one.to_dense() : one;
          };
          const bool is_used = item.key().starts_with("head");
          EXPECT_EQ(at::equal(dense(gradient), dense(was)), !is_used) << item.key();
        }
      };
      Join join({ddp}, {.divisor = divisor});
      for (int step = 0; step < world.rank(); ++step) {
        net.loss(world.rank(), false).backward();
        check();
      }
      join.finish(check);
      EXPECT_EQ(steps, 2);
    }
  });
}

// The error says where the call belongs that the rank without a batch does not make.
TEST(JoinRest, AMeanThatFinishWasNotGivenIsTold) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    GlobalMean mean(world);
    const std::string message = message_of<CommError>([&] {
      Join join({ddp});
      for (int step = 0; step <= world.rank(); ++step) {
        ddp.zero_grad();
        square_loss(net, world.rank(), step).backward();
        mean.add(1);
        mean.scale_gradients_(net.parameters());
      }
      join.finish();
    });
    if (world.rank() == 1) {
      EXPECT_THAT(message,
                  ::testing::HasSubstr("finish() takes what follows backward() in a step)"));
    }
  });
}

TEST(JoinRest, AnOptimizerIsJoinedOrSteppedByTheRestNotBoth) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    ZeroOptimizer adam(net.parameters(), world.group(),
                       zero<FusedAdam>(torch::optim::AdamOptions(0.01)));
    Join join({ddp, adam});
    EXPECT_THROW(join.finish([&] { adam.step(); }), ConfigError);
    join.finish();
  });
}

// Its shadow() knows nothing of the ranks: finish() would not end.
TEST(JoinRest, AnOptimizerIsNotNamedFirst) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      Mlp net;
      Ddp ddp(net, world);
      ZeroOptimizer adam(net.parameters(), world, zero<FusedAdam>(torch::optim::AdamOptions(0.01)));
      EXPECT_THAT(message_of<ConfigError>([&] {
                    Join({adam, ddp});
                  }),
                  ::testing::HasSubstr("an optimizer is named first"));
      Join({ddp, adam}).finish();
    });
  }
}

// The layer waits in forward() for a rank that has had the first micro-batch of a step, and none
// after it.
TEST(JoinRest, SyncBatchNormIsToldThatARankHasRunOutBetweenMicroBatches) {
  spawn(2,
        [](World& world) {
          torch::nn::Sequential net(
              SyncBatchNorm1d(torch::nn::BatchNormOptions(6), world.group().split(0)),
              torch::nn::Linear(6, 1));
          Ddp ddp(net, world);
          Join join({ddp});
          int done = 0;
          EXPECT_THAT(message_of<DataError>([&] {
                        for (; done < (world.rank() == 1 ? 3 : 4); ++done) {
                          std::optional<parallel::Hold> hold;
                          if (done % 2 == 0) hold.emplace(ddp.hold());
                          net->forward(input(world.rank(), done)).square().mean().backward();
                        }
                        join.finish();
                      }),
                      ::testing::HasSubstr("1 of 2 ranks have a batch for this step"));
          EXPECT_EQ(done, 3);
        },
        {.timeout = std::chrono::seconds(20)});
}

// Ranks 1 and 2 train to the end, with statistics of their own.
TEST(JoinRest, BuffersOfTheirOwnAreKeptByRanksThatHaveABatchToTheEnd) {
  spawn(3, [](World& world) {
    torch::nn::BatchNorm1d norm(6);
    torch::nn::Sequential net(norm, torch::nn::Linear(6, 1));
    Ddp ddp(net, world, {.buffers = Buffers::None});
    Join join({ddp});
    for (int step = 0; step < (world.rank() == 0 ? 1 : 4); ++step)
      net->forward(input(world.rank(), step)).square().mean().backward();
    const at::Tensor own = norm->running_mean.clone();
    join.finish();
    at::Tensor of_first = own.clone();
    world.group().broadcast(of_first, 1).wait();
    EXPECT_TRUE(at::equal(norm->running_mean, world.rank() == 2 ? own : of_first));
    EXPECT_EQ(at::equal(own, of_first), world.rank() == 1);
  });
}

}  // namespace
}  // namespace lockstep::test
