// A Trainer that averages weights trains as one that does not, and evaluates the averages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/directory.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "train/net.h"
#include "train/printed.h"

namespace lockstep {
namespace {

using test::flat;
using test::Folder;
using test::spawn;
using testing::AllOf;
using testing::HasSubstr;

// What a callback of an evaluation sees.
struct SeenAtEvaluation : train::Callback {
  explicit SeenAtEvaluation(const test::TrainNet& of) : net(of) {}
  void on_evaluate(const train::RunState&, train::Requests&) override { model = flat(*net); }
  test::TrainNet net;
  at::Tensor model;
};

at::Tensor together(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(tensor.to(at::kDouble).flatten());
  return torch::cat(all);
}

TEST(AveragedTraining, EvaluatesTheAveragesAndTrainsAsWithout) {
  spawn(2, [](World& world) {
    const auto samples = test::train_samples(113), held_out = test::train_samples(31, 6);
    const auto options_with = [&](bool average) {
      auto options = test::train_options({{"clip", average ? "average" : "plain"}});
      options.evaluation = {.data = held_out, .every_steps = 3};
      return options;
    };
    seed_everything(1, world);
    test::TrainNet plain;
    train::Trainer usual(world, plain, train::cross_entropy(), samples, options_with(false));
    const auto expected = usual.run();
    EXPECT_EQ(usual.average(), nullptr);

    seed_everything(1, world);
    test::TrainNet net;
    auto options = options_with(true);
    const auto seen = std::make_shared<SeenAtEvaluation>(net);
    options.callbacks = {seen};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    const auto found = trainer.run();
    EXPECT_TRUE(at::equal(flat(*net), flat(*plain)));
    EXPECT_NE(found.state.metrics, expected.state.metrics);
    EXPECT_EQ(trainer.average()->updates(), found.state.step);
    // Parameters and buffers, in one order.
    EXPECT_TRUE(at::equal(seen->model, together(trainer.average()->averages())));
    EXPECT_EQ(trainer.evaluate(), found.state.metrics);
    const auto applied = trainer.average()->apply();
    EXPECT_EQ(trainer.evaluate(), found.state.metrics);  // as it is applied already
    EXPECT_TRUE(at::equal(flat(*net), seen->model));
  });
}

// The weights after each step, averaged by hand.
struct AveragedByHand : train::Callback {
  AveragedByHand(const test::TrainNet& of, std::function<double(int64_t)> decay)
      : net(of), decay_of(std::move(decay)) {}
  void on_step_end(const train::RunState&, train::Requests&) override {
    const double decay = before == 0 ? 0 : decay_of(before);
    const at::Tensor now = flat(*net);
    average = before == 0 ? now : decay * average + (1 - decay) * now;
    ++before;
  }
  test::TrainNet net;
  std::function<double(int64_t)> decay_of;
  at::Tensor average;
  int64_t before = 0;
};

TEST(AveragedTraining, HasADecayThatChangesAlsoWhereItResumes) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto decay_of = [](int64_t n) { return std::min(0.9, 1 - std::pow(1.0 + n, -0.75)); };
    const auto trained = [&](const char* name, int64_t steps, const auto& check) {
      seed_everything(1, world);
      test::TrainNet net;
      auto options = test::train_options({{"sgd"}});
      options.weight_average = WeightAverageOptions{.decay = 0.5, .decay_of = decay_of};
      options.epochs = 0;
      options.max_steps = steps;
      options.saving = {.directory = folder / name};
      const auto by_hand = std::make_shared<AveragedByHand>(net, decay_of);
      options.callbacks = {by_hand};
      train::Trainer trainer(world, net, train::cross_entropy(), test::train_samples(113), options);
      trainer.run();
      const at::Tensor average = together(trainer.average()->averages());
      check(average, by_hand->average);
      return average;
    };
    const auto ignore = [](const at::Tensor&, const at::Tensor&) {};
    const at::Tensor whole =
        trained("whole", 9, [](const at::Tensor& average, const at::Tensor& by_hand) {
          // Of BatchNorm's counter the average is what it was last.
          EXPECT_TRUE(at::allclose(average.slice(0, 0, -1), by_hand.slice(0, 0, -1), 1e-5, 1e-6));
        });
    trained("parts", 4, ignore);
    EXPECT_TRUE(at::equal(trained("parts", 9, ignore), whole));
  });
}

// A rate at which the later ones are worse.
TEST(AveragedTraining, TheAveragesOfTheBestCheckpointComeBack) {
  const Folder folder;
  spawn(2, [&](World& world) {
    seed_everything(1, world);
    test::TrainNet net;
    auto options = test::train_options({{"average"}});
    options.optimizer = train::sgd({.lr = 0.8});
    options.epochs = 30;
    options.evaluation = {.data = test::train_samples(31, 6), .every_epochs = 0, .every_steps = 3};
    options.early_stopping = train::EarlyStopping{.patience = 2};
    options.saving = {.directory = folder / "run", .best = train::Best{.restore_at_end = true}};
    train::Trainer trainer(world, net, train::cross_entropy(), test::train_samples(113), options);
    const auto outcome = trainer.run();
    double saved = 0;
    for (const auto& one : checkpoint::list_checkpoints(folder / "run").checkpoints) {
      if (outcome.best.ends_with(one.name)) saved = one.metrics.at("loss");
    }
    ASSERT_LT(saved, outcome.state.metrics.at("loss"));
    EXPECT_EQ(trainer.evaluate().at("loss"), saved);
  });
}

TEST(AveragedTraining, BeginsWithACheckpointThatHasNoAverages) {
  const Folder folder;
  const auto trained = [&](World& world, bool average, int64_t steps) {
    seed_everything(1, world);
    test::TrainNet net;
    const auto samples = test::train_samples(113);
    auto options = test::train_options({{average ? "average" : "plain"}});
    options.epochs = 0;
    options.max_steps = steps;
    options.saving = {.directory = folder / "run"};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    trainer.run();
    return average ? trainer.average()->updates() : 0;
  };
  spawn(2, [&](World& world) { trained(world, false, 4); });
  spawn(1, [&](World& world) { EXPECT_EQ(trained(world, true, 6), 2); });
  spawn(2, [&](World& world) { EXPECT_EQ(trained(world, true, 9), 5); });  // has them by then
}

TEST(AveragedTraining, IsConfigured) {
  const Folder folder;
  auto config = test::small_run(folder / "plain");
  test::printed(2, config);
  config.weight_average = {.kind = "swa", .start_step = 10, .every_steps = 2};
  config.logging.output_dir = folder / "averaged";
  EXPECT_THAT(test::printed(2, config), HasSubstr("evaluated with averaged weights: SWA\n"));
  const auto result_of_run = [&](const char* name) {
    return nlohmann::json::parse(test::contents(folder / name + "/result.json"));
  };
  const auto plain = result_of_run("plain"), averaged = result_of_run("averaged");
  EXPECT_EQ(plain["train_loss"], averaged["train_loss"]);
  EXPECT_NE(plain["metrics"], averaged["metrics"]);
  EXPECT_THAT(
      test::contents(folder / "averaged/config.yaml"),
      AllOf(HasSubstr("weight_average:\n"), HasSubstr("kind: swa"), HasSubstr("start_step: 10")));
}

}  // namespace
}  // namespace lockstep
