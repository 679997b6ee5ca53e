// A Trainer whose model is divided does what it does with Ddp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/directory.h"
#include "lockstep/train/metrics.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::divided;
using test::Division;
using test::Features;
using test::flat;
using test::Folder;
using test::message_of;
using test::spawn;
using test::TrainNet;
using testing::HasSubstr;
using train::Trainer;
using train::TrainerOptions;

// What a training leaves.
struct Left {
  at::Tensor model;
  std::map<std::string, double> metrics;
  int64_t skipped = 0;
  std::string best;
};

Left trained(World& world, TrainerOptions options, Division division) {
  seed_everything(1, world);
  TrainNet net;
  const auto samples = test::train_samples(113);
  options.fsdp = divided(division);
  Trainer trainer(world, net, train::cross_entropy(), samples, options);
  const auto outcome = trainer.run();
  if (auto* const fsdp = trainer.fsdp()) {
    EXPECT_EQ(fsdp->shares_memory(), division == Division::Shared || world.size() == 1);
    fsdp->unshard();
  }
  return {flat(*net).clone(), outcome.state.metrics, outcome.state.skipped, outcome.best};
}

class DividedTraining : public testing::TestWithParam<Features> {};

INSTANTIATE_TEST_SUITE_P(Features, DividedTraining,
                         testing::Values(Features{}, Features{{"accumulation", "cosine", "sgd"}},
                                         Features{{"accumulation", "fp16", "sync_bn"}},
                                         Features{{"average", "bf16", "scaling", "drop_last"}}),
                         [](const auto& test) { return test.param.text(); });

// 31 samples over 2 and 3 ranks, 5 a batch: some ranks make fewer calls than others.
TEST_P(DividedTraining, HasTheBitsOfDdpAndItsEvaluations) {
  static const auto held_out = test::train_samples(31, 6);
  for (const int ranks : {1, 2, 3}) {
    spawn(ranks, [&](World& world) {
      auto options = test::train_options(GetParam());
      const auto counted = [&] {
        options.evaluation = {.data = held_out, .metrics = {std::make_shared<Accuracy>()}};
        return options;
      };
      const Left plain = trained(world, counted(), Division::None);
      for (const auto division : {Division::Shared, Division::Gathered}) {
        const Left found = trained(world, counted(), division);
        EXPECT_TRUE(at::equal(found.model, plain.model))
            << ranks << " ranks: " << (found.model - plain.model).abs().max();
        EXPECT_EQ(found.metrics, plain.metrics);
        EXPECT_EQ(found.skipped, plain.skipped);
      }
    });
  }
}

TEST(DividedTraining, ClipsByTheNormOfAllShards) {
  spawn(2, [](World& world) {
    auto options = test::train_options({{"clip", "accumulation"}});
    options.max_grad_norm = 0.05;
    options.optimizer = train::sgd({.lr = 0.5});
    const Left plain = trained(world, options, Division::None);
    for (const auto division : {Division::Shared, Division::Gathered}) {
      // The norm is added up in another order than that of whole gradients.
      const Left found = trained(world, options, division);
      EXPECT_LT((found.model - plain.model).abs().max().item<double>(), 1e-4);
    }
  });
}

TEST(DividedTraining, EvaluatesFewerSamplesThanThereAreRanks) {
  spawn(4, [](World& world) {
    auto options = test::train_options({});
    options.epochs = 1;
    static const auto held_out = test::train_samples(3, 6);
    const auto counted = [&] {
      options.evaluation = {.data = held_out, .metrics = {std::make_shared<Accuracy>()}};
      return options;
    };
    const Left plain = trained(world, counted(), Division::None);
    EXPECT_EQ(trained(world, counted(), Division::Gathered).metrics, plain.metrics);
  });
}

TrainerOptions saving(const std::string& directory, int64_t max_steps) {
  auto options = test::train_options({{"drop_last"}});
  options.epochs = 0;
  options.max_steps = max_steps;
  options.saving = {.directory = directory, .every_steps = 4, .resume = train::Resume::Latest};
  return options;
}

