// What a Trainer would call is looked at before it starts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "lockstep/lockstep.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/metric.h"
#include "lockstep/train/optimizer.h"
#include "lockstep/train/registry.h"
#include "lockstep/train/schedule.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep {
namespace {

using test::message_of;
using testing::HasSubstr;

TEST(Trainer, EmptyFunctionsAreRefused) {
  test::spawn(1, [](World& world) {
    const data::TensorDataset samples(torch::ones({4, 2}), torch::zeros({4}, torch::kLong));
    const torch::nn::Sequential net(torch::nn::Linear(2, 2));
    const auto refused = [&](const train::Loss& loss, const train::TrainerOptions& options) {
      return message_of<ConfigError>([&] { train::Trainer(world, net, loss, samples, options); });
    };
    EXPECT_THAT(refused({}, {.epochs = 1}), HasSubstr("the loss is an empty function"));
    EXPECT_THAT(refused(train::cross_entropy(), {.optimizer = nullptr, .epochs = 1}),
                HasSubstr("part 'model' has no optimizer"));
    EXPECT_THAT(refused(train::cross_entropy(), {.epochs = 1, .callbacks = {nullptr}}),
                HasSubstr("callbacks[0] is empty"));
    EXPECT_THAT(refused(train::cross_entropy(),
                        {.epochs = 1, .evaluation = {.data = samples, .metrics = {nullptr}}}),
                HasSubstr("evaluation.metrics[0] is empty"));
    const auto make_none = [](auto) { return std::unique_ptr<torch::optim::Optimizer>(); };
    EXPECT_THAT(refused(train::cross_entropy(), {.optimizer = make_none, .epochs = 1}),
                HasSubstr("the function that makes the optimizer of part 'model' returned none"));
    EXPECT_THAT(
        refused(train::cross_entropy(), {.optimizer = make_none, .epochs = 1, .zero = true}),
        HasSubstr("has to give it the 1 groups that it gets, and returned none"));
    EXPECT_THAT(refused(train::cross_entropy(),
                        {.groups =
                             [](torch::nn::Module&) {
                               return std::vector<torch::optim::OptimizerParamGroup>();
                             },
                         .epochs = 1}),
                HasSubstr("TrainerOptions::groups gives no group"));
    EXPECT_THAT(refused(train::cross_entropy(),
                        {.learning_rate = train::follow(Schedule{}, {.steps = 3}), .epochs = 1}),
                HasSubstr("the schedule has no function of the rate"));
    EXPECT_THAT(
        message_of<ConfigError>([] { train::follow(std::function<Schedule(int64_t steps)>()); }),
        HasSubstr("follow() was given an empty function"));
    torch::nn::Linear plain(2, 2);
    EXPECT_THAT(message_of<ConfigError>([&] { update_batch_norm(*plain, world, nullptr); }),
                HasSubstr("the function that takes batches is empty"));
    EXPECT_THAT(message_of<ConfigError>(
                    [&] { ZeroOptimizer(net->parameters(), world, ZeroOptimizer::Make()); }),
                HasSubstr("the function that makes the optimizer is empty"));
    EXPECT_THAT(message_of<ConfigError>([&] {
                  train::Trainer(world, {{.name = "net", .model = net}}, train::StepFunction(),
                                 samples, {.epochs = 1});
                }),
                HasSubstr("the step is an empty function"));
  });
}

// A metric whose name is none of its values.
struct Unnamed : train::Metric {
  std::string name() const override { return "precision"; }
  void update(const at::Tensor&, const at::Tensor&, const at::Tensor&) override {
    begin_update();
    state_.sums = {1};
  }
  std::map<std::string, double> values_of(const train::MetricState&) const override {
    return {{"recall", 1}};
  }
};

TEST(Functions, ThatReturnNothingAreNamed) {
  test::spawn(1, [](World& world) {
    Unnamed metric;
    metric.update({}, {}, {});
    EXPECT_THAT(message_of<ConfigError>([&] { metric.compute(); }),
                HasSubstr("[precision] values_of() gives no value of that name"));
    train::Registry registry;
    registry.add_model("own", [](const auto&, const auto&) { return train::Model(); });
    registry.add_data("own", [](const auto&, const auto&) { return train::RunData(); });
    train::RunConfig config;
    config.model.kind = config.data.kind = "own";
    EXPECT_THAT(message_of<ConfigError>([&] { registry.model(config, {}); }),
                HasSubstr("the function of model.kind 'own' returned none"));
    EXPECT_THAT(message_of<ConfigError>([&] { registry.data(config, world); }),
                HasSubstr("the function of data.kind 'own' returned none to train on"));
  });
}

TEST(Trainer, NothingIsTrackedAfterTheRun) {
  test::spawn(1, [](World& world) {
    const data::TensorDataset samples(torch::ones({4, 2}), torch::zeros({4}, torch::kLong));
    const torch::nn::Sequential net(torch::nn::Linear(2, 2));
    train::Trainer trainer(world, net, train::cross_entropy(), samples, {.epochs = 1});
    trainer.run();
    int64_t late = 1;
    EXPECT_THAT(message_of<ConfigError>([&] { trainer.track("late", late); }),
                HasSubstr("track() of late after run()"));
  });
}

TEST(Optimizer, NumbersThatLibtorchRefusesAreRefused) {
  test::isolated([] {
    const auto refused = [](const train::MakeOptimizer& make) {
      return message_of<ConfigError>([&] {
        make({torch::optim::OptimizerParamGroup({torch::ones({1}).requires_grad_(true)})});
      });
    };
    EXPECT_THAT(refused(train::sgd({.lr = -1})), HasSubstr("Invalid learning rate: -1"));
    EXPECT_THAT(refused(train::adam({.beta1 = 2})), HasSubstr("[train] optimizer: "));
    EXPECT_THAT(refused(train::adamw({.eps = -1})), HasSubstr("Invalid epsilon value: -1"));
  });
}

}  // namespace
}  // namespace lockstep
