// RunMonitor in loops of a program's own: what the log of real ranks says.
#include "lockstep/train/monitor.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/train/run_history.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::train {
namespace {

using test::spawn;
using ::testing::HasSubstr;

class Monitor : public testing::Test {
 protected:
  const test::Folder folder_;
};

// Nothing that depends on timing is warned of.
constexpr WarningLimits kUntimed{.straggler = 1e9, .data_share = 2};

// The CPU time of this thread passes: what the machine does beside it does not count.
void work(int milliseconds) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
  };
  for (const double until = now() + milliseconds; now() < until;) {
  }
}

TEST_F(Monitor, ALoopOfAProgramsOwnLeavesALog) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.directory = folder_.path(),
                               .every_steps = 2,
                               .name = "net",
                               .config = {{"training.seed", "3"}},
                               .warnings = kUntimed});
    for (int step = 1; step <= 5; ++step) {
      EXPECT_EQ(monitor.is_next_reported(), step % 2 == 0);
      // Rank 1 has three times the samples of rank 0.
      const double loss = world.rank() == 0 ? 1.0 : 2.0;
      monitor.step({.loss = loss,
                    .samples = world.rank() == 0 ? 10 : 30,
                    .learning_rate = 0.1,
                    .epoch = 1,
                    .values = {{"temperature", 0.5}}});
    }
    EXPECT_EQ(monitor.last().step, 4);
    EXPECT_DOUBLE_EQ(*monitor.last().loss, 1.75);
    monitor.evaluation({{"accuracy", 0.9}});
    monitor.event("save", "step-4");
    monitor.finish();
  });
  const RunHistory run = read_run(folder_.path());
  EXPECT_EQ(run.skipped_lines, 0) << run.first_fault;
  ASSERT_EQ(run.starts.size(), 1u);
  EXPECT_EQ(run.starts[0].ranks, 2);
  EXPECT_EQ(run.starts[0].name, "net");
  EXPECT_EQ(run.starts[0].hosts.size(), 2u);
  EXPECT_EQ(run.starts[0].config.at("training.seed"), "3");
  EXPECT_NE(run.starts[0].environment.at("libtorch"), "");
  EXPECT_EQ(run.reports, 2);
  EXPECT_EQ(run.last->samples, 160);
  EXPECT_EQ(run.last->epoch, 1);
  EXPECT_EQ(run.last->values.at("temperature"), 0.5);
  EXPECT_EQ(run.loss.points()[0].mean, 1.75);
  ASSERT_EQ(run.ranks.size(), 2u);
  EXPECT_GT(run.ranks[1].most_memory, 10 << 20);
  EXPECT_EQ(run.evaluations.at("accuracy").points()[0].mean, 0.9);
  ASSERT_EQ(run.events.size(), 1u);
  EXPECT_EQ(run.events[0].text, "step-4");
  ASSERT_TRUE(run.end);
  EXPECT_EQ(run.end->outcome, "finished");
  EXPECT_EQ(run.end->step, 5);
}

TEST_F(Monitor, TheMeanLossIsOfAllStepsAndRanksByTheirSamples) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.every_steps = 2, .warnings = kUntimed});
    const bool is_first = world.rank() == 0;
    monitor.step({.loss = is_first ? 1.0 : 2.0, .samples = is_first ? 10 : 30});
    monitor.step({.loss = is_first ? 5.0 : 4.0, .samples = is_first ? 20 : 20});
    EXPECT_DOUBLE_EQ(*monitor.last().loss, 4.5);
    EXPECT_DOUBLE_EQ(*monitor.last().mean_loss, (10 + 60 + 100 + 80) / 80.0);
    // One rank tells, and no samples; one step without a loss.
    monitor.step({.loss = is_first ? std::optional(3.0) : std::nullopt});
    monitor.step({});
    EXPECT_FALSE(monitor.last().loss);
    EXPECT_DOUBLE_EQ(*monitor.last().mean_loss, 3.0);
    monitor.step({});
    monitor.step({});
    EXPECT_FALSE(monitor.last().mean_loss);
  });
}

TEST_F(Monitor, TimeIsDividedAmongWhatItWasSpentOn) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.directory = folder_.path(), .every_steps = 1});  // it may well warn
    for (int step = 0; step < 3; ++step) {
      {
        const flight::Span data(flight::Activity::Data);
        work(4);
      }
      {
        const flight::Span saving(flight::Activity::Checkpoint);
        work(2);
      }
      if (world.rank() == 1) work(40);
      world.group().barrier().wait();
      monitor.step({});
    }
    const auto& ranks = monitor.last().ranks;
    for (const auto& rank : ranks) {
      EXPECT_GE(rank.data_seconds, 0.004);
      EXPECT_GE(rank.checkpoint_seconds, 0.002);
      EXPECT_LE(rank.communication_seconds + rank.data_seconds + rank.checkpoint_seconds,
                rank.step_seconds * 1.001);
    }
    EXPECT_GE(ranks[1].compute_seconds(), 0.040);
    EXPECT_FALSE(monitor.last().loss);
  });
}