// A run that is stopped and goes on: of which kinds, on how many ranks.
at::Tensor resumed(const std::string& folder, int before, Division first, int after,
                   Division second) {
  at::Tensor model;
  spawn(before, [&](World& world) { trained(world, saving(folder, 8), first); });
  const Folder result;
  spawn(after, [&](World& world) {
    const Left left = trained(world, saving(folder, 14), second);
    if (world.is_main()) torch::save(left.model, result / "model");
  });
  torch::load(model, result / "model");
  return model;
}

TEST(DividedTraining, GoesOnAsDdpAndTheOtherWayRoundOnAnyNumberOfRanks) {
  const auto run = [](int before, Division first, int after, Division second) {
    const Folder folder;
    return resumed(folder / "run", before, first, after, second);
  };
  using enum Division;
  const at::Tensor calm = run(2, None, 2, None);
  EXPECT_TRUE(at::equal(run(2, Shared, 2, Gathered), calm));
  EXPECT_TRUE(at::equal(run(2, Gathered, 2, None), calm));
  EXPECT_TRUE(at::equal(run(2, None, 2, Shared), calm));
  const at::Tensor more = run(2, None, 3, None);
  EXPECT_TRUE(at::equal(run(2, Shared, 3, Shared), more));
  EXPECT_TRUE(at::equal(run(2, Gathered, 3, Gathered), more));
}

TEST(DividedTraining, KeepsAndRestoresTheBest) {
  static const auto held_out = test::train_samples(31, 6);
  for (const auto division : {Division::None, Division::Shared, Division::Gathered}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      auto options = saving(folder / "run", 30);
      options.optimizer = train::sgd({.lr = 0.8});
      options.evaluation = {.data = held_out, .every_epochs = 0, .every_steps = 3};
      options.early_stopping = train::EarlyStopping{.patience = 2};
      options.saving.best = train::Best{.restore_at_end = true};
      seed_everything(1, world);
      TrainNet net;
      options.fsdp = divided(division);
      Trainer trainer(world, net, train::cross_entropy(), test::train_samples(113), options);
      const auto outcome = trainer.run();
      ASSERT_FALSE(outcome.best.empty());
      std::map<std::string, double> saved;
      for (const auto& one : checkpoint::list_checkpoints(folder / "run").checkpoints) {
        if (outcome.best.ends_with(one.name)) saved = one.metrics;
      }
      EXPECT_DOUBLE_EQ(trainer.evaluate().at("loss"), saved.at("loss"));
    });
  }
}

TEST(DividedTraining, GroupsOfParametersBecomeGroupsOfShards) {
  spawn(2, [](World& world) {
    auto options = test::train_options({{"sgd"}});
    options.groups = [](torch::nn::Module& module) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const auto& parameter : module.parameters()) {
        groups.emplace_back(std::vector<at::Tensor>{parameter});
        groups.back().set_options(
            std::make_unique<torch::optim::SGDOptions>(parameter.dim() > 1 ? 0.05 : 0.2));
      }
      return groups;
    };
    const Left plain = trained(world, options, Division::None);
    EXPECT_TRUE(at::equal(trained(world, options, Division::Shared).model, plain.model));
    options.groups = [](torch::nn::Module&) {
      return std::vector<torch::optim::OptimizerParamGroup>{
          torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{at::ones({2})})};
    };
    EXPECT_THAT(message_of<ConfigError>([&] { trained(world, options, Division::Shared); }),
                HasSubstr("a tensor that is not a parameter of the model"));
  });
}

TEST(DividedTraining, TwoModelsAreDividedApart) {
  const auto losses = [](World& world, Division division) {
    seed_everything(1, world);
    TrainNet first, second;
    const auto samples = test::train_samples(40);
    TrainerOptions options = test::train_options({{"sgd"}});
    if (division != Division::None) {
      options.fsdp = divided(division);
      options.fsdp->units = {first->last.ptr(), second->first.ptr()};
    }
    const auto loss_of = [](const TrainNet& net, const Batch& batch) {
      return torch::nn::functional::cross_entropy(lockstep::call(net, batch.data), batch.target);
    };
    Trainer trainer(
        world, {{.name = "first", .model = first}, {.name = "second", .model = second}},
        [&](train::Step& step) {
          step.update("first", [&](const Batch& batch) { return loss_of(first, batch); });
          // The first one's gradients, which come on the way, are dropped.
          step.update("second", [&](const Batch& batch) {
            return loss_of(second, batch) + loss_of(first, batch);
          });
        },
        samples, options);
    return trainer.run().state.losses;
  };
  spawn(2, [&](World& world) {
    const auto plain = losses(world, Division::None);
    EXPECT_EQ(losses(world, Division::Shared), plain);
    EXPECT_EQ(losses(world, Division::Gathered), plain);
  });
}

