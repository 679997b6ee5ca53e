// An evaluation of a model that draws random numbers, as an autoencoder that samples its code.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>

#include "lanes/training.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::Folder;
using test::result_of;
using test::spawn;

// Noise in eval() too.
struct NoisyNetImpl : torch::nn::Module {
  NoisyNetImpl() { net = register_module("net", test::TrainNet()); }
  at::Tensor forward(const at::Tensor& x) { return call(net, x + 0.5 * torch::randn_like(x)); }
  test::TrainNet net{nullptr};
};
TORCH_MODULE(NoisyNet);

const data::TensorDataset& held_out() {
  static const auto samples = test::train_samples(31, 6);
  return samples;
}

// Parameters and buffers after the training, and the losses of its evaluations.
struct Trained {
  at::Tensor model;
  std::map<std::string, double> metrics;
};

Trained train_noisy(World& world, train::TrainerOptions options) {
  seed_everything(1, world);
  NoisyNet net;
  const auto samples = test::train_samples(113);
  train::Trainer trainer(world, net, train::cross_entropy(), samples, std::move(options));
  const auto outcome = trainer.run();
  return {test::flat(*net), outcome.state.metrics};
}

TEST(NoisyEvaluation, ChangesNothingOfTheTraining) {
  for (const char* feature : {"sgd", "lanes"}) {
    for (const int ranks : {1, 3}) {
      spawn(ranks, [&](World& world) {
        auto options = test::train_options({{feature}});
        const Trained without = train_noisy(world, options);
        options.evaluation = {.data = held_out(), .every_epochs = 1, .every_steps = 3};
        const Trained with = train_noisy(world, options);
        EXPECT_TRUE(at::equal(without.model, with.model))
            << feature << " on " << ranks
            << " ranks: " << (without.model - with.model).abs().max().item<double>();
      });
    }
  }
}

TEST(NoisyEvaluation, DrawsAnewAfterEachStepAndAlikeAfterOne) {
  spawn(2, [](World& world) {
    seed_everything(1, world);
    NoisyNet net;
    auto options = test::train_options({{"sgd"}});
    options.evaluation = {.data = held_out()};
    options.max_steps = 1;
    options.learning_rate = train::constant({.steps = 100});  // a first step that changes nothing
    net->eval();                                              // not even running statistics
    train::Trainer trainer(world, net, train::cross_entropy(), held_out(), options);
    const double before = trainer.evaluate().at("loss");
    EXPECT_EQ(trainer.evaluate().at("loss"), before);
    trainer.run();
    EXPECT_NE(trainer.evaluate().at("loss"), before);
    EXPECT_NEAR(trainer.evaluate().at("loss"), before, 0.5);
  });
}

TEST(NoisyEvaluation, IsTheSameOnAnyNumberOfRanksWithLanes) {
  const auto run = [](World& world) {
    auto options = test::train_options({{"lanes"}});
    options.evaluation = {.data = held_out(), .every_epochs = 1};
    const Trained trained = train_noisy(world, options);
    const uint64_t model = parallel::fingerprint(trained.model);
    const double loss = trained.metrics.at("loss");
    return test::chained(model, parallel::fingerprint(at::tensor({loss}, at::kDouble)));
  };
  const uint64_t alone = result_of({"auto", 1}, run);
  for (const int ranks : {2, 3, 4}) EXPECT_EQ(result_of({"auto", ranks}, run), alone) << ranks;
}

// A run that ends evaluates once more than one that goes on.
TEST(NoisyEvaluation, ARunThatWasStoppedGoesOnAsOneThatWasNot) {
  const Folder folder;
  const auto run = [&](const std::string& name, int64_t max_steps) {
    return [&folder, name, max_steps](World& world) {
      auto options = test::train_options({{"sgd"}});
      options.evaluation = {.data = held_out(), .every_epochs = 1};
      options.max_steps = max_steps;
      options.saving = {.directory = folder / name};
      return parallel::fingerprint(train_noisy(world, options).model);
    };
  };
  const uint64_t expected = result_of({"auto", 2}, run("calm", 0));
  result_of({"auto", 2}, run("stopped", 7));
  EXPECT_EQ(result_of({"auto", 2}, run("stopped", 0)), expected);
}

// Scaling belongs to both, augmentation to the training.
TEST(EvaluationTransforms, AreItsOwn) {
  for (const auto division :
       {test::Division::None, test::Division::Shared, test::Division::Gathered}) {
    spawn(3, [&](World& world) {
      seed_everything(1, world);
      test::TrainNet net;
      const at::Tensor x = at::arange(42, at::kFloat).view({7, 6});
      const data::TensorDataset samples(torch::cat({x, x}, 1), at::zeros({7}, at::kLong));
      // The model takes the half of what samples have.
      const data::Transform half = [](Batch batch) {
        return Batch{batch.data.narrow(1, 0, 6) / 42, batch.target};
      };
      const data::Transform noise = [](Sample sample) {
        return Sample{sample.data + torch::randn_like(sample.data), sample.target};
      };
      train::TrainerOptions options{.epochs = 1,
                                    .loader = {.batch_size = 3, .transforms = {half, noise}},
                                    .fsdp = test::divided(division)};
      options.evaluation = {
          .data = samples, .batch_size = 1, .transforms = {{half}}, .measure = [&](const Batch& b) {
            call(net, b.data);
            return std::map<std::string, double>{{"mean", b.data.mean().item<double>()}};
          }};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      EXPECT_NEAR(trainer.evaluate().at("mean"), x.mean().item<double>() / 42, 1e-6);
      trainer.run();
    });
  }
}

TEST(EvaluationTransforms, AreMissedWhereTheTrainingHasAny) {
  spawn(2, [](World& world) {
    test::TrainNet net;
    const auto samples = test::train_samples(20);
    const data::Transform scale = [](Batch batch) { return Batch{batch.data * 2, batch.target}; };
    train::TrainerOptions options{.epochs = 1, .loader = {.transforms = {scale}}};
    options.evaluation.data = samples;
    const auto warnings = [&] {
      testing::internal::CaptureStderr();
      { const train::Trainer trainer(world, net, train::cross_entropy(), samples, options); }
      return testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(warnings(), world.is_main() ? testing::HasSubstr("give Evaluation::transforms")
                                            : testing::HasSubstr(""));
    options.evaluation.transforms.emplace();
    EXPECT_EQ(warnings(), "");
  });
}

TEST(Modes, AModelInEvalIsWarnedOfAndAFrozenLayerIsNot) {
  spawn(2, [](World& world) {
    const auto samples = test::train_samples(20);
    const auto said = [&](bool whole) {
      test::TrainNet net;
      if (whole) {
        net->eval();
      } else {
        net->norm->eval();
      }
      train::Trainer trainer(world, net, train::cross_entropy(), samples, test::train_options({}));
      testing::internal::CaptureStderr();
      trainer.run();
      EXPECT_EQ(net->is_training(), !whole);
      return testing::internal::GetCapturedStderr();
    };
    const auto warning = testing::HasSubstr("[train] model is in eval()");
    EXPECT_THAT(said(false), testing::Not(warning));
    const std::string text = said(true);
    if (world.rank() == 0) {
      EXPECT_THAT(text, warning);
    } else {
      EXPECT_THAT(text, testing::Not(warning));
    }
  });
}

}  // namespace
}  // namespace lockstep
