// What functions of the program throw, on one rank, ends all ranks with its reason.
#include "support/thrown.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/lockstep.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/metrics.h"
#include "lockstep/train/optimizer.h"
#include "lockstep/train/run.h"
#include "lockstep/train/schedule.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::message_of;
using test::spawn;
using test::train_options;
using test::TrainNet;
using testing::AllOf;
using testing::HasSubstr;
using train::Callback;
using train::RunState;

// Notes what on_exception() is told.
struct Told : Callback {
  explicit Told(std::vector<std::string>& texts) : texts_(texts) {}
  void on_exception(const RunState&, std::string_view what) override { texts_.emplace_back(what); }

 private:
  std::vector<std::string>& texts_;
};

// Its on_exception() fails, too.
struct Fails : Callback {
  void on_exception(const RunState&, std::string_view) override { throw 8; }
};

TEST(Thrown, WhatIsNoStdExceptionEndsAllRanks) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    int calls = 0, thrown = 0;
    std::vector<std::string> told;
    auto options = train_options({});
    options.callbacks = {std::make_shared<Fails>(), std::make_shared<Told>(told)};
    train::Trainer trainer(
        world, net,
        [&](const Batch& batch) -> at::Tensor {
          if (++calls == 3 && world.rank() == 1) throw 7;
          return torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target);
        },
        samples, options);
    std::string text;
    try {
      trainer.run();
    } catch (int number) {
      thrown = number;
    } catch (const CommError& error) {
      text = error.what();
    }
    EXPECT_EQ(thrown, world.rank() == 1 ? 7 : 0);
    if (world.rank() == 0) {
      EXPECT_THAT(text, HasSubstr("rank 1 ended the training in step 3: an exception that is not"));
    }
    ASSERT_EQ(told.size(), 1U);
    EXPECT_THAT(told[0], HasSubstr("an exception that is not a std::exception"));
  });
}

// An optimizer whose third step fails on rank 1.
struct Full : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    if (++steps == 3 && rank == 1) throw std::runtime_error("no room for the state");
    return SGD::step(std::move(closure));
  }
  int steps = 0, rank = 0;
};

TEST(Thrown, AnOptimizerOfTheProgramEndsAllRanks) {
  for (const auto precision : {train::Precision::Full, train::Precision::Float16}) {
    for (const bool zero : {false, true}) {
      spawn(2, [&](World& world) {
        TrainNet net;
        const auto samples = test::train_samples(60);
        auto options = train_options({});
        options.precision = precision;
        options.scaler.init_scale = 1;
        options.zero = zero;
        options.optimizer = [&](std::vector<torch::optim::OptimizerParamGroup> groups) {
          auto made = std::make_unique<Full>(std::move(groups), torch::optim::SGDOptions(1e-2));
          made->rank = world.rank();
          return made;
        };
        train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
        EXPECT_THAT(message_of([&] { trainer.run(); }),
                    HasSubstr(world.rank() == 1 ? "no room for the state"
                              : zero            ? "[zero] rank 1: no room for the state"
                                     : "rank 1 ended the training in step 3: no room for"));
      });
    }
  }
}

// Functions that make the Trainer's parts: all ranks are told, and can make another one.
TEST(Thrown, WhatTheConstructorCallsEndsItOnAllRanks) {
  spawn(2, [](World& world) {
    const auto samples = test::train_samples(60);
    const auto thrown_by = [&](const train::TrainerOptions& options) {
      TrainNet net;
      return message_of(
          [&] { train::Trainer(world, net, train::cross_entropy(), samples, options); });
    };
    const auto fail = [&](const char* what) {
      if (world.rank() == 1) throw std::runtime_error(what);
    };
    const std::string address = world.rank() == 1 ? "" : "rank 1: ";
    for (const bool zero : {false, true}) {
      auto options = train_options({});
      options.zero = zero;
      options.optimizer = [&, make = options.optimizer](auto groups) {
        fail("no optimizer");
        return make(std::move(groups));
      };
      EXPECT_THAT(thrown_by(options), HasSubstr(address + "no optimizer"));
      options = train_options({});
      options.zero = zero;
      options.groups = [&](torch::nn::Module& module) {
        fail("no groups");
        return std::vector<torch::optim::OptimizerParamGroup>{{module.parameters()}};
      };
      EXPECT_THAT(thrown_by(options), HasSubstr(address + "no groups"));
    }
    auto options = train_options({});
    options.learning_rate = train::follow([&](int64_t) {
      fail("no schedule");
      return constant_lr();
    });
    EXPECT_THAT(thrown_by(options), HasSubstr(address + "no schedule"));
    EXPECT_EQ(thrown_by(train_options({})), "nothing");
  });
}

