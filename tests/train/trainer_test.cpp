// What a Trainer does around its steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <limits>

#include "lockstep/checkpoint/directory.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::message_of;
using test::spawn;
using test::TrainNet;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using train::Callback;
using train::Ended;
using train::Requests;
using train::RunState;

namespace nn = torch::nn;

// A model of one number, whose output is that number.
struct ConstantImpl : nn::Module {
  explicit ConstantImpl(double value) {
    weight = register_parameter("weight", torch::full({1}, value));
  }
  at::Tensor forward(const at::Tensor& x) { return weight.expand({x.size(0), 1}) + 0 * x; }
  at::Tensor weight;
};
TORCH_MODULE(Constant);

data::TensorDataset numbers(int64_t count) {
  return {torch::zeros({count, 1}), torch::arange(count).to(at::kFloat).unsqueeze(1)};
}

TEST(Evaluation, CountsEachSampleOnceWhateverTheNumberOfRanks) {
  for (const int ranks : {1, 2, 3}) {
    spawn(ranks, [&](World& world) {
      for (const int64_t count : {1, 2, 7, 12, 31}) {
        Constant net(0.0);
        const auto samples = numbers(count);
        train::Trainer trainer(world, net, train::l1(), samples,
                               {.max_steps = 1,
                                .loader = {.batch_size = 4},
                                .evaluation = {.data = samples, .batch_size = 5}});
        // The mean of 0 ... count - 1, in which a sample that comes twice would show.
        EXPECT_NEAR(trainer.evaluate().at("loss"), static_cast<double>(count - 1) / 2, 1e-5)
            << count << " on " << ranks;
      }
    });
  }
}

TEST(Evaluation, LeavesFrozenLayersInTheirModeAndDrawsNothing) {
  spawn(1, [](World& world) {
    TrainNet net;
    net->norm->eval();
    const auto samples = test::train_samples(20);
    train::Trainer trainer(
        world, net, train::cross_entropy(), samples,
        {.max_steps = 1, .loader = {.batch_size = 10}, .evaluation = {.data = samples}});
    const auto before = at::detail::getDefaultCPUGenerator().get_state().clone();
    trainer.evaluate();
    EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
    EXPECT_FALSE(net->norm->is_training());
    EXPECT_TRUE(net->is_training());
    EXPECT_TRUE(net->dropout->is_training());
  });
}

TEST(Evaluation, HasMeasuresOfTheProgram) {
  spawn(2, [](World& world) {
    Constant net(3.0);
    const auto samples = numbers(9);
    train::Trainer trainer(
        world, net, train::mse(), samples,
        {.max_steps = 1,
         .evaluation = {.data = samples, .measure = [&](const Batch& batch) {
                          return std::map<std::string, double>{
                              {"small", batch.target.lt(3).to(at::kDouble).mean().item<double>()}};
                        }}});
    EXPECT_NEAR(trainer.evaluate().at("small"), 3.0 / 9, 1e-12);
  });
}

struct Recorder : Callback {
  explicit Recorder(std::vector<std::string>& all, std::string prefix = "")
      : calls(all), name(std::move(prefix)) {}
  void add(const std::string& what, const RunState& state) {
    calls.push_back(name + what + std::to_string(state.step));
  }
  void on_train_begin(const RunState& state) override { add("begin", state); }
  void on_epoch_begin(const RunState& state) override { add("epoch", state); }
  void on_step_begin(const RunState& state) override { add("step", state); }
  void on_step_end(const RunState& state, Requests&) override { add("stepped", state); }
  void on_epoch_end(const RunState& state, Requests&) override { add("epoch_end", state); }
  void on_evaluate(const RunState& state, Requests&) override { add("evaluated", state); }
  void on_save(const RunState& state, Requests&) override { add("saved", state); }
  void on_train_end(const RunState& state) override { add("end", state); }
  void on_exception(const RunState& state, std::string_view what) override {
    add("failed", state);
    error = what;
  }
  std::vector<std::string>& calls;
  std::string name, error;
};