TEST_F(Monitor, ASlowRankIsTheOneThatDoesNotWait) {
  // The ranks take turns in fixed order: what each waits for is not a matter of the machine's speed
  // but of the other's work.
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.directory = folder_.path(), .every_steps = 2});
    for (int step = 0; step < 6; ++step) {
      work(world.rank() == 1 ? 30 : 1);
      world.group().barrier().wait();
      monitor.step({});
    }
    monitor.finish();
  });
  const RunHistory run = read_run(folder_.path());
  EXPECT_GT(run.ranks[1].working_seconds(), run.ranks[0].working_seconds());
  bool is_named = false;
  for (const auto& event : run.events) is_named |= event.kind == "warning" && event.rank == 1;
  EXPECT_TRUE(is_named);
}

TEST_F(Monitor, ALossThatIsNotFiniteIsNamedWithStepRankAndParameter) {
  spawn(2, [&](World& world) {
    torch::nn::Linear net(2, 1);
    const Ddp ddp(net, world);
    RunMonitor monitor(
        world,
        {.directory = folder_.path(), .every_steps = 4, .warnings = kUntimed, .module = net});
    for (int step = 1; step <= 4; ++step) {
      auto input = torch::ones({1, 2});
      const bool is_bad = step == 3 && world.rank() == 1;
      if (is_bad) input[0][0] = std::numeric_limits<float>::quiet_NaN();
      net->zero_grad();
      const auto loss = net->forward(input).sum();
      loss.backward();
      {
        const torch::NoGradGuard guard;
        for (auto& parameter : net->parameters()) parameter -= 0.1 * parameter.grad();
      }
      // The program looks away in step 4: only step 3 tells.
      monitor.step({.loss = step == 3 ? loss.item<double>() : 1.0});
    }
    monitor.finish();
  });
  const RunHistory run = read_run(folder_.path());
  ASSERT_EQ(run.events.size(), 1u);
  EXPECT_EQ(run.events[0].text, "the loss is NaN at step 3; the first parameter is weight");
  EXPECT_EQ(run.events[0].rank, 1);
}

TEST_F(Monitor, ARestartedRunGoesOnInTheSameLog) {
  for (const int64_t resumed_at : {-1, 4}) {
    spawn(1,
          [&](World& world) {
            RunMonitor monitor(
                world, {.directory = folder_.path(), .every_steps = 1, .resumed_at = resumed_at});
            for (int i = 0; i < 6; ++i) monitor.step({.loss = 1.0});
            EXPECT_EQ(monitor.steps(), resumed_at < 0 ? 6 : 10);
            if (resumed_at < 0) throw Error("out of luck");  // ends as a run that fails
          },
          {.doomed = {resumed_at < 0 ? 0 : -1}});
  }
  const RunHistory run = read_run(folder_.path());
  ASSERT_EQ(run.starts.size(), 2u);
  EXPECT_EQ(run.starts[1].resumed_at, 4);
  EXPECT_EQ(run.last->step, 10);
  EXPECT_EQ(run.loss.points().size(), 10u);
  EXPECT_EQ(run.events[0].kind, "restart");
  EXPECT_EQ(run.end->outcome, "finished");
}

TEST_F(Monitor, OtherProgramsFindTheSameFigures) {
  spawn(2, [&](World& world) {
    testing::internal::CaptureStdout();
    RunMonitor monitor(world, {.directory = folder_.path(),
                               .every_steps = 1,
                               .name = "net",
                               .total_steps = 4,
                               .shown = Shown::Progress,
                               .tensorboard = true,
                               .open_metrics_file = folder_ / "lockstep.prom",
                               .warnings = kUntimed});
    monitor.step({.loss = 0.5});
    monitor.finish();
    const std::string shown = testing::internal::GetCapturedStdout();
    if (world.is_main()) {
      EXPECT_EQ(shown.rfind("epoch 1  step 1/4  25 %  loss 0.5000", 0), 0u) << shown;
      EXPECT_THAT(shown, HasSubstr(" left"));
    } else {
      EXPECT_EQ(shown, "");
    }
  });
  EXPECT_TRUE(std::filesystem::exists(folder_ / "lockstep.prom"));
  EXPECT_FALSE(std::filesystem::is_empty(folder_ / "tensorboard"));
}

TEST_F(Monitor, WhatCannotBeDoneIsSaidOnAllRanks) {
  spawn(2, [&](World& world) {
    EXPECT_THROW(RunMonitor(world, {.tensorboard = true}), Error);
    EXPECT_THROW(RunMonitor(world, {.every_steps = 0}), ConfigError);
    try {
      RunMonitor monitor(world, {.directory = "/proc/none"});
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("[metrics] cannot write /proc/none/metrics.jsonl"));
    }
  });
}

}  // namespace
}  // namespace lockstep::train