TEST(Thrown, AnEvaluationOutsideOfTheRunEndsOnAllRanks) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    auto options = train_options({});
    options.evaluation.data = samples;
    bool is_lost = false;
    options.evaluation.measure = [&](const Batch&) -> std::map<std::string, double> {
      if (world.rank() == 0) return {{"a", 1}};
      if (is_lost) throw CommError("no measure of a group of its own");
      throw std::runtime_error("no measure");
    };
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    for (const bool own_group : {false, true, false}) {  // the group can be used again
      is_lost = own_group;
      const auto text = message_of([&] { trainer.evaluate(); });
      EXPECT_THAT(text,
                  HasSubstr(world.rank() == 1 ? "no measure"
                                              : "rank 1 ended the evaluation after step 0: no "));
    }
  });
}

TEST(Thrown, AMetricMayNotHaveTheNameOfAnother) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    struct Ones : Mean {
      using Mean::Mean;
      void update(const at::Tensor& outputs, const at::Tensor&, const at::Tensor&) override {
        Mean::update(at::ones_like(outputs));
      }
    };
    const auto said = [&](const std::string& name) {
      auto options = train_options({});
      options.evaluation = {.data = samples, .metrics = {std::make_shared<Ones>(name)}};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      return message_of<ConfigError>([&] { trainer.evaluate(); });
    };
    EXPECT_THAT(said("loss"), HasSubstr("the evaluation gives 'loss' twice"));
    EXPECT_EQ(said("ones"), "nothing");
  });
}

// What some batches lack would count as 0 in the mean.
TEST(Thrown, MeasuresHaveTheSameNamesInEachBatch) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    const auto said = [&](const auto& measure) {
      auto options = train_options({});
      options.evaluation = {.data = samples, .measure = measure};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      return message_of<ConfigError>([&] { trainer.evaluate(); });
    };
    using Means = std::map<std::string, double>;
    EXPECT_THAT(said([&](const Batch&) {
                  return world.rank() == 0 ? Means{{"a", 1}} : Means{{"a", 1}, {"b", 2}};
                }),
                HasSubstr("Evaluation::measure gives a for one batch and a, b for another"));
    EXPECT_THAT(said([&](const Batch&) {
                  return Means{{"a\tb", 1}};
                }),
                HasSubstr("gives a name with a tab or a line break"));
  });
  spawn(1, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    auto options = train_options({});
    int calls = 0;
    options.evaluation = {.data = samples, .measure = [&](const Batch&) {
                            return std::map<std::string, double>{{++calls % 2 ? "a" : "b", 1}};
                          }};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    EXPECT_THAT(message_of<ConfigError>([&] { trainer.evaluate(); }),
                HasSubstr("Evaluation::measure gives a for one batch and b for another"));
  });
}

