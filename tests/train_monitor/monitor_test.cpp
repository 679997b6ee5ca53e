// RunMonitor in loops of a program's own: what the log of real ranks says.
#include "lockstep/train/monitor.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

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

// Relative ones are of the working directory in which the monitor was made.
TEST_F(Monitor, FilesStayInTheirPlaceWhenTheProgramChangesItsWorkingDirectory) {
  std::filesystem::create_directory(folder_ / "elsewhere");
  spawn(1, [&](World& world) {
    std::filesystem::current_path(folder_.path());
    RunMonitor monitor(world, {.directory = "run",
                               .every_steps = 1,
                               .open_metrics_file = "last.prom",
                               .trace_steps = {.first = 1, .last = 2}});
    std::filesystem::current_path(folder_ / "elsewhere");
    for (int step = 1; step <= 3; ++step) monitor.step({.samples = 1});
    monitor.finish();
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "elsewhere"));
  for (const char* file : {"run/metrics.jsonl", "run/trace.json", "last.prom"}) {
    EXPECT_TRUE(std::filesystem::exists(folder_ / file)) << file;
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

// Rank 0 has no batch any more, as under a Join.
TEST_F(Monitor, ARankWithoutSamplesDoesNotMakeOthersCountEqually) {
  spawn(3, [&](World& world) {
    RunMonitor monitor(world, {.every_steps = 1, .warnings = kUntimed});
    const std::vector<StepFigures> figures{
        {}, {.loss = 2.0, .samples = 30}, {.loss = 4.0, .samples = 10}};
    monitor.step(figures[static_cast<size_t>(world.rank())]);
    EXPECT_DOUBLE_EQ(*monitor.last().loss, 2.5);
    EXPECT_DOUBLE_EQ(*monitor.last().mean_loss, 2.5);
  });
}

TEST_F(Monitor, ALossThatIsSkippedIsInNoMean) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.every_steps = 2, .warnings = kUntimed});
    const double bad = world.rank() == 0 ? std::nan("") : 2.0;
    monitor.step({.loss = bad, .samples = 1, .is_skipped = true});
    monitor.step({.loss = 3.0, .samples = 1, .is_skipped = true});
    EXPECT_DOUBLE_EQ(*monitor.last().mean_loss, (2.0 + 3.0 + 3.0) / 3);
    monitor.step({.loss = 1.0, .samples = 1});
    monitor.step({.loss = bad, .samples = 1});
    EXPECT_TRUE(std::isnan(*monitor.last().mean_loss));
  });
}

// The steps of all reports in the log, and how many steps each is about.
using Reported = std::vector<std::pair<int64_t, int64_t>>;
Reported reported(const std::string& folder) {
  Reported all;
  std::ifstream file(folder + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    double time = 0;
    std::string fault;
    const auto record = parse_log_line(line, time, fault);
    if (!record) ADD_FAILURE() << fault;
    const auto* const report = std::get_if<StepReport>(&*record);
    if (report == nullptr) continue;
    all.emplace_back(report->step, report->steps);
    EXPECT_NE(report->samples_per_second, 0);
  }
  return all;
}

TEST_F(Monitor, TheLastStepIsReported) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.directory = folder_.path(),
                               .every_steps = 3,
                               .total_steps = 5,
                               .tensorboard = true,
                               .open_metrics_file = folder_ / "lockstep.prom",
                               .warnings = kUntimed});
    for (int step = 1; step <= 5; ++step) {
      EXPECT_EQ(monitor.is_next_reported(), step == 3 || step == 5);
      monitor.step({.loss = 1.0 + world.rank(), .samples = 1});
    }
    EXPECT_EQ(monitor.last().step, 5);
    monitor.report_rest();  // there is none
    monitor.finish();
  });
  EXPECT_EQ(reported(folder_.path()), (Reported{{3, 3}, {5, 2}}));
  std::ifstream file(folder_ / "lockstep.prom");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(text, HasSubstr("} 5\n"));
}

TEST_F(Monitor, ARunThatEndsBetweenTwoReportsReportsTheRest) {
  spawn(2, [&](World& world) {
    const auto begun = std::chrono::steady_clock::now();
    RunMonitor monitor(world,
                       {.directory = folder_.path(), .every_steps = 50, .warnings = kUntimed});
    for (int step = 1; step <= 4; ++step) monitor.step({.loss = 1.0 + world.rank(), .samples = 2});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    work(20);  // what comes behind the last step is not of the steps
    monitor.report_rest();
    EXPECT_EQ(monitor.last().samples, 16);
    EXPECT_DOUBLE_EQ(*monitor.last().mean_loss, 1.5);
    EXPECT_EQ(monitor.last().ranks.size(), 2u);
    const auto mine = static_cast<size_t>(world.rank());
    EXPECT_LE(monitor.last().ranks[mine].step_seconds, took.count() / 4);
    EXPECT_LE(monitor.last().seconds, took.count());
    monitor.finish();
  });
  EXPECT_EQ(reported(folder_.path()), (Reported{{4, 4}}));
}

