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