TEST(Callbacks, AreCalledInOrderAtEachPoint) {
  const test::Folder folder;
  spawn(2, [&](World& world) {
    TrainNet net;
    std::vector<std::string> calls;
    const auto samples = test::train_samples(20);
    auto options = test::train_options({});
    options.epochs = 1;
    options.evaluation.data = samples;
    options.saving = {.directory = folder / "run", .every_steps = 1};
    options.callbacks = {std::make_shared<Recorder>(calls)};
    train::Trainer(world, net, train::cross_entropy(), samples, options).run();
    EXPECT_THAT(calls, ElementsAre("begin0", "epoch0", "step0", "stepped1", "saved1", "step1",
                                   "stepped2", "evaluated2", "epoch_end2", "saved2", "end2"));
  });
}

TEST(Callbacks, AreAskedInTheOrderInWhichTheyWereGiven) {
  spawn(1, [&](World& world) {
    TrainNet net;
    std::vector<std::string> calls;
    const auto samples = test::train_samples(20);
    auto options = test::train_options({});
    options.epochs = 0;
    options.max_steps = 1;
    options.callbacks = {std::make_shared<Recorder>(calls, "a "),
                         std::make_shared<Recorder>(calls, "b ")};
    train::Trainer(world, net, train::cross_entropy(), samples, options).run();
    EXPECT_THAT(calls, ElementsAre("a begin0", "b begin0", "a epoch0", "b epoch0", "a step0",
                                   "b step0", "a stepped1", "b stepped1", "a end1", "b end1"));
  });
}

struct StopOnRank : Callback {
  StopOnRank(int on, int64_t number) : rank(on), step(number) {}
  void on_step_end(const RunState& state, Requests& requests) override {
    if (state.rank == rank && state.step == step) requests.stop();
  }
  int rank;
  int64_t step;
};

TEST(Stopping, WhatOneRankAsksForAllDo) {
  spawn(3, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(90);
    auto options = test::train_options({});
    options.callbacks = {std::make_shared<StopOnRank>(2, 4)};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    const auto outcome = trainer.run();
    EXPECT_EQ(outcome.ended, Ended::Stopped);
    EXPECT_EQ(outcome.state.step, 5);
  });
}

TEST(Stopping, EarlyOnAllRanksAtOnceAndTheBestModelComesBack) {
  const test::Folder folder;
  spawn(2, [&](World& world) {
    Constant net(10.0);  // goes down to 4.5, past what the evaluation wants
    const auto samples = numbers(10);
    const auto wanted = data::TensorDataset(torch::zeros({3, 1}), torch::full({3, 1}, 8.0));
    train::Trainer trainer(world, net, train::mse(), samples,
                           {.optimizer = train::sgd({.lr = 0.05}),
                            .epochs = 50,
                            .loader = {.batch_size = 5, .shuffle = false},
                            .evaluation = {.data = wanted},
                            .early_stopping = train::EarlyStopping{.patience = 2},
                            .saving = {.directory = folder / "run",
                                       .keep_last = 1,
                                       .best = train::Best{.restore_at_end = true}}});
    const auto outcome = trainer.run();
    EXPECT_EQ(outcome.ended, Ended::Early);
    EXPECT_LT(outcome.state.step, 10);
    const double left = trainer.evaluate().at("loss");
    EXPECT_LT(left, outcome.state.metrics.at("loss"));
    EXPECT_LT(std::abs(net->weight.item<double>() - 8), 0.5);
    EXPECT_THAT(outcome.best, HasSubstr("run/step-"));
  });
}

TEST(Stopping, ATimeLimitEndsAllRanksAfterTheSameStep) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(90);
    auto options = test::train_options({});
    options.epochs = 0;
    options.max_time = std::chrono::milliseconds(1 + 30 * world.rank() * 0);
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    const auto outcome = trainer.run();
    EXPECT_EQ(outcome.ended, Ended::TimeLimit);
    const auto steps = gather_for_metrics(torch::full({1}, outcome.state.step), world.group());
    EXPECT_TRUE(at::equal(steps[0], steps[1]));
  });
}

TEST(Stopping, ATimeLimitAloneGivesNoNumberOfStepsToDecayOver) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(30);
    auto options = test::train_options({});
    options.epochs = 0;
    options.max_time = std::chrono::milliseconds(1);
    const auto message = [&](const train::LearningRate& rate) {
      options.learning_rate = rate;
      return message_of<ConfigError>(
          [&] { train::Trainer(world, net, train::cross_entropy(), samples, options); });
    };
    for (const auto& rate : {train::linear_decay(), train::cosine_decay({.steps = 2}),
                             train::constant({.ratio = 0.1})}) {
      EXPECT_THAT(message(rate), HasSubstr("max_time alone does not say"));
    }
    EXPECT_EQ(message(train::constant({.steps = 2})), "nothing");
    options.max_steps = 4;
    EXPECT_EQ(message(train::linear_decay()), "nothing");
  });
}

