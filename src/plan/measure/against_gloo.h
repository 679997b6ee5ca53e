// What ranks communicate, over their transport and over libtorch's Gloo, measured in turns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/plan/bench.h"

namespace lockstep::plan {

// An all_reduce of float32 of one size. Seconds.
struct AllReduceTimes {
  int64_t bytes = 0;
  double group_memory = 0;  // of a tensor of Group::empty()
  double own_memory = 0;    // of any other
  double gloo = 0;
};

// A step of a perceptron: forward, backward, SGD. Seconds.
struct DdpTimes {
  std::string model = {};
  int64_t parameters = 0;
  int64_t batch = 0;  // samples of a rank
  double alone = 0;   // all ranks at once, without Ddp
  double ours = 0;    // with Ddp
  double gloo = 0;    // with Ddp over Gloo
};

// Every rank calls them, with a world of the same ranks over Gloo; the result is the same on all.
// Throw ConfigError for ranks on GPUs and for a single one.
std::vector<AllReduceTimes> compare_all_reduce(const comm::World& world, const comm::World& gloo,
                                               const BenchOptions& options = {});
std::vector<DdpTimes> compare_ddp(const comm::World& world, const comm::World& gloo,
                                  const BenchOptions& options = {});

// As tables for people, and as JSON.
std::string text_of(const std::vector<AllReduceTimes>& times, const comm::World& world);
std::string text_of(const std::vector<DdpTimes>& times, const comm::World& world);
std::string json_of(const std::vector<AllReduceTimes>& times, const comm::World& world);
std::string json_of(const std::vector<DdpTimes>& times, const comm::World& world);

}  // namespace lockstep::plan
