// An optimizer of a program's own class is tracked by a function of the program's, as
// docs/resuming.md shows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "checkpoint/model.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/stateful.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

// As in a program, outside of the library's namespace.
namespace own_optimizer {
namespace {

using lockstep::checkpoint::Names;
using lockstep::checkpoint::piece_of_parameter;
using lockstep::checkpoint::State;
using lockstep::checkpoint::Stateful;

// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
class Lion : public torch::optim::Optimizer {
 public:
  explicit Lion(std::vector<at::Tensor> parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(0.01)) {}

  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (const auto& p : param_groups()[0].params()) {
      at::Tensor& m = moment(p);
      p.sub_(param_groups()[0].options().get_lr() * at::sign(0.9 * m + 0.1 * p.grad()));
      m.mul_(0.99).add_(0.01 * p.grad());
    }
    return {};
  }

  // Zeros before the first step.
  at::Tensor& moment(const at::Tensor& parameter) {
    at::Tensor& found = moments_[parameter.unsafeGetTensorImpl()];
    if (!found.defined()) found = at::zeros_like(parameter).detach();
    return found;
  }

 private:
  std::map<const at::TensorImpl*, at::Tensor> moments_;
};

std::shared_ptr<Stateful> stateful(Lion& lion) {
  struct Moments : Stateful {
    explicit Moments(Lion& l) : lion(l) {}
    State state(const Names& names) const override {
      State all{.values = {{"lr", lion.param_groups()[0].options().get_lr()}}};
      for (const auto& p : lion.param_groups()[0].params()) {
        all.pieces.push_back(
            piece_of_parameter("moment/" + names.of(p).value(), p, lion.moment(p)));
      }
      return all;
    }
    void restored(const State& saved) override {
      lion.param_groups()[0].options().set_lr(
          lockstep::checkpoint::value_of<double>(saved.values, "lr"));
    }
    Lion& lion;
  };
  return std::make_shared<Moments>(lion);
}

}  // namespace
}  // namespace own_optimizer

namespace lockstep::test {
namespace {

using own_optimizer::Lion;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(OwnOptimizer, GoesOnAsIfNothingHadBeenOnAnotherNumberOfRanks) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net;
    Lion lion(net.trained());
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.track("lion", lion);
    train(net, lion, 2);
    checkpoints.save(2);
  });
  isolated([&] {
    Everything net, expected;
    Lion lion(net.trained()), other(expected.trained());
    lion.param_groups()[0].options().set_lr(1);
    Checkpointer checkpoints(World::solo(), folder.path());
    checkpoints.track("net", net);
    checkpoints.track("lion", lion);
    EXPECT_EQ(checkpoints.restore_latest()->step, 2);
    train(net, lion, 2);
    train(expected, other, 4);
    EXPECT_TRUE(same(net, expected));
  });
}

// Derived from one of libtorch's, with states of its own in the place of that one's.
struct SignState : torch::optim::OptimizerCloneableParamState<SignState> {
  at::Tensor moment;
};

struct SignSgd : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (const auto& p : param_groups()[0].params()) {
      auto& own = state()[p.unsafeGetTensorImpl()];
      if (own == nullptr) own = std::make_unique<SignState>();
      at::Tensor& moment = static_cast<SignState&>(*own).moment;
      if (!moment.defined()) moment = at::zeros_like(p);
      moment.mul_(0.9).add_(p.grad());
      p.sub_(0.01 * moment.sign());
    }
    return {};
  }
};

struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {};

// Those of libtorch's class, and one more.
struct PowerOptions : torch::optim::AdamOptions {
  double power = 2;
};

template <class Options>
struct SignAdam : torch::optim::Adam {
  explicit SignAdam(const std::vector<at::Tensor>& parameters) : Adam(parameters) {
    param_groups()[0].set_options(std::make_unique<Options>());
  }
};

// It says itself what is saved of it.
struct SavedSgd : torch::optim::SGD, checkpoint::Stateful {
  using SGD::SGD;
  checkpoint::State state(const checkpoint::Names&) const override {
    return {.values = {{"calls", int64_t{7}}}};
  }
};

TEST(OwnOptimizer, WhatADerivedOneKeepsInsteadOfItsBasesIsNotLostUnsaid) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net;
    SignSgd sgd(net.trained(), torch::optim::SGDOptions(0.1));
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.track("sgd", sgd);
    train(net, sgd, 1);
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.save(1); }),
                AllOf(HasSubstr("SignSgd cannot be tracked as the one of libtorch"),
                      HasSubstr("SignState, which would be lost"), HasSubstr("stateful()")));
    SignAdam<SignOptions> adam(net.trained());
    EXPECT_THAT(message_of<ConfigError>([&] { checkpoints.track("adam", adam); }),
                HasSubstr("SignOptions, which would be lost"));
    SignAdam<PowerOptions> power(net.trained());
    EXPECT_THAT(message_of<ConfigError>([&] { checkpoints.track("power", power); }),
                HasSubstr("PowerOptions, which would be lost"));
    ZeroOptimizer zero(net.trained(), world,
                       parallel::zero<SignSgd>(torch::optim::SGDOptions(0.1)));
    Checkpointer divided(world, folder / "zero");
    divided.track("net", net);
    divided.track("zero", zero);
    zero.zero_grad();
    net.loss().backward();
    zero.step();
    EXPECT_THAT(message_of<CheckpointError>([&] { divided.save(1); }),
                AllOf(HasSubstr("SignState, which would be lost"),
                      HasSubstr("use it without ZeroOptimizer"), Not(HasSubstr("stateful()"))));
    const auto lion = [](const auto& groups) { return std::make_unique<Lion>(groups[0].params()); };
    ZeroOptimizer lions(net.trained(), world, lion);
    EXPECT_THAT(message_of<ConfigError>([&] { divided.track("lions", lions); }),
                AllOf(HasSubstr("Lion cannot be tracked"),
                      HasSubstr("use it without ZeroOptimizer"), Not(HasSubstr("stateful()"))));
    Everything other;
    ZeroOptimizer own(other.trained(), world,
                      parallel::zero<SavedSgd>(torch::optim::SGDOptions(0.1)));
    EXPECT_THAT(message_of<ConfigError>([&] { divided.track("own", own); }),
                AllOf(HasSubstr("SavedSgd says itself what is saved of it"),
                      HasSubstr("without ZeroOptimizer")));
  });
}

TEST(OwnOptimizer, WhatIsNoElementOfTheParameterIsRefused) {
  const at::Tensor parameter = at::zeros({4, 3});
  const auto refused = [&](const at::Tensor& values) {
    return message_of<ConfigError>(
        [&] { checkpoint::piece_of_parameter("m/w", parameter, values); });
  };
  EXPECT_THAT(refused(at::zeros({4})),
              HasSubstr("m/w: [4] in the place of the parameter's [4, 3]"));
  EXPECT_THAT(refused(at::zeros({3, 4})), HasSubstr("whole_piece()"));
  EXPECT_THAT(refused(at::Tensor()), HasSubstr("m/w: an undefined tensor"));
  spawn(2, [](World& world) {
    torch::nn::Linear net(3, 5);
    const Fsdp fsdp(net, world);
    const at::Tensor part = fsdp.parameters()[0];
    EXPECT_THAT(message_of<ConfigError>([&] {
                  checkpoint::piece_of_parameter("m/w", part, at::zeros({part.numel() + 1}));
                }),
                HasSubstr("in the place of the parameter's"));
  });
}

}  // namespace
}  // namespace lockstep::test
