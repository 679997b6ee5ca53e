// Layers that are trained from a later epoch on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::Division;
using test::flat;
using test::Folder;
using test::message_of;
using test::spawn;
using test::TrainNet;
using testing::HasSubstr;
using train::RunState;

void train_first_layer(TrainNet& net, bool trained) {
  for (auto& parameter : net->first->parameters()) parameter.requires_grad_(trained);
}

// As docs/trainer.md has it.
struct FromSecondEpoch : train::Callback {
  explicit FromSecondEpoch(TrainNet of) : net(std::move(of)) {}
  void on_epoch_begin(const RunState& state) override { train_first_layer(net, state.epoch >= 1); }
  void on_step_end(const RunState& state, train::Requests& requests) override {
    if (state.step == stop_at) requests.stop();
  }
  TrainNet net;
  int64_t stop_at = -1;
};

struct Kind {
  bool zero;
  Division division;
};

train::TrainerOptions options_of(const Kind& kind, const std::shared_ptr<FromSecondEpoch>& callback,
                                 const std::string& directory) {
  auto options = test::train_options({});
  options.zero = kind.zero;
  options.fsdp = test::divided(kind.division);
  options.callbacks = {callback};
  options.saving = {.directory = directory};
  return options;
}

at::Tensor trained(World& world, const Kind& kind, int64_t epochs, const std::string& directory,
                   int64_t stop_at = -1) {
  seed_everything(1, world);
  TrainNet net;
  const auto samples = test::train_samples(40);
  const auto callback = std::make_shared<FromSecondEpoch>(net);
  callback->stop_at = stop_at;
  auto options = options_of(kind, callback, directory);
  options.epochs = epochs;
  train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
  trainer.run();
  if (trainer.fsdp() != nullptr) trainer.fsdp()->unshard();
  if (epochs == 1) return flat(*net->first).clone();
  return flat(*net).clone();
}

TEST(FrozenLayers, AreTrainedFromALaterEpochOnAlsoAfterResuming) {
  for (const Kind& kind : {Kind{false, Division::None}, Kind{true, Division::None},
                           Kind{false, Division::Shared}, Kind{false, Division::Gathered}}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      seed_everything(1, world);
      const at::Tensor first = flat(*TrainNet()->first).clone();
      EXPECT_TRUE(at::equal(trained(world, kind, 1, folder / "one"), first));
      const at::Tensor whole = trained(world, kind, 2, folder / "whole");
      EXPECT_FALSE(at::equal(whole.narrow(0, 0, first.numel()), first));
      for (const int64_t step : {1, 5}) {  // of 4 an epoch
        const std::string directory = folder / std::to_string(step);
        trained(world, kind, 2, directory, step);
        EXPECT_TRUE(at::equal(trained(world, kind, 2, directory), whole)) << step;
      }
    });
  }
}

TEST(FrozenLayers, ThatWereSoForTheTrainerStaySo) {
  for (const auto division : {Division::None, Division::Shared}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      seed_everything(1, world);
      TrainNet net;
      train_first_layer(net, false);
      const auto samples = test::train_samples(40);
      train::Trainer trainer(
          world, net, train::cross_entropy(), samples,
          options_of({false, division}, std::make_shared<FromSecondEpoch>(net), folder / "run"));
      EXPECT_THAT(message_of<ConfigError>([&] { trainer.run(); }),
                  HasSubstr("A Trainer attaches once, when it is constructed: make what a callback "
                            "unfreezes later trainable before that, and freeze it in "
                            "on_epoch_begin() (docs/trainer.md)"));
    });
  }
}

}  // namespace
}  // namespace lockstep
