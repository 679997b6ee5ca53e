// Ranks that drift apart are named; an optimizer that one rank loaded comes to all.
#include "lockstep/parallel/check_same.h"

#include <semaphore>
#include <thread>

#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"
#include "lockstep/parallel/metrics.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using namespace torch::optim;
using ::testing::AllOf;
using ::testing::HasSubstr;

void step(Mlp& net, Optimizer& optimizer, int rank, int number = 0) {
  optimizer.zero_grad();
  square_loss(net, rank, number).backward();
  optimizer.step([&] { return square_loss(net, rank, number); });
}

TEST(Fingerprint, DependsOnEveryByteDtypeAndShape) {
  isolated([] {
    for (const int64_t count : {1, 7, 8, 31, 32, 33, 100}) {
      const at::Tensor first = at::zeros({count}, at::kByte);
      const uint64_t print = parallel::fingerprint(first);
      for (int64_t i = 0; i < count; ++i) {
        at::Tensor other = first.clone();
        other[i] = 128;
        EXPECT_NE(parallel::fingerprint(other), print) << i << " of " << count;
      }
    }
    const at::Tensor matrix = at::arange(6).view({2, 3});
    EXPECT_NE(parallel::fingerprint(matrix), parallel::fingerprint(matrix.view({3, 2})));
    EXPECT_EQ(parallel::fingerprint(matrix), parallel::fingerprint(matrix.t().contiguous().t()));
    EXPECT_NE(parallel::fingerprint(at::zeros({3})),
              parallel::fingerprint(at::zeros({3}, at::kInt)));
    // Two elements changed places.
    EXPECT_NE(parallel::fingerprint(at::arange(64)), parallel::fingerprint(at::arange(64).flip(0)));
  });
}

TEST(CheckSame, NamesTheRankAndTheFirstParameterThatDiffers) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    SGD sgd(net.parameters(), SGDOptions(0.1).momentum(0.9));
    step(net, sgd, world.rank());
    check_same(net, world.group());
    check_same(net, sgd, world.group());
    const at::NoGradGuard no_grad;
    if (world.rank() == 2) net.second->bias[3] += 1e-7;
    if (world.rank() == 1) net.third->weight.mul_(2);
    EXPECT_THAT(message_of<ConfigError>([&] { check_same(net, world.group()); }),
                AllOf(HasSubstr("ranks 1, 2 differ from rank 0 (3 ranks)"),
                      HasSubstr("first in parameter 'second.bias'")));
  });
}

template <typename Wrapper>
void train_on_parts(World& world, int64_t seed, bool shuffle, int64_t parts) {
  torch::manual_seed(1);
  torch::nn::Linear net(2, 1);
  Wrapper wrapper(net, world.group());
  data::TensorDataset samples(torch::ones({8, 2}), torch::ones({8}));
  data::Loader loader(samples, Shard{parts == 1 ? 0 : world.rank(), parts},
                      {.batch_size = 2, .seed = seed, .shuffle = shuffle});
  for (auto [x, y] : loader.epoch(0)) call(net, x).sum().backward();
}

template <typename Wrapper>
void expect_compared_orders() {
  const auto run = train_on_parts<Wrapper>;
  spawn(2, [&](World& world) {
    // A seed of the clock, as programs of one process have it.
    const std::string error =
        message_of<ConfigError>([&] { run(world, world.rank(), /*shuffle=*/true, 2); });
    EXPECT_THAT(error, HasSubstr("rank 1 differs from rank 0 (2 ranks), first in the order in "
                                 "which a Loader or sampler divides the samples"));
    EXPECT_THAT(error, HasSubstr("some samples come twice and some never"));
    run(world, 5, /*shuffle=*/true, 2);
    run(world, world.rank(), /*shuffle=*/false, 2);
    run(world, world.rank(), /*shuffle=*/true, 1);  // each rank draws from all by itself
  });
  // What was divided before, or by one rank only, says nothing of its samples.
  spawn(2, [&](World& world) {
    data::DistributedSampler(8, {0, 2}, {.seed = world.rank()}).indices();
    run(world, world.rank(), /*shuffle=*/true, 1);
    torch::nn::Linear net(2, 1);
    Wrapper wrapper(net, world.group());
    if (world.rank() == 0) data::DistributedSampler(8, {0, 2}, {.seed = 3}).indices();
    call(net, torch::ones({1, 2})).sum().backward();
  });
}

// A pass over one batch, or over those of the loader.
void pass(torch::nn::Linear& net) { call(net, torch::ones({1, 2})).sum().backward(); }
void pass(torch::nn::Linear& net, data::Loader& loader) {
  for (auto [x, y] : loader.epoch(0)) call(net, x).sum().backward();
}

