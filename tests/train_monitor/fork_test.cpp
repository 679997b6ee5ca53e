// A RunMonitor in a child by fork().
#include "support/fork.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>

#include "lockstep/train/monitor.h"
#include "lockstep/train/run_history.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::train {
namespace {

TEST(MonitorInAChild, ReportsNothing) {
  const test::Folder folder;
  test::spawn(1, [&](comm::World& world) {
    std::optional<RunMonitor> monitor(
        std::in_place, world,
        MonitorOptions{.directory = folder.path(), .every_steps = 1, .trace_steps = {1, 10}});
    monitor->step({.loss = 1, .samples = 1});
    test::in_a_child([&] {
      monitor->event("child");
      monitor.reset();
      EXPECT_FALSE(std::filesystem::exists(folder / "trace.json"));
    });
    monitor->step({.loss = 1, .samples = 1});
    monitor.reset();
    EXPECT_TRUE(std::filesystem::exists(folder / "trace.json"));
    EXPECT_EQ(read_run(folder / "metrics.jsonl").reports, 2);
  });
}

}  // namespace
}  // namespace lockstep::train
