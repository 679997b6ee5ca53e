// What ranks with devices say when one of them is lost, late or wrong.
#include <c10/core/StreamGuard.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <thread>

#include "device/failures.h"
#include "device/nccl/of_one.h"
#include "lockstep/core/error.h"
#include "support/pretend_launcher.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;
using comm::CallOptions;
using comm::Work;
using std::chrono::steady_clock;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

TEST(NcclFailure, AKilledPeerEndsTheOthers) {
  spawn_on_device(
      3,
      [](World& world) {
        world.group().barrier().wait();
        if (world.rank() == 1) raise(SIGKILL);
        const auto start = steady_clock::now();
        EXPECT_THAT(fate_of_all_reduce(world, 1000, {.label = "bucket 3"}),
                    AllOf(HasSubstr("[nccl] all_reduce #1 (bucket 3, sum, float32 x 1000)"),
                          HasSubstr("lost rank 1: its process"), HasSubstr("has ended on rank")));
        EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
        EXPECT_THAT(message_of([&] { world.group().all_reduce(ones_there(world, 4)).wait(); }),
                    HasSubstr("this group has failed, make a new one"));
        EXPECT_THAT(message_of([&] { world.group().all_reduce(at::ones({4})).wait(); }),
                    HasSubstr("lost rank 1"));
      },
      {.doomed = {1}});
}

TEST(NcclFailure, TheLaunchersWordEndsTheWait) {
  PretendLauncher launcher(3);
  spawn_on_device(3, [&](World& world) {
    world.group().barrier().wait();
    const auto start = steady_clock::now();
    if (world.rank() == 2) {
      // Stays, though the launcher says that it is gone.
      launcher.control.record_exit(2, SIGKILL);
      launcher.control.report_failure();
      EXPECT_NE(message_of([&] { world.group().recv(at::ones({4}), 0).wait(); }), "nothing");
    } else {
      EXPECT_THAT(fate_of_all_reduce(world, 4), HasSubstr("rank 2 was killed by SIGKILL"));
    }
    EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
  });
}

TEST(NcclFailure, TheDeadlineNamesTheRankThatStaysAway) {
  spawn_on_device(3, [](World& world) {
    if (world.rank() == 2) {
      // Hears of it in a call for CPUs.
      EXPECT_THAT(message_of([&] { world.group().recv(at::ones({4}), 0).wait(); }),
                  HasSubstr("timed out after 1.5 s"));
      return;
    }
    EXPECT_THAT(fate_of_all_reduce(world, 8, {.timeout = 1500ms, .label = "bucket 3"}),
                AllOf(HasSubstr("all_reduce #1 (bucket 3, sum, float32 x 8)"),
                      HasSubstr("rank 2 did not answer: it is outside this group's calls"),
                      AnyOf(HasSubstr("timed out after 1.5 s"), HasSubstr("was aborted"))));
  });
}

// As by Ctrl-Z and `fg`: for longer than the call would wait.
TEST(NcclFailure, ARankThatIsStoppedCountsNotAsWaiting) {
  spawn_on_device(2, [](World& world) {
    const auto pids = world.group().all_gather_bytes(std::to_string(getpid()));
    const at::Tensor data = ones_there(world, 4);
    const CallOptions options{.timeout = 3s};
    if (world.rank() == 0) {
      Work work = world.group().all_reduce(data, ReduceOp::Sum, options);
      world.store().set("begun", "");
      work.wait();
    } else {
      world.store().wait({"begun"});
      kill(std::stoi(pids[0]), SIGSTOP);
      std::this_thread::sleep_for(4s);
      kill(std::stoi(pids[0]), SIGCONT);
      std::this_thread::sleep_for(300ms);  // in which it would give up
      world.group().all_reduce(data, ReduceOp::Sum, options).wait();
    }
    EXPECT_EQ(data.cpu().sum().item<float>(), 8);
    world.group().barrier().wait();
  });
}

TEST(NcclFailure, DifferentCallsAreQuotedLongBeforeTheDeadline) {
  expect_different_calls_are_quoted(spawn_on_device);
}

TEST(NcclFailure, DifferentCollectivesAreQuotedOnBothSides) {
  expect_different_collectives_are_quoted(spawn_on_device);
}

