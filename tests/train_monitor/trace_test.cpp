// The trace of chosen steps of a loop of a program's own.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/train/monitor.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::train {
namespace {

using nlohmann::json;
using test::spawn;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

class Trace : public testing::Test {
 protected:
  json read() const { return json::parse(std::ifstream(folder_ / "trace.json")); }

  const test::Folder folder_;
};

// A training step that does something of every kind.
void make_step(Ddp& ddp, torch::nn::Linear& net) {
  at::Tensor input;
  {
    const flight::Span data(flight::Activity::Data);
    input = at::ones({4, 8});
  }
  ddp.zero_grad();
  net->forward(input).sum().backward();
  const flight::Span saving(flight::Activity::Checkpoint);
}

struct Span {
  int64_t begin = 0, end = 0;  // ns
  std::string name;
};

// Spans of each (process, thread), in the order in which they are written.
std::map<std::pair<int, int>, std::vector<Span>> spans_of(const json& trace) {
  std::map<std::pair<int, int>, std::vector<Span>> all;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"].get<double>();
    all[{event["pid"], event["tid"]}].push_back(
        {std::llround(begin * 1e3), std::llround((begin + event["dur"].get<double>()) * 1e3),
         event["name"]});
  }
  return all;
}

TEST_F(Trace, HasWhatEveryRankDidInTheseSteps) {
  spawn(2, [&](World& world) {
    at::manual_seed(1);
    torch::nn::Linear net(8, 2);
    Ddp ddp(net, world);
    RunMonitor monitor(world,
                       {.directory = folder_.path(), .every_steps = 4, .trace_steps = {3, 4}});
    for (int step = 0; step < 6; ++step) {
      make_step(ddp, net);
      monitor.step({});
    }
    monitor.finish();
  });
  const json trace = read();
  std::map<int, std::set<std::string>> kinds, steps;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    kinds[event["pid"]].insert(event["cat"]);
    if (event["cat"] == "step") steps[event["pid"]].insert(event["name"]);
  }
  ASSERT_EQ(kinds.size(), 2u);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(kinds[rank], IsSupersetOf({"step", "operator", "bucket", "collective", "wait",
                                           "data", "checkpoint"}))
        << "rank " << rank;
    EXPECT_EQ(steps[rank], (std::set<std::string>{"step 3", "step 4"}));
  }
  for (const auto& [track, spans] : spans_of(trace)) {
    for (size_t a = 0; a < spans.size(); ++a) {
      EXPECT_LE(spans[a].begin, spans[a].end);
      for (size_t b = a + 1; b < spans.size(); ++b) {
        const Span &one = spans[a], &other = spans[b];
        // A double of microseconds since 1970 has steps of a quarter.
        constexpr int64_t kRounding = 1000;
        const bool apart = one.end <= other.begin + kRounding || other.end <= one.begin + kRounding;
        const bool inside =
            (one.begin <= other.begin + kRounding && other.end <= one.end + kRounding) ||
            (other.begin <= one.begin + kRounding && one.end <= other.end + kRounding);
        EXPECT_TRUE(apart || inside)
            << one.name << " and " << other.name << " of rank " << track.first;
      }
    }
  }
}

TEST_F(Trace, ARunThatEndsBeforeLeavesWhatRankZeroDid) {
  testing::internal::CaptureStderr();
  spawn(2, [&](World& world) {
    at::manual_seed(1);
    torch::nn::Linear net(8, 2);
    Ddp ddp(net, world);
    RunMonitor monitor(world, {.directory = folder_.path(), .trace_steps = {1, 1000}});
    make_step(ddp, net);
    monitor.step({});
    monitor.finish();
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("the run ended after step 1"));
  const json trace = read();
  std::set<int> ranks;
  for (const auto& event : trace["traceEvents"]) ranks.insert(event["pid"].get<int>());
  EXPECT_EQ(ranks, (std::set<int>{0}));
}

TEST_F(Trace, ARunThatEndsBeforeItsFirstStepSaysSo) {
  testing::internal::CaptureStderr();
  spawn(2, [&](World& world) {
    RunMonitor monitor(world, {.directory = folder_.path(), .trace_steps = {100, 110}});
    monitor.step({});
    monitor.finish();
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("the run ended after step 1, and trace_steps begin with step 100"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "trace.json"));
}

TEST_F(Trace, StepsThatCannotBeTracedAreRefused) {
  spawn(1, [&](World& world) {
    EXPECT_THROW(RunMonitor(world, {.trace_steps = {1, 2}}), ConfigError);  // no directory
    EXPECT_THROW(RunMonitor(world, {.tensorboard = true}), ConfigError);
    for (const StepRange steps : {StepRange{0, 2}, StepRange{3, 2}, StepRange{1, 1001}}) {
      EXPECT_THROW(RunMonitor(world, {.directory = folder_.path(), .trace_steps = steps}),
                   ConfigError);
    }
    // Steps that were made before a restart are no error.
    RunMonitor monitor(world,
                       {.directory = folder_.path(), .resumed_at = 5, .trace_steps = {1, 2}});
    monitor.step({});
    monitor.finish();
  });
  EXPECT_FALSE(std::filesystem::exists(folder_ / "trace.json"));
}

}  // namespace
}  // namespace lockstep::train
