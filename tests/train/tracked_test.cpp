// What a program gives to Trainer::track(): it goes on with the run, each in the way that
// Checkpointer::track() takes it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

// A model, a target that follows it, a queue of this rank's samples, and noise of this rank's own.
struct Following {
  explicit Following(const World& world)
      : noise(at::make_generator<at::CPUGeneratorImpl>(30 + world.rank())) {
    target->eval();
    teacher->eval();
  }
  at::Tensor loss(const data::Batch& batch) {
    const at::Tensor x = batch.data + 0.1 * at::randn(batch.data.sizes(), noise);
    queue.copy_(torch::cat({x, queue}).narrow(0, 0, queue.size(0)));
    const at::Tensor wanted = (target->forward(queue) + teacher->forward(queue)).detach();
    const at::Tensor loss = torch::nn::functional::cross_entropy(call(net, x), batch.target) +
                            at::mse_loss(call(net, queue), wanted);
    const at::NoGradGuard no_grad;
    const auto from = net->parameters(), to = target->parameters();
    for (size_t i = 0; i < to.size(); ++i) to[i].lerp_(from[i], 0.1);
    const auto others = teacher->parameters();
    for (size_t i = 0; i < to.size(); ++i) others[i].lerp_(to[i], 0.1);
    return loss;
  }

  TrainNet net, target;
  std::shared_ptr<TrainNetImpl> teacher = std::make_shared<TrainNetImpl>();
  at::Generator noise;
  at::Tensor queue = at::zeros({8, 6});
};

// Six steps of each rank's samples; returns all that they have changed.
at::Tensor run_following(const World& world, const data::TensorDataset& samples,
                         const std::string& directory, int64_t steps,
                         std::vector<std::string> each_rank = {"queue"}) {
  torch::manual_seed(1);
  Following all(world);
  auto options = train_options({});
  options.epochs = 0;
  options.max_steps = steps;
  options.saving = {.directory = directory, .each_rank = std::move(each_rank)};
  train::Trainer trainer(
      world, all.net, [&](const data::Batch& batch) { return all.loss(batch); }, samples, options);
  trainer.track("target", all.target);
  trainer.track("teacher", all.teacher);
  trainer.track("noise", all.noise);
  trainer.track("queue", all.queue);
  trainer.run();
  return torch::cat(
      {flat(*all.net), flat(*all.target), flat(*all.teacher), all.queue.to(at::kDouble).flatten()});
}

TEST(TrackedByATrainer, ModulesGeneratorsAndTensorsOfEachRankGoOn) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto samples = train_samples(60);
    const at::Tensor whole = run_following(world, samples, "", 6);
    run_following(world, samples, folder / "run", 3);
    EXPECT_TRUE(at::equal(run_following(world, samples, folder / "run", 6), whole));
  });
}

TEST(TrackedByATrainer, ATensorOfEachRankThatIsNotNamedIsToldHow) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto samples = train_samples(60);
    EXPECT_THAT(
        message_of<CheckpointError>([&] { run_following(world, samples, folder / "run", 3, {}); }),
        HasSubstr("of a Trainer: in Saving::each_rank"));
  });
}

TEST(TrackedByATrainer, PatternsThatDifferBetweenRanksAreRefused) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto samples = train_samples(60);
    const std::vector<std::string> own = {"queue" + std::to_string(world.rank())};
    EXPECT_THAT(
        message_of<ConfigError>([&] { run_following(world, samples, folder / "run", 3, own); }),
        HasSubstr("saving.each_rank"));
  });
}

// max_time counts from run() on, and large checkpoints take long to read.
TEST(Tracked, WhatTakesLongToRestoreTakesItOffTheTimeLimit) {
  constexpr std::chrono::milliseconds kLimit{3000};
  const Folder folder;
  const auto run = [&](const std::vector<int64_t>& max_steps, bool is_slow) {
    spawn(2, [&](World& world) {
      TrainNet net;
      auto options = train_options({});
      options.epochs = 0;
      options.max_steps = max_steps[0];
      options.max_time = is_slow ? kLimit : std::chrono::milliseconds{0};
      options.saving = {.directory = folder / "run"};
      const auto samples = train_samples(40);
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      trainer.track("slow", checkpoint::stateful_values(
                                [] {
                                  return checkpoint::Values{{"value", int64_t{1}}};
                                },
                                [&](const checkpoint::Values&) {
                                  const auto until = std::chrono::steady_clock::now() + kLimit;
                                  while (std::chrono::steady_clock::now() < until) {
                                  }
                                }));
      const auto outcome = trainer.run();
      EXPECT_EQ(outcome.state.step, max_steps[1]);
      EXPECT_EQ(outcome.ended == train::Ended::TimeLimit, is_slow);
    });
  };
  run({2, 2}, false);
  run({9, 3}, true);
}

}  // namespace
}  // namespace lockstep::test
