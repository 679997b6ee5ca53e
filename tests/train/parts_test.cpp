// Several models trained by one step, and options that do not go together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>

#include "lanes/training.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

namespace nn = torch::nn;
using test::Folder;
using test::message_of;
using test::result_of;
using test::spawn;
using test::TrainNet;
using testing::HasSubstr;

at::Tensor bce(const at::Tensor& logits, double target) {
  return nn::functional::binary_cross_entropy_with_logits(logits, at::full_like(logits, target));
}

struct Gan {
  nn::Sequential generator{nn::Linear(4, 16), nn::Tanh(), nn::Linear(16, 6)};
  nn::Sequential discriminator{nn::Linear(6, 16), nn::Tanh(), nn::Linear(16, 1)};

  at::Tensor fake(const Batch& batch) {
    return generator->forward(at::randn({batch.data.size(0), 4}));
  }
  at::Tensor discriminator_loss(const Batch& batch) {
    return bce(discriminator->forward(batch.data), 1) +
           bce(discriminator->forward(fake(batch).detach()), 0);
  }
  at::Tensor generator_loss(const Batch& batch) {
    return bce(discriminator->forward(fake(batch)), 1);
  }
  uint64_t hash() const {
    for (const auto& net : {generator, discriminator}) {
      for (const auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
    }
    return test::chained(test::lane_hash(*generator), test::lane_hash(*discriminator));
  }
};

uint64_t gan_by_hand(World& world) {
  seed_everything(2, world);
  Gan gan;
  Ddp generator(gan.generator, world), discriminator(gan.discriminator, world);
  FusedAdam for_generator(gan.generator->parameters(), 1e-2);
  FusedAdam for_discriminator(gan.discriminator->parameters(), 2e-2);
  const auto samples = test::train_samples(40);
  Loader loader(samples, world, {.batch_size = 5, .seed = 3});
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : loader.epoch(epoch)) {
      discriminator.zero_grad();
      {
        const auto hold = generator.hold();
        gan.discriminator_loss(batch).backward();
      }
      for_discriminator.step();
      generator.zero_grad();
      {
        const auto hold = discriminator.hold();
        gan.generator_loss(batch).backward();
      }
      for_generator.step();
    }
  }
  return gan.hash();
}

uint64_t gan_by_trainer(World& world, const std::string& directory, int64_t kill) {
  seed_everything(2, world);
  Gan gan;
  const auto samples = test::train_samples(40);
  train::TrainerOptions options{
      .epochs = 2,
      .loader = {.batch_size = 5, .seed = 3},
      .saving = {.directory = directory, .every_steps = directory.empty() ? 0 : 2, .async = false}};
  train::Trainer trainer(
      world,
      {{.name = "generator", .model = gan.generator, .optimizer = train::adam({.lr = 1e-2})},
       {.name = "discriminator",
        .model = gan.discriminator,
        .optimizer = train::adam({.lr = 2e-2})}},
      [&](train::Step& step) {
        if (step.state().step == kill) raise(SIGKILL);
        step.update("discriminator", [&](const Batch& b) { return gan.discriminator_loss(b); });
        step.update("generator", [&](const Batch& b) { return gan.generator_loss(b); });
      },
      samples, options);
  trainer.run();
  EXPECT_EQ(trainer.state().losses.size(), 2u);
  EXPECT_EQ(trainer.state().samples, 80);
  return gan.hash();
}

TEST(Parts, AGanHasTheBitsOfItsLoop) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      const uint64_t expected = gan_by_hand(world);
      EXPECT_EQ(gan_by_trainer(world, "", -1), expected);
    });
  }
}

TEST(Parts, AGanThatWasKilledGoesOn) {
  const Folder folder;
  const test::Ranks ranks{"auto", 2};
  const auto run = [&](const std::string& name, int64_t kill) {
    return
        [&folder, name, kill](World& world) { return gan_by_trainer(world, folder / name, kill); };
  };
  const uint64_t expected = result_of(ranks, run("calm", -1));
  EXPECT_NE(expected, 0u);
  spawn(2, run("rough", 5), {.doomed = {0, 1}});
  EXPECT_EQ(result_of(ranks, run("rough", -1)), expected);
}