const data::TensorDataset& samples(int64_t count) {
  static std::map<int64_t, data::TensorDataset> sets;
  return sets.try_emplace(count, torch::ones({count, 2}), torch::ones({count})).first->second;
}

template <typename Wrapper>
void expect_compared_lengths() {
  spawn(2, [&](World& world) {
    for (const bool shuffle : {true, false}) {
      torch::nn::Linear net(2, 1);
      Wrapper wrapper(net, world.group());
      data::Loader loader(samples(38 + 2 * world.rank()), world,
                          {.batch_size = 4, .seed = 7, .shuffle = shuffle});
      const auto order = [&](int64_t count) {
        return std::to_string(count) + " samples, " + (shuffle ? "seed 7" : "not shuffled");
      };
      EXPECT_THAT(message_of<ConfigError>([&] { pass(net, loader); }),
                  AllOf(HasSubstr("pass 1 of"), HasSubstr("rank 1 differs from rank 0 (2 ranks)"),
                        HasSubstr(order(38) + " on rank 0, " + order(40) + " on rank 1")));
    }
  });
  // Each half of the ranks divides a set of its own, of which each rank has half.
  spawn(4, [&](World& world) {
    torch::nn::Linear net(2, 1);
    Wrapper wrapper(net, world.group());
    data::Loader loader(samples(world.rank() < 2 ? 8 : 7), Shard{world.rank() % 2, 2},
                        {.batch_size = 2, .seed = 7});
    pass(net, loader);
  });
}

TEST(CheckSame, RanksWithOtherNumbersOfSamplesAreTold) { expect_compared_lengths<Ddp>(); }
TEST(CheckSame, RanksOfAnFsdpWithOtherNumbersOfSamplesAreTold) { expect_compared_lengths<Fsdp>(); }

template <typename Wrapper>
void expect_compared_later() {
  spawn(2, [&](World& world) {
    torch::nn::Linear net(2, 1);
    Wrapper wrapper(net, world.group());
    for (int i = 0; i < 3; ++i) pass(net);  // of no data set, to warm up
    data::Loader same(samples(8), world, {.batch_size = 2, .seed = 1});
    data::Loader other(samples(8), world, {.batch_size = 2, .seed = 2 + world.rank()});
    pass(net, same);
    pass(net, same);
    EXPECT_THAT(message_of<ConfigError>([&] { pass(net, other); }),
                AllOf(HasSubstr("pass 8 of"), HasSubstr("8 samples, seed 2 on rank 0, 8 samples, "
                                                        "seed 3 on rank 1")));
    pass(net, same);
  });
  // Of two that begin at once, one differs.
  spawn(2, [&](World& world) {
    torch::nn::Linear net(2, 1);
    Wrapper wrapper(net, world.group());
    data::Loader same(samples(8), world, {.batch_size = 2, .seed = 1});
    data::Loader other(samples(8), world, {.batch_size = 2, .seed = 2 + world.rank()});
    other.epoch(0);
    EXPECT_THAT(message_of<ConfigError>([&] { pass(net, same); }), HasSubstr("seed 3 on rank 1"));
  });
}

TEST(CheckSame, AnOrderThatComesLaterIsCompared) { expect_compared_later<Ddp>(); }
TEST(CheckSame, AnOrderThatComesLaterIsComparedUnderFsdp) { expect_compared_later<Fsdp>(); }

template <typename Wrapper>
void expect_one_may_look() {
  spawn(3, [&](World& world) {
    torch::nn::Linear net(2, 1);
    Wrapper wrapper(net, world.group());
    data::Loader loader(samples(9), world, {.batch_size = 1, .seed = 1});
    data::Loader look(samples(5), world, {.batch_size = 1, .shuffle = false});
    for (int step = 0; auto [x, y] : loader.epoch(0)) {
      if (world.rank() == step++) look.epoch(0);
      call(net, x).sum().backward();
    }
  });
}

TEST(CheckSame, OneRankMayLookAtFurtherSamples) { expect_one_may_look<Ddp>(); }
TEST(CheckSame, OneRankOfAnFsdpMayLookAtFurtherSamples) { expect_one_may_look<Fsdp>(); }