// Other ranks may be gone when a run fails: what rank 0 knows by itself, without a collective.
TEST_F(Monitor, ARunThatFailsReportsWhatRankZeroKnows) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world,
                       {.directory = folder_.path(), .every_steps = 50, .warnings = kUntimed});
    for (int step = 1; step <= 4; ++step) {
      monitor.step({.loss = 1.5, .samples = 4, .is_of_all_ranks = true});
    }
    if (world.rank() == 0) monitor.fail("rank 1 is gone");
  });
  EXPECT_EQ(reported(folder_.path()), (Reported{{4, 4}}));
  const RunHistory run = read_run(folder_.path());
  EXPECT_EQ(run.last->samples, 16);
  EXPECT_EQ(run.last->mean_loss, 1.5);
  EXPECT_TRUE(run.last->ranks.empty());
  EXPECT_TRUE(run.end->failed);
  EXPECT_EQ(run.end->step, 4);
}

// The loss of one rank is not that of all.
TEST_F(Monitor, WithFiguresOfItsOwnRankZeroAloneReportsNothing) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world,
                       {.directory = folder_.path(), .every_steps = 2, .warnings = kUntimed});
    for (int step = 1; step <= 3; ++step) monitor.step({.loss = 1.0 + world.rank(), .samples = 1});
    if (world.rank() == 0) monitor.fail("rank 1 is gone");
    monitor.report_rest();  // too late, and no rank waits for another
  });
  EXPECT_EQ(reported(folder_.path()), (Reported{{2, 2}}));
  EXPECT_EQ(read_run(folder_.path()).end->step, 3);
}

TEST_F(Monitor, FiguresOfAllRanksCountOnce) {
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.every_steps = 2, .warnings = kUntimed});
    for (const double loss : {1.0, 3.0}) {
      monitor.step({.loss = loss, .samples = 10, .is_of_all_ranks = true});
    }
    EXPECT_EQ(monitor.last().samples, 20);
    EXPECT_EQ(monitor.last().loss, 3);
    EXPECT_EQ(monitor.last().mean_loss, 2);
  });
}

TEST_F(Monitor, ARunThatGoesOnReportsNoStepTwice) {
  for (const auto& [resumed_at, steps] : {std::pair{-1, 5}, std::pair{5, 4}, std::pair{9, 0}}) {
    spawn(1, [&, from = resumed_at, count = steps](World& world) {
      RunMonitor monitor(world, {.directory = folder_.path(),
                                 .every_steps = 2,
                                 .resumed_at = from,
                                 .warnings = kUntimed});
      for (int i = 0; i < count; ++i) monitor.step({.loss = 1.0, .samples = 1});
      monitor.finish("preempted");
    });
  }
  EXPECT_EQ(reported(folder_.path()), (Reported{{2, 2}, {4, 2}, {5, 1}, {6, 1}, {8, 2}, {9, 1}}));
  EXPECT_EQ(read_run(folder_.path()).loss.points().size(), 6u);
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

// The other ranks waited for the one that had thrown.
TEST_F(Monitor, WhatIsWrongOnOneRankIsSaidOnAll) {
  const auto refusal = [&](World& world, const MonitorOptions& wrong, const MonitorOptions& right) {
    try {
      RunMonitor monitor(world, world.rank() == 1 ? wrong : right);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  spawn(2, [&](World& world) {
    const std::string folder = folder_.path();
    EXPECT_THAT(refusal(world, {.every_steps = 0}, {}), HasSubstr("every_steps is 0"));
    EXPECT_THAT(refusal(world, {.tensorboard = true}, {}), HasSubstr("tensorboard needs a dir"));
    EXPECT_THAT(refusal(world, {.trace_steps = {1, 2}}, {}), HasSubstr("trace_steps needs a dir"));
    EXPECT_THAT(refusal(world, {.directory = folder, .trace_steps = {3, 2}}, {.directory = folder}),
                HasSubstr("trace_steps are 3 to 2"));
    EXPECT_THAT(refusal(world, {.every_steps = 2}, {}), HasSubstr("rank 1 has every_steps = 2"));
    EXPECT_THAT(refusal(world, {.total_steps = 9}, {}), HasSubstr("rank 1 has total_steps = 9"));
    EXPECT_THAT(refusal(world, {.resumed_at = 9}, {}), HasSubstr("rank 1 has resumed_at = 9"));
    EXPECT_THAT(refusal(world, {.directory = folder, .trace_steps = {1, 2}}, {}),
                HasSubstr("rank 1 has trace_steps = 1 to 2"));
    world.group().barrier().wait();
  });
  EXPECT_FALSE(std::filesystem::exists(folder_ / "metrics.jsonl"));
}

}  // namespace
}  // namespace lockstep::train