struct AskingAtEpochs : Callback {
  void on_epoch_end(const RunState&, Requests& requests) override {
    requests.evaluate();
    requests.save();
  }
  void on_evaluate(const RunState& state, Requests&) override { evaluated.push_back(state.step); }
  std::vector<int64_t> evaluated;
};

TEST(Stopping, AnEvaluationAskedForAtAnEpochsEndIsMadeThereAndSavedWithIt) {
  const test::Folder folder;
  spawn(2, [&](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(40), held_out = test::train_samples(10);
    const auto asking = std::make_shared<AskingAtEpochs>();
    auto options = test::train_options({});
    options.epochs = 2;
    options.evaluation = {.data = held_out, .every_epochs = 0};
    options.saving = {.directory = folder / "run"};
    options.callbacks = {asking};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    const int64_t steps = trainer.run().state.step;
    EXPECT_THAT(asking->evaluated, ElementsAre(steps / 2, steps));
    for (const auto& one : checkpoint::list_checkpoints(folder / "run").checkpoints)
      EXPECT_EQ(one.metrics.count("loss"), 1u) << one.name;
  });
}

struct Signal : Callback {
  void on_step_end(const RunState& state, Requests&) override {
    if (state.rank == 1 && state.step == 3) raise(SIGUSR1);
  }
};

TEST(Stopping, APreemptedRunSavesLeavesAndGoesOn) {
  const test::Folder folder;
  for (int round = 0; round < 2; ++round) {
    spawn(2, [&](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(60);
      auto options = test::train_options({});
      options.saving = {.directory = folder / "run"};
      options.callbacks = {std::make_shared<Signal>()};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      const auto outcome = trainer.run();
      EXPECT_EQ(outcome.ended, round == 0 ? Ended::Preempted : Ended::Finished);
      EXPECT_EQ(outcome.exit_status(), round == 0 ? kRequeueStatus : 0);
      EXPECT_EQ(outcome.state.step, round == 0 ? 4 : 12);
      EXPECT_EQ(outcome.state.resumed_at, round == 0 ? -1 : 4);
    });
  }
}

// A loss that is `value` in one step on one rank.
train::LossOfBatch spoiled(TrainNet& net, const World& world, int64_t step, double value) {
  auto count = std::make_shared<int64_t>(0);
  return [&net, &world, step, value, count](const Batch& batch) {
    auto loss = nn::functional::cross_entropy(net->forward(batch.data), batch.target);
    const bool is_now = net->is_training() && (*count)++ == step && world.rank() == 1;
    return is_now ? loss * value : loss;
  };
}

TEST(NonFinite, ALossThatIsNanEndsTheRunOnAllRanksByName) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    const auto nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<std::string> calls;
    const auto recorder = std::make_shared<Recorder>(calls);
    auto options = test::train_options({});
    options.callbacks = {recorder};
    train::Trainer trainer(world, net, spoiled(net, world, 2, nan), samples, options);
    EXPECT_THAT(message_of<Error>([&] { trainer.run(); }),
                AllOf(HasSubstr("[train] step 3: the loss is nan on rank 1"),
                      HasSubstr("NonFinite::Skip")));
    EXPECT_EQ(calls.back(), "failed2");
    EXPECT_THAT(recorder->error, HasSubstr("nan on rank 1"));
    world.group().barrier().wait();  // the group is as it was
  });
}

TEST(NonFinite, MayBeSkipped) {
  for (const auto& [feature, max_grad_norm] : {std::pair("sgd", 1.0), std::pair("fp16", 1.0),
                                               std::pair("sgd", 0.0), std::pair("fp16", 0.0)}) {
    spawn(2, [&](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(60);
      auto options = test::train_options({{feature}});
      options.non_finite = train::NonFinite::Skip;
      options.max_grad_norm = max_grad_norm;
      const auto inf = std::numeric_limits<double>::infinity();
      train::Trainer trainer(world, net, spoiled(net, world, 2, inf), samples, options);
      const auto outcome = trainer.run();
      EXPECT_GE(outcome.state.skipped, 1);
      EXPECT_EQ(outcome.state.step, 12);
      for (const auto& one : net->parameters()) EXPECT_TRUE(one.isfinite().all().item<bool>());
    });
  }
}

