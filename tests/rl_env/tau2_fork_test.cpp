// tau2's process in a child by fork(), which has one of its own when it asks, and in a long job,
// whose scheduler signals all processes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <optional>

#include "lockstep/rl/tau2.h"
#include "support/fork.h"

namespace lockstep::rl {
namespace {

TEST(Tau2InAChild, LeavesItsParentsProcessAlone) {
  std::optional<Tau2Bridge> bridge(
      Tau2Options{.command = {"python3", LOCKSTEP_SOURCE_DIR "/tests/rl_env/tau2_fake.py"}});
  std::optional<Tau2Domain> domain(std::in_place, "airline", *bridge);
  auto world = domain->make();
  world->reset({.domain = "airline", .split = "base", .id = "0"}, 0);
  const int64_t pid = bridge->pid();
  test::in_a_child([&] {
    EXPECT_FALSE(domain->tasks("train").empty());
    EXPECT_NE(bridge->pid(), pid);
    EXPECT_FALSE(world->call({.id = "a", .name = "f", .arguments = "{}"}).content.empty());
  });
  test::in_a_child([&] {
    world.reset();
    domain.reset();
    bridge.reset();
  });
  EXPECT_FALSE(world->call({.id = "a", .name = "f", .arguments = "{}"}).content.empty());
  EXPECT_EQ(bridge->pid(), pid);
  EXPECT_EQ(bridge->deaths(), 0);
}

// `lockstep run` passes it on to a rank's process group, of which this process is one. The rank
// plays on, and saves.
TEST(Tau2OfAJob, PlaysOnAfterANoticeOfPreemption) {
  const Tau2Bridge bridge(
      {.command = {"python3", LOCKSTEP_SOURCE_DIR "/tests/rl_env/tau2_fake.py"}});
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make();
  world->reset({.domain = "airline", .split = "base", .id = "0"}, 0);
  for (const int notice : {SIGTERM, SIGUSR1}) kill(static_cast<pid_t>(bridge.pid()), notice);
  EXPECT_EQ(world->call({.id = "a", .name = "count"}).content, "1");
  EXPECT_EQ(bridge.deaths(), 0);
}

// What it writes to stderr is kept in memory.
TEST(Tau2OfAJob, KeepsTheEndOfWhatAProcessSays) {
  const Tau2Bridge bridge(
      {.command = {"python3", LOCKSTEP_SOURCE_DIR "/tests/rl_env/tau2_fake.py"}});
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make();
  world->reset({.domain = "airline", .split = "base", .id = "0"}, 0);
  for (int i = 0; i < 8; ++i) world->call({.id = "a", .name = "talk"});
  EXPECT_LT(std::filesystem::file_size(fmt::format("/proc/{}/fd/2", bridge.pid())), 3 << 20);
}

// As while it writes: it went on where it was, behind as many zeros.
TEST(Tau2OfAJob, WritesFromTheBeginningOnceItsWordsAreForgotten) {
  const Tau2Bridge bridge(
      {.command = {"python3", LOCKSTEP_SOURCE_DIR "/tests/rl_env/tau2_fake.py"}});
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make();
  world->reset({.domain = "airline", .split = "base", .id = "0"}, 0);
  const auto words = fmt::format("/proc/{}/fd/2", bridge.pid());
  for (int i = 0; i < 2; ++i) {
    std::filesystem::resize_file(words, 0);
    world->call({.id = "a", .name = "whisper"});
    EXPECT_EQ(std::filesystem::file_size(words), 1001u);
  }
}

}  // namespace
}  // namespace lockstep::rl