// Its ranks are further in it, or less far, than in this one.
template <typename Wrapper>
void expect_trainings_apart() {
  spawn(2, [](World& world) {
    const Group mine = world.group().split(0), its = world.group().split(0);
    const auto begin = [&](int64_t seed) {
      data::DistributedSampler(8, {world.rank(), 2}, {.seed = seed}).indices();
    };
    std::binary_semaphore here(0), there(0);
    std::thread other([&] {
      torch::nn::Linear net(2, 1);
      Wrapper wrapper(net, its);
      pass(net);
      if (world.rank() == 0) begin(10);
      here.release();
      there.acquire();
      begin(world.rank() == 0 ? 11 : 10);
      here.release();
      there.acquire();
    });
    torch::nn::Linear net(2, 1);
    Wrapper wrapper(net, mine);
    here.acquire();
    pass(net);
    there.release();
    here.acquire();
    EXPECT_NO_THROW(pass(net));
    // Its own are compared as before, also those that a thread begins which trains nothing.
    std::thread([&] { begin(20 + world.rank()); }).join();
    EXPECT_THAT(message_of<ConfigError>([&] { pass(net); }), HasSubstr("seed 20 on rank 0"));
    there.release();
    other.join();
  });
}

TEST(CheckSame, OrdersOfAnotherTrainingInAnotherThreadAreNotCompared) {
  expect_trainings_apart<Ddp>();
  expect_trainings_apart<Fsdp>();
}

TEST(CheckSame, TheOrderIsComparedHoweverRarelyParametersAre) {
  for (const int64_t every : {1, 2, 100}) {
    spawn(2, [&](World& world) {
      torch::nn::Linear net(2, 1);
      Ddp ddp(net, world, {.check_same_every = every});
      data::Loader loader(samples(8), world, {.batch_size = 2, .seed = world.rank()});
      EXPECT_THAT(message_of<ConfigError>([&] { pass(net, loader); }),
                  AllOf(HasSubstr("pass 1 of Ddp 1"), HasSubstr("some samples come twice")));
    });
  }
}

TEST(CheckSame, TheFirstPassComparesTheOrderOfSamples) { expect_compared_orders<Ddp>(); }
TEST(CheckSame, TheFirstPassOfAnFsdpComparesTheOrderOfSamples) { expect_compared_orders<Fsdp>(); }

TEST(CheckSame, BuffersLearningRatesAndStateAreCompared) {
  spawn(2, [](World& world) {
    Mlp net;
    net.register_buffer("mean", at::zeros({3}));
    Ddp ddp(net, world.group());
    const auto expect = [&](Optimizer& optimizer, const char* text) {
      EXPECT_THAT(message_of<ConfigError>([&] { check_same(net, optimizer, world.group()); }),
                  AllOf(HasSubstr("rank 1 differs from rank 0 (2 ranks)"), HasSubstr(text)));
    };
    Adam adam(net.parameters(), AdamOptions(0.1));
    step(net, adam, world.rank());
    check_same(net, adam, world.group());
    if (world.rank() == 1) adam.param_groups()[0].options().set_lr(0.2);
    expect(adam, "the optimizer's options of group 0 (learning rate 0.1)");
    adam.param_groups()[0].options().set_lr(0.1);
    if (world.rank() == 1) {
      auto& state = *adam.state()[net.first->bias.unsafeGetTensorImpl()];
      static_cast<AdamParamState&>(state).exp_avg_sq().mul_(2);
    }
    expect(adam, "exp_avg_sq) of parameter 'first.bias'");
    Adam fresh(net.parameters(), AdamOptions(0.1));
    expect(world.rank() == 1 ? fresh : adam,
           "state (step, exp_avg, exp_avg_sq) of parameter 'first.weight'");
    if (world.rank() == 1) net.named_buffers()["mean"].fill_(1);
    expect(fresh, "buffer 'mean'");
  });
}

TEST(BroadcastOptimizer, WhatOneRankLoadedComesToAll) {
  spawn(2, [](World& world) {
    const auto compare = [&](auto make) {
      Mlp net;
      Ddp ddp(net, world.group());
      const auto optimizer = make(net.parameters());
      for (int i = 0; i < 2; ++i) step(net, *optimizer, world.rank(), i);
      // Rank 1 begins again, as one that did not load.
      auto other = make(net.parameters());
      if (world.rank() == 1) other->param_groups()[0].options().set_lr(0.7);
      Optimizer& mine = world.rank() == 0 ? *optimizer : *other;
      if (world.rank() == 0) mine.param_groups()[0].options().set_lr(0.02);
      EXPECT_NE(message_of([&] { check_same(net, mine, world.group()); }), "nothing");
      broadcast_optimizer(mine, world.group());
      check_same(net, mine, world.group());
      EXPECT_EQ(mine.param_groups()[0].options().get_lr(), 0.02);
      step(net, mine, world.rank(), 3);
      check_same(net, mine, world.group());
    };
    using Parameters = std::vector<at::Tensor>;
    compare(
        [](Parameters p) { return std::make_unique<Adam>(p, AdamOptions(0.01).amsgrad(true)); });
    compare([](Parameters p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01)); });
    compare([](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.01).momentum(0.9)); });
    compare([](Parameters p) {
      return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).momentum(0.9).centered(true));
    });
    compare([](Parameters p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.01)); });
    compare([](Parameters p) { return std::make_unique<FusedAdam>(p, AdamOptions(0.01)); });
    compare([](Parameters p) { return std::make_unique<FusedAdamW>(p, AdamWOptions(0.01)); });
    compare(
        [](Parameters p) { return std::make_unique<FusedSGD>(p, SGDOptions(0.01).momentum(0.9)); });
  });
}