TEST(Failing, AnExceptionOnOneRankEndsAllWithItsReason) {
  spawn(3, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    int64_t calls = 0;
    train::Trainer trainer(
        world, net,
        [&](const Batch& batch) -> at::Tensor {
          if (++calls == 3 && world.rank() == 2) throw std::runtime_error("a bad sample");
          return nn::functional::cross_entropy(net->forward(batch.data), batch.target);
        },
        samples, test::train_options({}));
    const auto text = message_of([&] { trainer.run(); });
    if (world.rank() == 2) {
      EXPECT_EQ(text, "a bad sample");
    } else {
      EXPECT_THAT(text, HasSubstr("rank 2 ended the training in step 3: a bad sample"));
    }
  });
}

struct Broken : torch::autograd::Function<Broken> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) {
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("no room on the device");
  }
};

TEST(Failing, AnExceptionInTheBackwardOfOneRankEndsAllWithItsReason) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    int64_t calls = 0;
    train::Trainer trainer(
        world, net,
        [&](const Batch& batch) -> at::Tensor {
          const bool is_broken = ++calls == 3 && world.rank() == 1;
          const auto out = net->forward(batch.data);
          return nn::functional::cross_entropy(is_broken ? Broken::apply(out) : out, batch.target);
        },
        samples, test::train_options({}));
    const auto text = message_of([&] { trainer.run(); });
    EXPECT_THAT(text,
                HasSubstr(world.rank() == 1 ? "no room on the device"
                                            : "rank 1 ended the training in step 3: no room"));
  });
}

TEST(Failing, ACallbackThatThrowsEndsAllRanks) {
  spawn(2, [](World& world) {
    struct Throws : Callback {
      void on_epoch_end(const RunState& state, Requests&) override {
        if (state.rank == 0) throw std::runtime_error("no space for a plot");
      }
    };
    TrainNet net;
    const auto samples = test::train_samples(60);
    auto options = test::train_options({});
    options.callbacks = {std::make_shared<Throws>()};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    EXPECT_THAT(message_of([&] { trainer.run(); }), HasSubstr("no space for a plot"));
  });
}

TEST(Options, ThatDifferBetweenRanksAreNamed) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(60);
    auto options = test::train_options({});
    options.accumulation = 1 + world.rank();
    EXPECT_THAT(
        message_of<ConfigError>(
            [&] { train::Trainer(world, net, train::cross_entropy(), samples, options); }),
        AllOf(HasSubstr("rank 0 has accumulation = 1"), HasSubstr("rank 1 has accumulation = 2")));
  });
}

TEST(Options, OptimizersThatDifferBetweenRanksAreNamed) {
  spawn(2, [](World& world) {
    const auto samples = test::train_samples(60);
    const int rank = world.rank();
    const auto refused = [&](train::MakeOptimizer optimizer, train::LearningRate rate) {
      TrainNet net;
      auto options = test::train_options({});
      options.optimizer = std::move(optimizer);
      options.learning_rate = std::move(rate);
      return message_of<ConfigError>(
          [&] { train::Trainer(world, net, train::cross_entropy(), samples, options); });
    };
    EXPECT_THAT(refused(train::sgd({.lr = rank == 0 ? 0.01 : 0.1}), train::constant({.steps = 5})),
                AllOf(HasSubstr("rank 0 has optimizer of model: learning rate 0.01 in group 0"),
                      HasSubstr("rank 1 has optimizer of model: learning rate 0.1 in group 0")));
    EXPECT_THAT(refused(rank == 0 ? train::sgd() : train::adam({.lr = 0.01}), train::constant()),
                AllOf(HasSubstr("SGD"), HasSubstr("Adam")));
    EXPECT_THAT(refused(train::sgd({.momentum = rank == 0 ? 0.9 : 0.8}), train::constant()),
                AllOf(HasSubstr("group/0/momentum = 0.9"), HasSubstr("group/0/momentum = 0.8")));
    EXPECT_THAT(
        refused(train::sgd(), rank == 0 ? train::linear_decay() : train::cosine_decay({}, 1e-3)),
        HasSubstr("at step 6"));
  });
}

}  // namespace
}  // namespace lockstep
