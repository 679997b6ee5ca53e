// A Trainer with an optimizer of the program's own class, which says itself what is saved of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep::test {
namespace {

struct MomentOptions : torch::optim::OptimizerCloneableOptions<MomentOptions> {
  double get_lr() const override { return lr; }
  void set_lr(const double rate) override { lr = rate; }
  double lr = 0.05;
};

// SGD with momentum.
class Moments : public torch::optim::Optimizer {
 public:
  explicit Moments(std::vector<torch::optim::OptimizerParamGroup> groups)
      : Optimizer(std::move(groups), std::make_unique<MomentOptions>()) {}

  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (const auto& p : param_groups()[0].params()) {
      if (!p.grad().defined()) continue;
      at::Tensor& m = moment(p);
      m.mul_(0.9).add_(p.grad());
      p.sub_(m, param_groups()[0].options().get_lr());
    }
    return {};
  }

 protected:
  at::Tensor& moment(const at::Tensor& parameter) const {
    at::Tensor& found = moments_[parameter.unsafeGetTensorImpl()];
    if (!found.defined()) found = at::zeros_like(parameter).detach();
    return found;
  }

 private:
  mutable std::map<const at::TensorImpl*, at::Tensor> moments_;
};

class SavedMoments : public Moments, public checkpoint::Stateful {
 public:
  using Moments::Moments;
  checkpoint::State state(const checkpoint::Names& names) const override {
    checkpoint::State all{.values = {{"lr", param_groups()[0].options().get_lr()}}};
    for (const auto& p : param_groups()[0].params()) {
      all.pieces.push_back(
          checkpoint::piece_of_parameter("moment/" + names.of(p).value(), p, moment(p)));
    }
    return all;
  }
  void restored(const checkpoint::State& saved) override {
    param_groups()[0].options().set_lr(checkpoint::value_of<double>(saved.values, "lr"));
  }
};

template <class Kind>
train::TrainerOptions options_with(const std::string& directory, int64_t steps) {
  auto options = train_options({});
  options.epochs = 0;
  options.max_steps = steps;
  options.optimizer = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<Kind>(std::move(groups));
  };
  options.saving.directory = directory;
  return options;
}

// How each half of a run keeps the model.
struct Halves {
  const char* name;
  Division first, second;
  int shard_ranks = 0;  // of an Fsdp; 1: each rank has all shards, and one of them saves
};
class OwnOptimizerOfATrainer : public testing::TestWithParam<Halves> {};
INSTANTIATE_TEST_SUITE_P(, OwnOptimizerOfATrainer,
                         testing::Values(Halves{"Ddp", Division::None, Division::None},
                                         Halves{"DdpThenFsdp", Division::None, Division::Gathered},
                                         Halves{"FsdpThenDdp", Division::Shared, Division::None},
                                         Halves{"CopiesThenCopies", Division::Gathered,
                                                Division::Gathered, 1}),
                         [](const auto& test) { return test.param.name; });

TEST_P(OwnOptimizerOfATrainer, GoesOnAsOneThatWasNotStopped) {
  const auto [name, first, second, shard_ranks] = GetParam();
  const Folder folder;
  spawn(2, [&, first = first, second = second, shard_ranks = shard_ranks](World& world) {
    const auto samples = train_samples(60);
    const auto run = [&](const std::string& directory, int64_t steps, Division division) {
      torch::manual_seed(1);
      TrainNet net;
      auto options = options_with<SavedMoments>(directory, steps);
      options.fsdp = divided(division);
      if (options.fsdp) options.fsdp->shard_ranks = shard_ranks;
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      trainer.run();
      if (auto* fsdp = trainer.fsdp()) fsdp->unshard();
      return flat(*net);
    };
    const at::Tensor whole = run("", 6, Division::None);
    run(folder / "run", 3, first);
    EXPECT_TRUE(at::equal(run(folder / "run", 6, second), whole));
  });
}

TEST(OwnOptimizerInATrainer, ThatCannotBeSavedIsToldHow) {
  const Folder folder;
  spawn(2, [&](World& world) {
    TrainNet net;
    const auto samples = train_samples(60);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  train::Trainer(world, net, train::cross_entropy(), samples,
                                 options_with<Moments>(folder / "run", 3));
                }),
                testing::HasSubstr("or derive the class from checkpoint::Stateful, too"));
  });
}

}  // namespace
}  // namespace lockstep::test