// Each update runs both networks, whose running statistics follow each rank's own samples.
TEST(Parts, RunningStatisticsOfAllModelsAreAlikeAfterEachStep) {
  for (const bool is_divided : {false, true}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      nn::Sequential generator(nn::Linear(4, 16), nn::BatchNorm1d(16), nn::Linear(16, 6));
      nn::Sequential discriminator(nn::Linear(6, 16), nn::BatchNorm1d(16), nn::Linear(16, 1));
      const auto fake = [&](const Batch& batch) {
        return call(generator, at::randn({batch.data.size(0), 4}));
      };
      const auto samples = test::train_samples(40);
      train::TrainerOptions options{
          .epochs = 1,
          .loader = {.batch_size = 5, .seed = 3},
          .saving = {.directory = folder / "run", .every_steps = 1},
          .callbacks = {std::make_shared<test::AtStep>(2, [&] {
            for (const auto& net : {generator, discriminator}) {
              for (const auto& buffer : net->buffers()) {
                EXPECT_TRUE(
                    every_rank(at::equal(sum_over_ranks(buffer, world), 2 * buffer), world));
              }
            }
          })}};
      if (is_divided) options.fsdp = FsdpOptions{};
      train::Trainer trainer(
          world,
          {{.name = "generator", .model = generator},
           {.name = "discriminator", .model = discriminator}},
          [&](train::Step& step) {
            step.update("discriminator", [&](const Batch& b) {
              return bce(call(discriminator, b.data), 1) +
                     bce(call(discriminator, fake(b).detach()), 0);
            });
            step.update("generator",
                        [&](const Batch& b) { return bce(call(discriminator, fake(b)), 1); });
          },
          samples, options);
      trainer.run();
      EXPECT_EQ(trainer.state().saved_at, 4);
    });
  }
}

// Those of the second model seemed to be in eval() before the evaluation, and stayed so.
TEST(Parts, ModulesThatModelsHaveInCommonTrainAfterAnEvaluation) {
  spawn(1, [](World& world) {
    nn::Dropout dropout(0.5), frozen(0.5);
    frozen->eval();
    nn::Sequential first(nn::Linear(6, 3), dropout, frozen),
        second(nn::Linear(6, 3), dropout, frozen);
    const auto samples = test::train_samples(20);
    const auto loss_of = [](nn::Sequential& net) {
      return [&net](const Batch& batch) {
        return nn::functional::cross_entropy(net->forward(batch.data), batch.target);
      };
    };
    train::Trainer trainer(
        world, {{.name = "first", .model = first}, {.name = "second", .model = second}},
        [&](train::Step& step) {
          step.update("first", loss_of(first));
          step.update("second", loss_of(second));
        },
        samples,
        {.epochs = 1,
         .loader = {.batch_size = 5},
         .evaluation = {
             .data = samples, .measure = [&](const Batch& batch) {
               EXPECT_FALSE(dropout->is_training());
               return std::map<std::string, double>{{"loss", loss_of(first)(batch).item<double>()}};
             }}});
    trainer.run();
    EXPECT_TRUE(dropout->is_training());
    EXPECT_TRUE(first->is_training() && second->is_training());
    EXPECT_FALSE(frozen->is_training());
  });
}

// The running mean of a BatchNorm that two models have, after a training with averaged weights.
at::Tensor mean_of_common_norm(World& world, bool evaluates) {
  torch::manual_seed(3);
  const nn::BatchNorm1d norm(nn::BatchNormOptions(3).affine(false));
  nn::Sequential first(nn::Linear(6, 3), norm), second(nn::Linear(6, 3), norm);
  const auto samples = test::train_samples(20);
  const auto loss_of = [](nn::Sequential& net) {
    return [&net](const Batch& batch) {
      return nn::functional::cross_entropy(net->forward(batch.data), batch.target);
    };
  };
  train::TrainerOptions options{.epochs = 2, .loader = {.batch_size = 5}};
  options.weight_average = {.decay = 0.5};
  if (evaluates) {
    options.evaluation = {
        .data = samples, .measure = [&](const Batch& batch) {
          return std::map<std::string, double>{{"loss", loss_of(first)(batch).item<double>()}};
        }};
  }
  train::Trainer trainer(
      world, {{.name = "first", .model = first}, {.name = "second", .model = second}},
      [&](train::Step& step) {
        step.update("first", loss_of(first));
        step.update("second", loss_of(second));
      },
      samples, options);
  trainer.run();
  return norm->running_mean.clone();
}