TEST(BroadcastOptimizer, TheHistoryOfLbfgsComesToAll) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    const auto search = [&](Optimizer& lbfgs, int number) {
      lbfgs.step([&] {
        lbfgs.zero_grad();
        const at::Tensor loss = square_loss(net, world.rank(), number);
        loss.backward();
        return global_loss(loss, world);
      });
    };
    const auto options = LBFGSOptions(0.5).max_iter(4).history_size(3);
    LBFGS loaded(net.parameters(), options), fresh(net.parameters(), options);
    for (int i = 0; i < 2; ++i) search(loaded, i);
    if (world.rank() == 0) loaded.param_groups()[0].options().set_lr(0.25);
    LBFGS& mine = world.rank() == 0 ? loaded : fresh;
    EXPECT_NE(message_of([&] { check_same(net, mine, world); }), "nothing");
    broadcast_optimizer(mine, world);
    check_same(net, mine, world);
    EXPECT_EQ(mine.param_groups()[0].options().get_lr(), 0.25);
    const at::Tensor before = net.first->weight.detach().clone();
    search(mine, 2);
    EXPECT_FALSE(at::equal(net.first->weight, before));
    check_same(net, mine, world);
  });
}

// A program's own, that cannot be saved.
struct Unsaved : SGD {
  using SGD::SGD;
  void save(torch::serialize::OutputArchive&) const override { fail(); }
  std::function<void()> fail;
};

TEST(BroadcastOptimizer, WhatSaveThrowsIsQuotedOnTheOthers) {
  spawn(2, [](World& world) {
    Mlp net;
    Unsaved optimizer(net.parameters(), SGDOptions(0.1));
    const auto thrown = [&] { broadcast_optimizer(optimizer, world.group()); };
    optimizer.fail = [] { throw 7; };
    if (world.rank() == 0) {
      EXPECT_THROW(thrown(), int);
    } else {
      EXPECT_EQ(message_of<Error>(thrown),
                "[broadcast_optimizer] rank 0: an exception that is not a std::exception");
    }
    optimizer.fail = [] { TORCH_CHECK(false, "an odd state"); };
    if (world.rank() == 0) {
      EXPECT_THROW(thrown(), c10::Error);
    } else {  // without libtorch's backtrace
      EXPECT_EQ(message_of<Error>(thrown), "[broadcast_optimizer] rank 0: an odd state");
    }
    // A program's exit status says whether its configuration was wrong.
    const auto is_config_error = [&] {
      try {
        thrown();
      } catch (const ConfigError&) {
        return true;
      } catch (const Error&) {
      }
      return false;
    };
    optimizer.fail = [] { throw DataError("no state"); };
    EXPECT_FALSE(is_config_error());
    optimizer.fail = [] { throw ConfigError("no state"); };
    EXPECT_TRUE(is_config_error());
  });
}

TEST(BroadcastOptimizer, RefusesOnAllRanks) {
  spawn(2, [](World& world) {
    Mlp net;
    Adam adam(net.parameters(), AdamOptions(0.1));
    SGD sgd(net.parameters(), SGDOptions(0.1)), part({net.first->weight}, SGDOptions(0.1));
    const auto refused = [&](Optimizer& optimizer) {
      return message_of<ConfigError>([&] { broadcast_optimizer(optimizer, world.group()); });
    };
    EXPECT_THAT(refused(world.rank() == 0 ? static_cast<Optimizer&>(adam) : sgd),
                HasSubstr("the ranks' optimizers differ"));
    EXPECT_THAT(refused(world.rank() == 0 ? part : sgd),
                HasSubstr("group of 1 parameters: [8, 6]"));
    ZeroOptimizer divided(net.parameters(), world.group(), zero<SGD>(SGDOptions(0.1)));
    EXPECT_THAT(refused(divided), HasSubstr("sharded over the ranks"));
    broadcast_optimizer(sgd, world.group());
  });
}

}  // namespace
}  // namespace lockstep::test
