// Every kind of object that is tracked goes on as if nothing had been.
#include "lockstep/checkpoint/stateful.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>

#include "checkpoint/model.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/stateful.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

// `held`: restored by a program that holds InferenceMode, and trains outside of it.
template <class Kind, class Options>
void expect_same_optimizer(Options options, bool held) {
  const Folder folder;
  Everything net, expected;
  Kind kind(net.trained(), options), other(expected.trained(), options);
  Checkpointer checkpoints(World::solo(), folder.path());
  checkpoints.track("net", net);
  checkpoints.track("optimizer", kind);
  train(net, kind, 2);
  checkpoints.save(2);
  train(net, kind, 3);
  {
    const c10::InferenceMode mode(held);
    checkpoints.restore_latest();
  }
  train(expected, other, 2);
  train(net, kind, 2);
  train(expected, other, 2);
  EXPECT_TRUE(same(net, expected));
}

TEST(Stateful, EveryOptimizerGoesOnAsIfNothingHadBeen) {
  isolated([] {
    for (const bool held : {false, true}) {
      expect_same_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), held);
      expect_same_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1), held);
      expect_same_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1), held);
      expect_same_optimizer<FusedAdam>(torch::optim::AdamOptions(0.1), held);
    }
  });
}

// What lies in its place by then was saved under its name.
TEST(Stateful, AModuleThatHasBeenReplacedIsNotSaved) {
  isolated([] {
    const auto refused = [](auto& net, const auto& replace) {
      const Folder folder;
      Checkpointer checkpoints(World::solo(), folder.path());
      checkpoints.track("net", net);
      checkpoints.save(1);
      replace();
      for (const auto& call : {+[](Checkpointer& all) { all.save(2); },
                               +[](Checkpointer& all) { (void)all.restore_latest(); }}) {
        EXPECT_THAT(message_of<CheckpointError>([&] { call(checkpoints); }),
                    HasSubstr("the module that is tracked as net is not there any more: for the "
                              "one in its place destroy this Checkpointer, which holds the "
                              "directory, and make another"));
      }
    };
    auto shared = std::make_shared<torch::nn::LinearImpl>(3, 2);
    refused(shared, [&] { shared = std::make_shared<torch::nn::LinearImpl>(3, 4); });
    torch::nn::Linear holder(3, 2);
    refused(holder, [&] { holder = torch::nn::Linear(3, 4); });
    // One that goes on under another owner is the same module.
    torch::nn::Linear first(3, 2);
    const Folder folder;
    Checkpointer checkpoints(World::solo(), folder.path());
    checkpoints.track("net", first);
    const auto kept = first.ptr();
    first = nullptr;
    checkpoints.save(1);
    EXPECT_THAT(message_of<ConfigError>([&] { checkpoints.track("none", first); }),
                HasSubstr("track(\"none\") of an empty pointer"));
  });
}

TEST(Stateful, OptimizersOfRealNumbersToo) {
  isolated([] {
    const Folder folder;
    torch::nn::Linear net(3, 3), expected(3, 3);
    const auto loss = [](torch::nn::Linear& linear) {
      return linear(torch::ones({2, 3})).square().mean();
    };
    const auto check = [&](auto make, const std::string& name) {
      {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < 2; ++i) expected->parameters()[i].copy_(net->parameters()[i]);
      }
      auto one = make(net), other = make(expected);
      Checkpointer checkpoints(World::solo(), folder / name);
      checkpoints.track("net", net);
      checkpoints.track("optimizer", *one);
      const auto step = [&](torch::nn::Linear& linear, torch::optim::Optimizer& optimizer) {
        optimizer.zero_grad();
        loss(linear).backward();
        optimizer.step();
      };
      step(net, *one);
      checkpoints.save(1);
      step(net, *one);
      checkpoints.restore_latest();
      step(expected, *other);
      step(net, *one);
      step(expected, *other);
      EXPECT_TRUE(same(*net, *expected)) << name;
    };
    check(
        [](auto& linear) {
          return std::make_unique<torch::optim::RMSprop>(
              linear->parameters(),
              torch::optim::RMSpropOptions(0.01).momentum(0.9).centered(true));
        },
        "rmsprop");
    check(
        [](auto& linear) {
          return std::make_unique<torch::optim::Adagrad>(linear->parameters(),
                                                         torch::optim::AdagradOptions(0.1));
        },
        "adagrad");
  });
}