TEST(Parts, BuffersThatModelsHaveInCommonAreNotLeftAveraged) {
  spawn(1, [](World& world) {
    EXPECT_TRUE(mean_of_common_norm(world, true).equal(mean_of_common_norm(world, false)));
  });
}

// Has two modules, and changes nothing.
struct Both : nn::Module {
  Both(const std::shared_ptr<nn::Module>& first, const std::shared_ptr<nn::Module>& second) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

// A module comes once in the list of all, after the first of those that have it.
TEST(Parts, AModuleThatAFrozenOneHasTooTrainsAfterAnEvaluation) {
  spawn(1, [](World& world) {
    nn::Dropout shared(0.5), frozen(0.5);
    const auto inner = std::make_shared<Both>(shared.ptr(), frozen.ptr());
    const auto other = std::make_shared<Both>(nn::Tanh().ptr(), inner);
    nn::Sequential net(nn::Linear(6, 3), inner, other);
    other->eval();
    shared->train();
    const auto samples = test::train_samples(20);
    train::Trainer trainer(
        world, net,
        [&](const Batch& batch) {
          return nn::functional::cross_entropy(net->forward(batch.data), batch.target);
        },
        samples,
        {.optimizer = train::sgd({.lr = 0.1}),
         .epochs = 1,
         .loader = {.batch_size = 5},
         .evaluation = {.data = samples, .measure = [&](const Batch&) {
                          EXPECT_FALSE(net->is_training() || shared->is_training());
                          return std::map<std::string, double>{{"loss", 1.0}};
                        }}});
    trainer.run();
    EXPECT_TRUE(net->is_training() && shared->is_training());
    EXPECT_FALSE(other->is_training() || inner->is_training() || frozen->is_training());
  });
}

// What a Trainer with these options says.
std::string refusal(World& world, const std::function<void(train::TrainerOptions&)>& change) {
  TrainNet net;
  static const auto samples = test::train_samples(60);
  auto options = test::train_options({});
  change(options);
  return message_of<ConfigError>(
      [&] { train::Trainer(world, net, train::cross_entropy(), samples, options); });
}

TEST(Options, ThatDoNotGoTogetherAreRefusedOnAllRanks) {
  using Options = train::TrainerOptions;
  spawn(2, [](World& world) {
    const auto expect = [&](const std::string& text, const std::function<void(Options&)>& change) {
      EXPECT_THAT(refusal(world, change), HasSubstr(text));
    };
    expect("sync_batch_norm together with lanes", [](Options& o) {
      o.loader.lanes = 2;
      o.sync_batch_norm = 0;
    });
    expect("together with the hook power_sgd", [](Options& o) {
      o.loader.lanes = 2;
      o.ddp.hook = std::make_shared<PowerSgd>();
    });
    expect("lets ranks train apart", [](Options& o) { o.ddp.hook = std::make_shared<LocalSgd>(); });
    expect("groups of 3 ranks", [](Options& o) { o.sync_batch_norm = 3; });
    expect("Buffers::None", [](Options& o) { o.ddp.buffers = Buffers::None; });
    expect("loader.exact", [](Options& o) { o.loader.exact = true; });
    expect("ddp.ignore", [](Options& o) { o.ddp.ignore = {"first.weight"}; });
    expect("early stopping looks at evaluations",
           [](Options& o) { o.early_stopping = train::EarlyStopping{}; });
    expect("needs an evaluation", [](Options& o) { o.learning_rate = train::on_plateau(); });
    expect("saving has no directory", [](Options& o) { o.saving.every_steps = 3; });
    const PreemptionNotice notice;
    expect("saving.on_preemption is false, and there is a notice", [&](Options& o) {
      o.saving.on_preemption = false;
      o.notice = &notice;
    });
    expect("the run has no end", [](Options& o) { o.epochs = 0; });
    expect("lanes = 1 on 2 ranks", [](Options& o) { o.loader.lanes = 1; });
    expect("LBFGS", [](Options& o) {
      o.optimizer = train::optimizer<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1));
    });
    expect("accumulation = 0", [](Options& o) { o.accumulation = 0; });
  });
}