// Two models that are trained against each other, with averages of their weights.
struct Adversaries {
  torch::nn::Linear generator{4, 6}, critic{6, 1};

  at::Tensor made(const Batch& batch) {
    return lockstep::call(generator, batch.data.narrow(1, 0, 4));
  }
  at::Tensor score(const at::Tensor& samples) { return lockstep::call(critic, samples).mean(); }
  void update_generator(train::Step& step) {
    step.update("generator", [this](const Batch& batch) { return -score(made(batch)); });
  }
  void update_critic(train::Step& step) {
    step.update("critic", [this](const Batch& batch) {
      return score(made(batch).detach()) - score(batch.data);
    });
  }
  Trainer trainer(World& world, Division division, std::function<void(train::Step&)> step,
                  train::Evaluation evaluation = {}) {
    auto options = test::train_options({{"average"}});
    options.epochs = 0;
    options.max_steps = 3;
    options.fsdp = divided(division);
    options.evaluation = std::move(evaluation);
    return {world,
            {{.name = "generator", .model = generator}, {.name = "critic", .model = critic}},
            std::move(step),
            test::train_samples(40),
            options};
  }
};

// Each update runs the other model too, and leaves its graph without a backward() or with one that
// is held.
TEST(DividedTraining, TwoModelsAreEvaluatedWithTheirAverages) {
  const auto found = [](World& world, Division division) {
    seed_everything(1, world);
    Adversaries models;
    const auto step = [&](train::Step& now) {
      models.update_critic(now);
      if (now.state().step != 1) models.update_generator(now);
    };
    const auto measure = [&](const Batch& batch) {
      return std::map<std::string, double>{
          {"score", models.score(models.made(batch)).item<double>()}};
    };
    Trainer trainer =
        models.trainer(world, division, step,
                       {.data = test::train_samples(31, 6), .every_steps = 1, .measure = measure});
    return trainer.run().state.metrics;
  };
  spawn(2, [&](World& world) {
    const auto plain = found(world, Division::None);
    EXPECT_EQ(found(world, Division::Shared), plain);
    EXPECT_EQ(found(world, Division::Gathered), plain);
  });
}

// The critic's update, the last of a step, has run the generator and left its graph.
TEST(DividedTraining, AveragesOfTwoModelsAreAppliedAfterARunWithoutEvaluations) {
  const auto averaged = [](World& world, Division division) {
    seed_everything(1, world);
    Adversaries models;
    Trainer trainer = models.trainer(world, division, [&](train::Step& now) {
      models.update_generator(now);
      models.update_critic(now);
    });
    trainer.run();
    const auto applied = trainer.average("generator")->apply();
    auto* const fsdp = trainer.fsdp("generator");
    if (fsdp != nullptr) fsdp->unshard();
    const at::Tensor found = flat(*models.generator).clone();
    if (fsdp != nullptr) fsdp->reshard();  // before any rank's averages go
    return found;
  };
  spawn(2, [&](World& world) {
    const at::Tensor plain = averaged(world, Division::None);
    EXPECT_TRUE(at::equal(averaged(world, Division::Shared), plain));
    EXPECT_TRUE(at::equal(averaged(world, Division::Gathered), plain));
  });
}

// The averages that are evaluated are none of what the program sees, or saves next.
TEST(DividedTraining, ParametersThatAreWholeAreTheSameAfterAnEvaluationOfAverages) {
  spawn(2, [](World& world) {
    for (const auto division : {Division::Shared, Division::Gathered}) {
      seed_everything(1, world);
      TrainNet net;
      auto options = test::train_options({{"average"}});
      options.evaluation = {.data = test::train_samples(31, 6)};
      options.fsdp = divided(division);
      Trainer trainer(world, net, train::cross_entropy(), test::train_samples(113), options);
      const auto found = trainer.run();
      trainer.fsdp()->unshard();
      const at::Tensor trained = flat(*net).clone();
      EXPECT_EQ(trainer.evaluate(), found.state.metrics);
      EXPECT_TRUE(at::equal(flat(*net), trained));
      trainer.fsdp()->reshard();
      EXPECT_EQ(trainer.evaluate(), found.state.metrics);
      EXPECT_FALSE(trainer.fsdp()->is_unsharded());
    }
  });
}

