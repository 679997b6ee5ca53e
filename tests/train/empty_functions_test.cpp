// What a Trainer would call is looked at before it starts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/lockstep.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/optimizer.h"
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
    EXPECT_THAT(message_of<ConfigError>([&] {
                  train::Trainer(world, {{.name = "net", .model = net}}, train::StepFunction(),
                                 samples, {.epochs = 1});
                }),
                HasSubstr("the step is an empty function"));
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