// Better::Lower is the default: of accuracies it kept the worst.
TEST(Options, ThatTakeTheLowerAccuracyAsBetterAreWarnedOf) {
  spawn(1, [](World& world) {
    const auto warnings = [&](const std::string& metric, train::Better better) {
      ::testing::internal::CaptureStderr();
      const auto text = refusal(world, [&](train::TrainerOptions& options) {
        static const auto held_out = test::train_samples(10);
        options.evaluation = {.data = held_out};
        options.early_stopping = train::EarlyStopping{.metric = metric, .better = better};
        options.learning_rate = train::on_plateau({.better = better}, metric);
      });
      EXPECT_EQ(text, "nothing");
      return ::testing::internal::GetCapturedStderr();
    };
    const auto text = warnings("accuracy", train::Better::Lower);
    EXPECT_THAT(text, HasSubstr("early stopping takes the lower accuracy as the better one"));
    EXPECT_THAT(text, HasSubstr("the schedule takes the lower accuracy"));
    EXPECT_THAT(warnings("top_3_accuracy", train::Better::Lower), HasSubstr("Better::Higher"));
    for (const std::string metric : {"loss", "mine"}) {
      EXPECT_EQ(warnings(metric, train::Better::Lower), "") << metric;
    }
    EXPECT_EQ(warnings("accuracy", train::Better::Higher), "");
  });
}

// Mixed precision leaves float64 as it is: the run was as slow as without, and said nothing.
TEST(Options, MixedPrecisionOfAModelInFloat64IsWarnedOf) {
  spawn(1, [](World& world) {
    const auto warnings = [&](at::ScalarType dtype, train::Precision precision) {
      const data::TensorDataset samples = test::train_samples(10);
      test::TrainNet net;
      net->to(dtype);
      ::testing::internal::CaptureStderr();
      const train::Trainer trainer(
          world, net, train::cross_entropy(),
          data::TensorDataset(samples.data().to(dtype), samples.target()),
          {.epochs = 1, .loader = {.batch_size = 5}, .precision = precision});
      return ::testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(warnings(at::kDouble, train::Precision::BFloat16),
                HasSubstr("precision bfloat16 has no effect: all parameters are float64"));
    EXPECT_THAT(warnings(at::kDouble, train::Precision::Float16),
                HasSubstr("precision float16 has no effect"));
    EXPECT_EQ(warnings(at::kDouble, train::Precision::Full), "");
    EXPECT_EQ(warnings(at::kFloat, train::Precision::BFloat16), "");
  });
}

// The other ranks waited for it.
TEST(Options, ThatOneRankAloneHasWrongAreRefusedOnAllRanks) {
  spawn(2, [](World& world) {
    const std::string text = refusal(world, [&](train::TrainerOptions& options) {
      if (world.rank() == 1) options.max_grad_norm = -1;
    });
    EXPECT_THAT(text, HasSubstr("max_grad_norm = -1"));
    EXPECT_THAT(text, HasSubstr(world.rank() == 0 ? "[train] rank 1: " : "[train]"));
    EXPECT_THAT(refusal(world,
                        [&](train::TrainerOptions& options) {
                          options.saving = {.directory = "run", .async = world.rank() == 0};
                        }),
                HasSubstr("rank 1 has saving.async = false"));
  });
}

TEST(Options, SeveralModelsHaveLimits) {
  spawn(1, [](World& world) {
    Gan gan;
    const auto samples = test::train_samples(40);
    const auto refused = [&](train::TrainerOptions options) {
      options.epochs = 1;
      return message_of<ConfigError>([&] {
        train::Trainer(
            world,
            {{.name = "generator", .model = gan.generator},
             {.name = "discriminator", .model = gan.discriminator}},
            [](train::Step& step) {
              step.update("generator", [](const Batch&) { return at::Tensor(); });
            },
            samples, options);
      });
    };
    EXPECT_THAT(refused({.loader = {.lanes = 2}}), HasSubstr("several models together with lanes"));
    EXPECT_THAT(refused({.evaluation = {.data = samples}}), HasSubstr("Evaluation::measure"));
  });
}

}  // namespace
}  // namespace lockstep
