// tau2's process in a child by fork(), which has one of its own when it asks.
#include <gtest/gtest.h>

#include <memory>
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

}  // namespace
}  // namespace lockstep::rl
