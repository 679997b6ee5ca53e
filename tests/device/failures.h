// What ranks with devices say of calls that fail or do not fit, over any transport for devices.
#pragma once

#include <gmock/gmock.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "device/on_device.h"

namespace lockstep::test {

inline at::Tensor ones_there(const World& world, int64_t count) {
  return at::ones({count}).to(world.device());
}

// What this process has mapped.
inline std::string maps() {
  std::stringstream text;
  text << std::ifstream("/proc/self/maps").rdbuf();
  return text.str();
}

// Starts an all_reduce, reads its result, which a failure releases, and says what the group then
// throws.
inline std::string fate_of_all_reduce(World& world, int64_t count,
                                      const comm::CallOptions& options = {}) {
  return message_of([&] {
    at::Tensor data = ones_there(world, count);
    world.group().all_reduce(data, ReduceOp::Sum, options).wait();
    (void)data.cpu();
    world.group().barrier().wait();
  });
}

// spawn_on_device() or spawn_on_ipc().
using SpawnRanks = std::vector<int>(int, const std::function<void(World&)>&, SpawnOptions);

inline void expect_different_calls_are_quoted(SpawnRanks& spawn) {
  using testing::HasSubstr;
  spawn(2,
        [](World& world) {
          const auto start = std::chrono::steady_clock::now();
          EXPECT_THAT(fate_of_all_reduce(world, 4 + world.rank()),
                      testing::AllOf(HasSubstr("float32 x 4"), HasSubstr("float32 x 5")));
          // Of a deadline of 60 s.
          EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
        },
        {});
}

inline void expect_different_collectives_are_quoted(SpawnRanks& spawn) {
  using testing::HasSubstr;
  spawn(2,
        [](World& world) {
          const std::string said = message_of([&] {
            at::Tensor data = ones_there(world, 4);
            comm::Work work =
                world.rank() == 0 ? world.group().all_reduce(data) : world.group().broadcast(data);
            work.wait();
            (void)data.cpu();
            world.group().barrier().wait();
          });
          EXPECT_THAT(said, testing::AllOf(HasSubstr("all_reduce #1"), HasSubstr("broadcast #1")));
        },
        {});
}

inline void expect_parts_that_do_not_fit_are_refused(SpawnRanks& spawn) {
  spawn(2,
        [](World& world) {
          const std::string said = message_of([&] {
            std::vector<at::Tensor> all;
            if (world.rank() == 0) all = {ones_there(world, 2), ones_there(world, 2)};
            world.group().gather(all, ones_there(world, 2 + world.rank())).wait();
            world.group().barrier().wait();
          });
          EXPECT_THAT(said,
                      testing::HasSubstr("gather #1 (root 0, float32 x 2) does not fit: rank 1 "
                                         "sends 12 bytes where rank 0 expects 8"));
        },
        {});
}

}  // namespace lockstep::test
