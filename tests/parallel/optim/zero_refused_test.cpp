// Parameters, options and gradients that differ between the ranks of a ZeroOptimizer.
#include <gmock/gmock.h>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fused_sgd.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::SGDOptions;
using Tensors = std::vector<at::Tensor>;

std::string refused(World& world, const Tensors& parameters, double rate = 0.1) {
  return message_of<ConfigError>(
      [&] { ZeroOptimizer(parameters, world.group(), zero<torch::optim::SGD>(SGDOptions(rate))); });
}

// Two layers of one shape, whose biases are both zeros.
torch::nn::Sequential two_layers() {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    if (parameter.dim() == 1) parameter.zero_();
  }
  return net;
}

TEST(ZeroRanksDiffer, ParametersInAnotherOrderOrOneLess) {
  spawn(2, [](World& world) {
    auto net = two_layers();
    Tensors all = net->parameters();
    // By their values, without a Ddp.
    if (world.rank() == 1) std::swap(all[0], all[2]);
    EXPECT_THAT(refused(world, all),
                AllOf(HasSubstr("[zero] the ranks' parameters differ. First difference, at "
                                "parameter 0:\n  rank 0 has float32 [6, 6] in group 0"),
                      HasSubstr("the same parameters in the same order")));
    all = net->parameters();
    if (world.rank() == 1) all.pop_back();
    EXPECT_THAT(refused(world, all),
                AllOf(HasSubstr("at parameter 3:"), HasSubstr("rank 1 has none there")));
    // Equal values are told apart by the Ddp that they belong to.
    const Ddp ddp(net, world.group());
    all = net->parameters();
    if (world.rank() == 1) std::swap(all[1], all[3]);
    EXPECT_THAT(refused(world, all),
                AllOf(HasSubstr("parameter 1 of Ddp 1"), HasSubstr("parameter 3 of Ddp 1")));
    EXPECT_EQ(refused(world, net->parameters()), "nothing");
  });
}

// A class of the program's own: what it makes of a part of a parameter cannot be known.
struct Centralised : torch::optim::Optimizer {
  Centralised(std::vector<torch::optim::OptimizerParamGroup> groups, SGDOptions options)
      : Optimizer(std::move(groups), std::make_unique<SGDOptions>(options)) {}
  at::Tensor step(LossClosure) override { return {}; }
};

TEST(ZeroMade, AnOptimizerOfAnotherClassIsWarnedOf) {
  spawn(2, [](World& world) {
    auto net = two_layers();
    const auto said = [&](const Group& group, const ZeroOptimizer::Make& make) {
      ::testing::internal::CaptureStderr();
      const ZeroOptimizer zero_optimizer(net->parameters(), group, make);
      return ::testing::internal::GetCapturedStderr();
    };
    const auto own = said(world.group(), zero<Centralised>(SGDOptions(0.1)));
    if (world.rank() == 0) {
      EXPECT_THAT(own, AllOf(HasSubstr("Centralised gets parts of the parameters"),
                             HasSubstr("treats every element by itself")));
    } else {
      EXPECT_EQ(own, "");
    }
    EXPECT_EQ(said(world.group(), zero<FusedSGD>(SGDOptions(0.1))), "");
    // One rank has whole parameters.
    EXPECT_EQ(said(Group(), zero<Centralised>(SGDOptions(0.1))), "");
  });
}

TEST(ZeroMade, WhatTheFunctionThrowsOnOneRankIsThrownOnAll) {
  spawn(2, [](World& world) {
    auto net = two_layers();
    const auto text = message_of([&] {
      ZeroOptimizer(net->parameters(), world.group(), [&](auto groups) {
        if (world.rank() == 1) throw std::runtime_error("no optimizer");
        return std::make_unique<torch::optim::SGD>(std::move(groups), SGDOptions(0.1));
      });
    });
    EXPECT_EQ(text, world.rank() == 1 ? "no optimizer" : "[zero] rank 1: no optimizer");
    EXPECT_EQ(refused(world, net->parameters()), "nothing");
  });
}

// Its step() fails on rank 1 with what is no std::exception.
struct Odd : torch::optim::SGD {
  Odd(std::vector<torch::optim::OptimizerParamGroup> groups, int own_rank)
      : SGD(std::move(groups), SGDOptions(0.1)), rank(own_rank) {}
  at::Tensor step(LossClosure) override {
    if (rank == 1) throw 7;
    return {};
  }
  int rank;
};

TEST(ZeroMade, WhatItsStepThrowsOnOneRankIsQuotedOnTheOthers) {
  spawn(2, [](World& world) {
    auto net = two_layers();
    ZeroOptimizer zero(net->parameters(), world.group(), [&](auto groups) {
      return std::make_unique<Odd>(std::move(groups), world.rank());
    });
    if (world.rank() == 1) {
      EXPECT_THROW(zero.step(), int);
    } else {
      EXPECT_THAT(message_of<CommError>([&] { zero.step(); }),
                  HasSubstr("[zero] rank 1: an exception that is not a std::exception"));
    }
  });
}