// Leaves parameters whole, as one may that reads them before the next backward().
struct LeavesWhole : train::Callback {
  void on_step_end(const train::RunState&, train::Requests&) override {
    if (!in_evaluation) trainer->fsdp()->unshard();
  }
  void on_evaluate(const train::RunState&, train::Requests&) override {
    if (in_evaluation) trainer->fsdp()->unshard();
  }
  bool in_evaluation = false;
  Trainer* trainer = nullptr;
};

TEST(DividedTraining, WhatACallbackLeavesWholeIsNotTheAverages) {
  spawn(2, [](World& world) {
    for (const auto division : {Division::Shared, Division::Gathered}) {
      std::vector<at::Tensor> found;
      for (const bool in_evaluation : {false, true}) {
        seed_everything(1, world);
        TrainNet net;
        auto options = test::train_options({{"average"}});
        options.epochs = 0;
        options.max_steps = 3;
        options.evaluation = {.data = test::train_samples(31, 6), .every_steps = 3};
        options.fsdp = divided(division);
        const auto leaves = std::make_shared<LeavesWhole>();
        options.callbacks.push_back(leaves);
        Trainer trainer(world, net, train::cross_entropy(), test::train_samples(40), options);
        leaves->in_evaluation = in_evaluation;
        leaves->trainer = &trainer;
        trainer.run();
        auto& fsdp = *trainer.fsdp();
        for (int again = 0; again < 2; ++again) {
          if (again > 0) fsdp.reshard();
          if (!fsdp.is_unsharded()) fsdp.unshard();
          found.push_back(flat(*net).clone());
        }
      }
      for (const auto& each : found) EXPECT_TRUE(at::equal(each, found.back()));
    }
  });
}

TEST(DividedTraining, WhatBelongsToDdpIsRefusedByName) {
  spawn(2, [](World& world) {
    const auto refused = [&](const std::function<void(TrainerOptions&)>& change) {
      TrainNet net;
      auto options = test::train_options({});
      options.fsdp = divided(Division::Shared);
      change(options);
      static const auto samples = test::train_samples(40);
      return message_of<ConfigError>(
          [&] { Trainer(world, net, train::cross_entropy(), samples, options); });
    };
    EXPECT_THAT(refused([](auto& o) { o.zero = true; }), HasSubstr("fsdp together with zero"));
    EXPECT_THAT(refused([](auto& o) {
                  o.loader.lanes = 4;
                  o.fsdp->lanes = 2;
                }),
                HasSubstr("fsdp.lanes = 2 and loader.lanes = 4"));
    EXPECT_THAT(refused([](auto& o) { o.fsdp->lanes = 2; }),
                HasSubstr("fsdp.lanes = 2 and loader.lanes = 0"));
    EXPECT_THAT(refused([](auto& o) { o.ddp.unused = Unused::Error; }),
                HasSubstr("options of Ddp, which it takes the place of"));
    EXPECT_THAT(refused([](auto& o) { o.ddp.hook = std::make_shared<CastHook>(at::kHalf); }),
                HasSubstr("a communication hook, which is Ddp's"));
    TrainNet net, other;
    auto options = test::train_options({});
    options.fsdp = FsdpOptions{.units = {other->first.ptr()}};
    const auto samples = test::train_samples(40);
    EXPECT_THAT(message_of<ConfigError>(
                    [&] { Trainer(world, net, train::cross_entropy(), samples, options); }),
                HasSubstr("belongs to no model of the training"));
    options.fsdp = divided(Division::Shared);
    const Trainer trainer(world, net, train::cross_entropy(), samples, options);
    EXPECT_THAT(message_of<ConfigError>([&] { trainer.ddp(); }), HasSubstr("ask for fsdp()"));
  });
}

}  // namespace
}  // namespace lockstep