TEST(NcclFailure, UnequalPartsThatDoNotFitAreRefusedBeforeTheyAreSent) {
  expect_parts_that_do_not_fit_are_refused(spawn_on_device);
}

TEST(NcclFailure, WhatTheLibraryReportsEndsAllRanks) {
  spawn_on_device(2, [](World& world) {
    world.group().barrier().wait();
    if (world.rank() == 0) setenv("FAKE_NCCL_ASYNC_ERROR", "2", 1);
    const std::string said = message_of([&] {
      at::Tensor data = ones_there(world, 4);
      world.group().all_reduce(data).wait();
      (void)data.cpu();
      for (;;) {
        world.group().all_reduce(data).wait();
        (void)data.cpu();
      }
    });
    EXPECT_THAT(said, HasSubstr("remote process exited: told by FAKE_NCCL_ASYNC_ERROR"));
  });
}

// A kernel of the program's fails: rank 0's program gets the error, and rank 1's group names rank
// 0.
TEST(NcclFailure, ADeviceThatFailsEndsAllRanks) {
  const auto statuses = spawn_on_device(
      2,
      [](World& world) {
        const Group group = world.group().split(0, world.rank());
        at::Tensor data = ones_there(world, 1000);
        group.all_reduce(data).wait();
        (void)data.cpu();
        if (world.rank() == 0) {
          fake::shut_gate();  // the next call stays under way
          const Work work = group.all_reduce(data);
          fake::fail_device();
          while (!group.failure()) std::this_thread::sleep_for(1ms);
          EXPECT_THAT(message_of([&] { group.all_reduce(data).wait(); }),
                      HasSubstr("failed: the device has failed (CUDA error: device-side assert"));
          std::this_thread::sleep_for(1s);  // the others learn of it from this rank
        } else {
          EXPECT_THAT(message_of([&] {
                        group.all_reduce(data).wait();
                        (void)data.cpu();
                        for (;;) group.all_reduce(data).wait();
                      }),
                      HasSubstr("rank 0"));
        }
      },
      {.timeout = 20s});
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(NcclFailure, AGroupGoesAwayOnADeviceThatHasFailed) {
  spawn_on_device(1, [](World& world) {
    Group group = nccl_of_one(world.device());
    at::Tensor data = ones_there(world, 1000);
    group.all_reduce(data).wait();
    fake::fail_device();
    group = {};
  });
}

TEST(NcclFailure, WhatEndsTheCpusHalfEndsTheDevices) {
  spawn_on_device(2, [](World& world) {
    if (world.rank() == 0) {
      EXPECT_THAT(message_of([&] { world.group().barrier({.timeout = 200ms}).wait(); }),
                  HasSubstr("barrier"));
      EXPECT_THAT(message_of([&] { world.group().all_reduce(ones_there(world, 4)).wait(); }),
                  HasSubstr("barrier"));
    } else {
      EXPECT_THAT(fate_of_all_reduce(world, 4), HasSubstr("barrier"));
    }
  });
}

TEST(NcclFailure, AStartThatARankDoesNotJoinEndsAtTheDeadline) {
  spawn_on_device(2,
                  [](World& world) {
                    // Rank 1 is in a call of the whole group when rank 0 makes a part of it.
                    EXPECT_THAT(message_of([&] {
                                  if (world.rank() == 0) (void)world.group().split(0);
                                  if (world.rank() == 1) world.group().barrier().wait();
                                }),
                                testing::Not("nothing"));
                  },
                  {.timeout = 2s});
}

// Nobody waits for it, so nothing of it is owed to anybody.
TEST(NcclFailure, AGroupThatGoesAwayWithADroppedCallWaitsForNobody) {
  const auto start = steady_clock::now();
  spawn_on_device(2, [](World& world) {
    if (world.rank() == 1) return;
    { const Work dropped = world.group().all_reduce(ones_there(world, 4)); }
    world = World::solo();
  });
  EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
}

TEST(NcclFailure, AGroupThatGoesAwayFinishesWhatWasWaitedFor) {
  spawn_on_device(2, [](World& world) {
    at::Tensor data = ones_there(world, 1000);
    world.group().all_reduce(data).wait();
    world = World::solo();
    EXPECT_EQ(data.cpu().sum().item<float>(), 2000);
  });
}

}  // namespace
}  // namespace lockstep::test