// Saved with ZeRO on some ranks, restored with or without on others: the names are the same.
struct Zero {
  const char* name;
  int saved, restored;
  bool divided_before, divided_after;
};
class ZeroAndPlain : public testing::TestWithParam<Zero> {};
INSTANTIATE_TEST_SUITE_P(, ZeroAndPlain,
                         testing::Values(Zero{"From3To2", 3, 2, true, true},
                                         Zero{"From2ToPlain", 2, 1, true, false},
                                         Zero{"FromPlainTo4", 1, 4, false, true},
                                         Zero{"From1To3", 1, 3, true, true}),
                         [](const auto& test) { return test.param.name; });

std::unique_ptr<torch::optim::Optimizer> make_adam(Everything& net, World& world, bool divided) {
  const auto options = torch::optim::AdamOptions(0.01);
  if (!divided) return std::make_unique<torch::optim::Adam>(net.trained(), options);
  return std::make_unique<ZeroOptimizer>(net.trained(), world.group(),
                                         zero<torch::optim::Adam>(options));
}

void track(Checkpointer& checkpoints, torch::optim::Optimizer& optimizer) {
  if (auto* divided = dynamic_cast<ZeroOptimizer*>(&optimizer)) {
    checkpoints.track("adam", *divided);
  } else {
    checkpoints.track("adam", optimizer);
  }
}

TEST_P(ZeroAndPlain, RestoreEachOthersState) {
  const auto [name, saved, restored, divided_before, divided_after] = GetParam();
  const Folder folder;
  spawn(saved, [&](World& world) {
    Everything net;
    const auto adam = make_adam(net, world, divided_before);
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("net", net);
    track(checkpoints, *adam);
    train(net, *adam, 2);
    adam->param_groups()[0].options().set_lr(0.002);
    checkpoints.save(2);
  });
  spawn(restored, [&](World& world) {
    Everything net, expected;
    const auto adam = make_adam(net, world, divided_after);
    const auto other = make_adam(expected, world, false);
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("adam", *adam);  // by its class, though it is given as an Optimizer
    checkpoints.track("net", net);
    EXPECT_EQ(checkpoints.restore_latest()->step, 2);
    train(expected, *other, 2);
    other->param_groups()[0].options().set_lr(0.002);
    train(net, *adam, 2);
    train(expected, *other, 2);
    EXPECT_TRUE(same(net, expected));
  });
}

TEST(Stateful, AnOptimizerOfAnotherClassIsRefusedByName) {
  isolated([] {
    torch::nn::Linear net(2, 2);
    torch::optim::LBFGS optimizer(net->parameters());
    EXPECT_THAT(message_of<ConfigError>([&] { checkpoint::stateful(optimizer); }),
                HasSubstr("an optimizer of class torch::optim::LBFGS cannot be tracked"));
  });
}

// Two groups have the whole each; none says which of them is saved.
TEST(Stateful, AZeroOptimizerOfAPartOfTheRanksIsRefused) {
  const Folder folder;
  spawn(4, [&](World& world) {
    torch::nn::Linear net(2, 2);
    const Group half = world.group().split(world.rank() / 2);
    ZeroOptimizer adam(net->parameters(), half,
                       zero<torch::optim::Adam>(torch::optim::AdamOptions(0.1)));
    Checkpointer checkpoints(world.group(), folder.path());
    EXPECT_THAT(message_of<ConfigError>([&] { checkpoints.track("adam", adam); }),
                HasSubstr("'adam' is sharded over 2 ranks of 4 that save"));
    Checkpointer own(half, folder / std::to_string(world.rank() / 2));
    own.track("adam", adam);
    own.save(1);
  });
}