TEST(Thrown, AnUpdateWithinAnUpdateIsRefused) {
  spawn(1, [](World& world) {
    TrainNet one, other;
    const auto samples = test::train_samples(60);
    const auto loss_of = [](TrainNet& net, const Batch& batch) {
      return torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target);
    };
    const auto inner = [&](const Batch& batch) { return loss_of(other, batch); };
    train::Trainer trainer(
        world, {{.name = "one", .model = one}, {.name = "other", .model = other}},
        [&](train::Step& step) {
          step.update("one", [&](const Batch& batch) {
            step.update("other", inner);
            return loss_of(one, batch);
          });
        },
        samples, train_options({}));
    EXPECT_THAT(message_of<ConfigError>([&] { trainer.run(); }),
                HasSubstr("update() of part 'other' within the loss of another update()"));
  });
}

// The others waited for this rank's part of the gradients.
TEST(Thrown, AnErrorOfTheLibrarysKindsInTheBackwardOfOneRankEndsAllRanks) {
  for (const bool is_divided : {false, true}) {
    spawn(2, [is_divided](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(60);
      auto options = train_options({});
      if (is_divided) options.fsdp = FsdpOptions{};
      int calls = 0;
      train::Trainer trainer(
          world, net,
          [&](const Batch& batch) {
            const at::Tensor out = call(net, batch.data);
            if (++calls == 3 && world.rank() == 1) {
              out.register_hook([](const at::Tensor&) { throw DataError("[mine] a bad sample"); });
            }
            return torch::nn::functional::cross_entropy(out, batch.target);
          },
          samples, options);
      const auto text = message_of([&] { trainer.run(); });
      EXPECT_THAT(
          text, HasSubstr(world.rank() == 1 ? "[mine] a bad sample"
                                            : "rank 1 ended the training in step 3: [mine] a bad"));
    });
  }
}

// The first rank to find it told the others that it had ended.
TEST(Thrown, ModelsThatDifferAreTheSameErrorOnAllRanks) {
  for (int run = 0; run < 10; ++run) {
    spawn(4, [](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(80);
      auto options = train_options({});
      options.ddp.check_same_every = 1;
      options.callbacks = {std::make_shared<test::AtStep>(2, [&] {
        const torch::NoGradGuard no_grad;
        if (world.rank() == 2) net->last->bias.add_(1);
      })};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      EXPECT_THAT(
          message_of<ConfigError>([&] { trainer.run(); }),
          HasSubstr("rank 2 differs from rank 0 (4 ranks), first in parameter 'last.bias'"));
    });
  }
}

// Rank 2, which is not in that group, waited for the others until they ended.
TEST(Thrown, AnErrorOfAnotherGroupEndsAllRanks) {
  spawn(3, [](World& world) {
    const Group group = world.group().split(world.rank() < 2 ? 0 : 1);
    struct Mismatch : Callback {
      explicit Mismatch(const Group& of) : group(of) {}
      void on_step_end(const RunState& state, train::Requests&) override {
        if (state.step != 2 || group.size() == 1) return;
        at::Tensor sum = at::zeros({group.rank() + 1});
        group.all_reduce(sum).wait();
      }
      const Group group;
    };
    TrainNet net;
    const auto samples = test::train_samples(90);
    auto options = train_options({});
    options.callbacks = {std::make_shared<Mismatch>(group)};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    const auto text = message_of<CommError>([&] { trainer.run(); });
    EXPECT_THAT(text, HasSubstr("all_reduce"));
    EXPECT_THAT(text, HasSubstr(world.rank() == 2 ? " ended the training after step 2: "
                                                  : "the ranks disagree"));
    // The end of rank 0, which serves the store, would tell rank 2, too.
    if (world.rank() == 2) world.store().set("told", "yes");
    if (world.rank() == 0) world.store().wait({"told"}, std::chrono::seconds(30));
  });
}