TEST(ZeroMade, WithAllGroups) {
  isolated([] {
    auto net = two_layers();
    const auto made_with = [&](const ZeroOptimizer::Make& make) {
      return message_of<ConfigError>([&] {
        ZeroOptimizer({torch::optim::OptimizerParamGroup({net->parameters()[0]}),
                       torch::optim::OptimizerParamGroup({net->parameters()[1]})},
                      World::solo(), make);
      });
    };
    EXPECT_THAT(made_with(nullptr), HasSubstr("the function that makes the optimizer is empty"));
    EXPECT_THAT(made_with([](auto) { return nullptr; }),
                HasSubstr("the 2 groups that it gets, and returned none"));
    EXPECT_THAT(made_with([](auto groups) {
                  groups.pop_back();
                  return std::make_unique<torch::optim::SGD>(std::move(groups), SGDOptions(0.1));
                }),
                HasSubstr("the 2 groups that it gets, and returned one with 1"));
  });
}

TEST(ZeroRanksDiffer, StridesGroupsAndOptions) {
  spawn(2, [](World& world) {
    const bool other = world.rank() == 1;
    at::Tensor matrix = torch::ones({3, 4});
    if (other) matrix = torch::ones({4, 3}).t();
    EXPECT_THAT(refused(world, {matrix}), HasSubstr("rank 1 has float32 [3, 4] in group 0 with "
                                                    "strides [1, 3]"));
    EXPECT_THAT(refused(world, {torch::ones({3})}, other ? 0.2 : 0.1),
                HasSubstr("[zero] the ranks' optimizers differ: rank 0 has group/0/lr = 0.1, rank "
                          "1 has group/0/lr = 0.2"));
  });
}

TEST(ZeroRanksDiffer, RatesThatChangedOnOneRank) {
  for (const bool share : {false, true}) {
    spawn(2, [&](World& world) {
      auto net = two_layers();
      Ddp ddp(net, world.group());
      ZeroOptimizer sgd(net->parameters(), world.group(), zero<FusedSGD>(SGDOptions(0.1)),
                        {.share_parameters = share});
      const auto step = [&](double rate) {
        sgd.param_groups()[0].options().set_lr(rate);
        ddp.zero_grad();
        net->forward(at::ones({2, 6})).sum().backward();
        sgd.step();
      };
      step(0.1);
      step(0.05);
      EXPECT_THAT(message_of<CommError>([&] { step(world.rank() == 1 ? 0.2 : 0.1); }),
                  AllOf(HasSubstr("zero: updated, rate 0.1, ZeroOptimizer 2"),
                        HasSubstr("the ranks' learning rates or other options differ")));
    });
  }
}

TEST(ZeroRanksDiffer, OtherMemoryOnOneRankAlone) {
  for (const bool share : {false, true}) {
    spawn(2, [&](World& world) {
      auto net = two_layers();
      Ddp ddp(net, world.group());
      ZeroOptimizer sgd(net->parameters(), world.group(), zero<torch::optim::SGD>(SGDOptions(0.1)),
                        {.share_parameters = share});
      net->forward(at::ones({2, 6})).sum().backward();
      const at::Tensor weight = net->parameters()[0];
      if (world.rank() == 1) weight.set_data(weight.detach().clone());
      EXPECT_THAT(message_of<CommError>([&] { sgd.step(); }),
                  AllOf(HasSubstr("zero: loaded"), HasSubstr("zero: updated"),
                        HasSubstr("alone gave parameters other memory (set_data, load))")));
    });
  }
}

TEST(Zero, RefusesWhatIsPutIntoState) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      auto net = two_layers();
      ZeroOptimizer sgd(net->parameters(), world.group(), zero<torch::optim::SGD>(SGDOptions(0.1)));
      net->forward(at::ones({2, 6})).sum().backward();
      const at::Tensor weight = net->parameters()[0], before = weight.detach().clone();
      sgd.state()[weight.unsafeGetTensorImpl()] = std::make_unique<torch::optim::SGDParamState>();
      EXPECT_THAT(message_of<ConfigError>([&] { sgd.step(); }),
                  HasSubstr("[zero] something was put into state()"));
      EXPECT_TRUE(at::equal(weight, before));
      sgd.state().clear();
      sgd.step();
      EXPECT_FALSE(at::equal(weight, before));
    });
  }
}

TEST(ZeroRanksDiffer, GradientsThatNoDdpAverages) {
  spawn(2, [](World& world) {
    auto net = two_layers();
    const at::Tensor scale = torch::ones({6}).requires_grad_();
    Ddp ddp(net, world.group());
    Tensors all = net->parameters();
    all.push_back(scale);
    ZeroOptimizer sgd(all, world.group(), zero<torch::optim::SGD>(SGDOptions(0.1)));
    const auto backward = [&] {
      sgd.zero_grad();
      (net->forward(at::full({2, 6}, world.rank() + 1.0)) * scale).square().mean().backward();
    };
    backward();
    const at::Tensor before = net->parameters()[0].detach().clone();
    EXPECT_THAT(message_of<ConfigError>([&] { sgd.step(); }),
                AllOf(HasSubstr("[zero] parameter 4 of shape [6] belongs to no Ddp"),
                      HasSubstr("give it an optimizer of its own")));
    EXPECT_TRUE(at::equal(net->parameters()[0], before));
    // The program may average them itself.
    backward();
    world.group().all_reduce(scale.mutable_grad(), ReduceOp::Average).wait();
    sgd.step();
    EXPECT_FALSE(at::equal(net->parameters()[0], before));
  });
}

}  // namespace
}  // namespace lockstep::test