TEST(Stateful, SchedulersScalersAveragersLoadersAndNumbers) {
  const Folder folder;
  spawn(2, [&](World& world) {
    torch::manual_seed(1);
    torch::nn::Linear net(2, 2);
    torch::optim::SGD sgd(net->parameters(), 0.5);
    GradScaler scaler(world.group());
    LrScheduler scheduler(sgd, step_lr({.size = 2, .gamma = 0.5}));
    ReduceLrOnPlateau plateau(sgd, world.group());
    Averager averager(*net, {{world.group(), 2}});
    data::TensorDataset set(torch::arange(20), torch::arange(20));
    Loader loader(set, world, {.batch_size = 2, .seed = 3});
    int64_t count = 1;
    double real = std::numeric_limits<double>::infinity();
    bool flag = true;
    std::string text = "one";
    at::Tensor tensor = torch::ones({3});
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("net", net);
    checkpoints.track("sgd", sgd);
    checkpoints.track("scaler", scaler);
    checkpoints.track("scheduler", scheduler);
    checkpoints.track("plateau", plateau);
    checkpoints.track("averager", averager);
    checkpoints.track("loader", loader);
    checkpoints.track("count", count);
    checkpoints.track("real", real);
    checkpoints.track("flag", flag);
    checkpoints.track("text", text);
    checkpoints.track("tensor", tensor);
    scaler.restore({1024, 7});
    for (int i = 0; i < 3; ++i) scheduler.step();
    averager.set_steps(5);
    auto state = loader.state();
    state.epoch = 2;
    state.position = 8;
    loader.restore(state);
    checkpoints.save(1);
    scaler.restore({2, 0});
    scheduler.step();
    plateau.step(3);
    averager.set_steps(0);
    state.epoch = 0;
    loader.restore(state);
    count = 0, real = 0, flag = false, text = "";
    tensor.zero_();
    checkpoints.restore_latest();
    EXPECT_EQ(scaler.state().scale, 1024);
    EXPECT_EQ(scaler.state().growth_tracker, 7);
    EXPECT_EQ(scheduler.state().step, 3);
    EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.25);
    EXPECT_EQ(plateau.state().best, std::numeric_limits<double>::infinity());
    EXPECT_EQ(averager.steps(), 5);
    EXPECT_EQ(loader.state().epoch, 2);
    EXPECT_EQ(loader.state().position, 8);
    EXPECT_EQ(count, 1);
    EXPECT_EQ(real, std::numeric_limits<double>::infinity());
    EXPECT_TRUE(flag);
    EXPECT_EQ(text, "one");
    EXPECT_TRUE(at::equal(tensor, torch::ones({3})));
  });
}

std::string file_of(std::string name) {
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
}

// Residuals are a rank's own; another number of ranks shares their mean.
TEST(Stateful, WhatAHookKeepsIsEachRanksOwn) {
  const Folder folder;
  const auto with = [&](World& world, const auto& body) {
    torch::manual_seed(0);
    torch::nn::Linear net(8, 8);
    const auto hook = std::make_shared<TopK>(TopKOptions{.fraction = 0.1});
    Ddp ddp(net, world.group(), {.hook = hook});
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("hook", stateful(*hook, world.group()));
    body(net, *hook, checkpoints);
  };
  const auto mean_of = [](World& world, at::Tensor tensor) {
    tensor = tensor.clone();
    world.group().all_reduce(tensor, ReduceOp::Average).wait();
    return tensor;
  };
  spawn(2, [&](World& world) {
    with(world, [&](auto& net, TopK& hook, Checkpointer& checkpoints) {
      net(torch::full({1, 8}, 1.0 + world.rank())).square().sum().backward();
      const auto before = hook.state();
      ASSERT_FALSE(before.empty());
      checkpoints.save(1);
      net(torch::ones({1, 8})).square().sum().backward();
      checkpoints.restore_latest();
      for (const auto& [name, tensor] : hook.state()) {
        EXPECT_TRUE(at::equal(tensor, before.at(name))) << name;
        const auto mean = mean_of(world, tensor);
        if (world.rank() == 0) torch::save(mean, folder / file_of(name));
      }
    });
  });
  spawn(3, [&](World& world) {
    with(world, [&](auto&, TopK& hook, Checkpointer& checkpoints) {
      checkpoints.restore_latest();
      ASSERT_FALSE(hook.state().empty());
      for (const auto& [name, tensor] : hook.state()) {
        at::Tensor mean;
        torch::load(mean, folder / file_of(name));
        EXPECT_TRUE(at::allclose(tensor, mean)) << name;
      }
    });
  });
}

