// An optimizer of a program's own class is tracked by a function of the program's, as
// docs/resuming.md shows.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "checkpoint/model.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "support/folder.h"
#include "support/spawn.h"

// As in a program, outside of the library's namespace.
namespace own_optimizer {
namespace {

using lockstep::checkpoint::Names;
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
            lockstep::checkpoint::whole_piece("moment/" + names.of(p).value(), lion.moment(p)));
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

}  // namespace
}  // namespace lockstep::test