// Calls what it is given at one place of the run, and fails at the next one on rank 1.
struct At : Callback {
  At(std::string place, int rank, std::function<void()> act)
      : place_(std::move(place)), rank_(rank), act_(std::move(act)) {}
  void on_train_begin(const RunState&) override { reach("begin"); }
  void on_epoch_begin(const RunState&) override { reach("epoch"); }
  void on_step_begin(const RunState&) override { reach("step"); }
  void on_step_end(const RunState&, train::Requests&) override { reach("end"); }
  void on_epoch_end(const RunState&, train::Requests&) override { reach("epoch end"); }
  void reach(std::string_view name) {
    if (has_acted_ && rank_ == 1) throw std::runtime_error("mine");
    if (has_acted_ || name != place_) return;
    act_();
    has_acted_ = true;
  }

 private:
  const std::string place_;
  const int rank_;
  const std::function<void()> act_;
  bool has_acted_ = false;
};

// A program that has caught what all ranks threw hides no later error of one rank.
TEST(Thrown, AnErrorOfAllRanksThatWasCaughtHidesNone) {
  for (const std::string place : {"before", "begin", "epoch", "step", "loss", "end", "epoch end"}) {
    spawn(2, [place](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(60);
      auto options = train_options({});
      bool counts = true;
      train::Trainer* running = nullptr;
      options.evaluation = {
          .data = samples, .every_epochs = 0, .measure = [](const Batch& batch) {
            return std::map<std::string, double>{{"a", static_cast<double>(batch.data.size(0))}};
          }};
      options.count = [&](const Batch& batch) { return counts ? batch.data.size(0) : 0; };
      const auto catch_one = [&] {
        counts = false;  // DataError on all
        EXPECT_THAT(message_of<DataError>([&] { running->evaluate(); }),
                    HasSubstr("count nothing"));
        counts = true;
      };
      const auto at = std::make_shared<At>(place, world.rank(), catch_one);
      options.callbacks = {at};
      train::Trainer trainer(
          world, {{.name = "net", .model = net}},
          [&](train::Step& step) {
            step.update("net", [&](const Batch& batch) {
              return torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target);
            });
            if (place == "loss") at->reach("loss");
          },
          samples, options);
      running = &trainer;
      if (place == "before") at->reach("before");
      const auto text = message_of([&] { trainer.run(); });
      EXPECT_THAT(text, HasSubstr(world.rank() == 1 ? "mine" : "rank 1 ended the training "))
          << place;
    });
  }
}

TEST(Thrown, WhatIsNoStdExceptionEndsAProgramWithAStatus) {
  const test::Folder folder;
  const std::string file = folder / "run.yaml";
  test::write(file,
              "model: {kind: linear}\ndata: {kind: synthetic-regression}\n"
              "training: {max_steps: 3, loss: own}\nlogging: {output_dir: " +
                  folder / "run" + "}\n");
  train::Registry registry;
  registry.add_loss("own", [](const train::RunConfig&) -> train::Loss {
    return [](const at::Tensor&, const at::Tensor&) -> at::Tensor { throw 42; };
  });
  test::spawn_bare(2, [&](int) {
    std::string program = "program", given = file;
    char* words[] = {program.data(), given.data()};
    EXPECT_EQ(train::run_program(2, words, registry), 1);
  });
  EXPECT_THAT(test::contents(folder / "run/result.json"),
              AllOf(HasSubstr("an exception that is not a std::exception"),
                    HasSubstr("\"exit_status\": 1")));
}

TEST(Thrown, RatesHaveToBeNumbers) {
  test::isolated([] {
    const auto parameter = torch::ones({1}).requires_grad_(true);
    torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(0.5));
    LrScheduler schedule(sgd, {.lr = [](double base, int64_t step) { return base / (2 - step); }});
    schedule.step();
    EXPECT_THAT(message_of<ConfigError>([&] { schedule.step(); }),
                HasSubstr("[lr_scheduler] the schedule gives the rate inf at step 2"));
    EXPECT_EQ(schedule.state().step, 1);
    EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.5);
    EXPECT_THAT(message_of<ConfigError>([] {
                  sequential_lr({Schedule{}, constant_lr()}, {3});
                }),
                HasSubstr("a schedule has no function of the rate"));
  });
}

}  // namespace
}  // namespace lockstep
