// Ranks in tests: real processes, forked from a parent that has never run a torch operation.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::test {

struct SpawnOptions {
  // "auto", "shm", "gloo", "host-then-net".
  std::string backend = "auto";
  // hosts[r]: on which pretended host rank r is; ranks of different ones do not share memory.
  // Empty: all on one.
  std::vector<int> hosts = {};
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  // Ranks that the test expects not to end well, as one that kills itself.
  std::vector<int> doomed = {};
};

// Runs `body` on `ranks` processes, each with a World of them all, on one thread. Every failed
// EXPECT and every exception of a rank that is not doomed fails the test with the rank's number.
// Returns the wait status of each.
std::vector<int> spawn(int ranks, const std::function<void(World&)>& body,
                       const SpawnOptions& options = {});

// For tests on several worlds: named "shm4", "auto4_0_0_1_1".
struct Ranks {
  std::string backend;
  int count;
  std::vector<int> hosts = {};

  std::string name() const;
};
inline std::string name_of(const testing::TestParamInfo<Ranks>& test) { return test.param.name(); }
inline std::vector<int> spawn(const Ranks& ranks, const std::function<void(World&)>& body) {
  return spawn(ranks.count, body, {.backend = ranks.backend, .hosts = ranks.hosts});
}

// The same without a World: the ranks find the variables of a launcher in their environment.
std::vector<int> spawn_bare(int ranks, const std::function<void(int rank)>& body,
                            const SpawnOptions& options = {});

// Runs `body` on one rank, to keep what it does to libtorch out of this process.
template <class Body>
void isolated(const Body& body) {
  spawn(1, [&](World&) { body(); });
}

}  // namespace lockstep::test