// Nothing has changed by then: neither what comes before the hook nor what comes after it.
TEST(Stateful, WhatAHookKeepsOfOtherSizesIsRefusedBeforeAnythingChanges) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto with = [&](const std::shared_ptr<CommHook>& hook, const char* name, int64_t width,
                          int64_t& count, const auto& body) {
      torch::nn::Linear net(width, 8);
      at::Tensor tensor = torch::full({3}, count, torch::kFloat);
      Ddp ddp(net, world.group(), {.hook = hook});
      for (int pass = 0; pass < 2; ++pass) {
        net(torch::full({1, width}, 1.0 + world.rank())).square().sum().backward();
      }
      Checkpointer checkpoints(world.group(), folder / name);
      checkpoints.track("count", count);
      checkpoints.track("tensor", tensor);
      checkpoints.track("hook", stateful(*hook, world.group()));
      body(checkpoints);
      EXPECT_TRUE(at::equal(tensor, torch::full({3}, count, torch::kFloat)));
    };
    const auto check = [&](const char* name, const auto& make) {
      int64_t count = 5;
      with(make(), name, 64, count, [](Checkpointer& checkpoints) { checkpoints.save(1); });
      count = 7;
      with(make(), name, 32, count, [&](Checkpointer& checkpoints) {
        EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                    HasSubstr("restore what state() of such a hook gave on this rank"));
      });
      EXPECT_EQ(count, 7) << name;
    };
    check("top_k", [] { return std::make_shared<TopK>(TopKOptions{.fraction = 0.1}); });
    check("power_sgd", [] {
      return std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start_iteration = 1});
    });
  });
}

// What a hook keeps of a parameter without elements is saved, too.
// A hook that counts its passes has a state from the start.
TEST(Stateful, AHookThatWasNotTrackedIsMissing) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto other = at::zeros({2});
    Checkpointer saving(world.group(), folder.path());
    saving.track("other", other);
    saving.save(1);
    saving.finish();
    LocalSgd hook({.start_iteration = 2});
    Checkpointer reading(world.group(), folder.path());
    reading.track("hook", stateful(hook, world.group()));
    EXPECT_THAT(
        message_of<CheckpointError>([&] { reading.restore_latest({.allow_unexpected = {"*"}}); }),
        HasSubstr(fmt::format("hook/rank-{}/iteration is missing", world.rank())));
    reading.restore_latest({.allow_missing = {"hook/*"}, .allow_unexpected = {"*"}});
  });
}

TEST(Stateful, WhatAHookKeepsOfNothing) {
  const Folder folder;
  spawn(2, [&](World& world) {
    struct WithNothing : torch::nn::Module {
      WithNothing() {
        some = register_parameter("some", torch::ones({3}));
        none = register_parameter("none", torch::ones({0, 4}));
      }
      at::Tensor some, none;
    } net;
    const auto hook =
        std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true});
    Ddp ddp(net, world.group(), {.hook = hook});
    (net.some.square().sum() * (1.1 + world.rank()) + net.none.sum()).backward();
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("hook", stateful(*hook, world.group()));
    const auto before = hook->state();
    EXPECT_TRUE(before.contains("none"));
    checkpoints.save(1);
    checkpoints.restore_latest();
    EXPECT_EQ(hook->state().size(), before.size());
    EXPECT_TRUE(at::equal(hook->state().at("some"), before.at("some")));
  });
}

}  // namespace
}  // namespace lockstep::test
