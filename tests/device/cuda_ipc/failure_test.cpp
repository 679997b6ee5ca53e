// What ranks over cuda_ipc say when one of them is lost, late or wrong, or cannot start.
#include <csignal>

#include "device/cuda_ipc/on_ipc.h"
#include "device/failures.h"
#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;
using comm::CallOptions;
using comm::Work;
using std::chrono::steady_clock;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

// With a device each, where kernels wait for the others, and with one for all, where streams do.
class CudaIpcFailure : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("FAKE_DEVICES", GetParam(), 1); }
  void TearDown() override { unsetenv("FAKE_DEVICES"); }
};
INSTANTIATE_TEST_SUITE_P(Devices, CudaIpcFailure, testing::Values("8", "1"));

// In an operation in two steps, in which its memory is being read.
TEST_P(CudaIpcFailure, AKilledPeerEndsTheOthers) {
  for (const int64_t count : {1000, 1000000}) {
    spawn_on_ipc(
        3,
        [&](World& world) {
          world.group().barrier().wait();
          if (world.rank() == 1) raise(SIGKILL);
          const auto start = steady_clock::now();
          EXPECT_THAT(fate_of_all_reduce(world, count, {.label = "bucket 3"}),
                      AllOf(HasSubstr(fmt::format(
                                "[cuda_ipc] all_reduce #1 (bucket 3, sum, float32 x {})", count)),
                            HasSubstr("lost rank 1: its process"), HasSubstr("has ended on rank")));
          EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
          EXPECT_THAT(message_of([&] { world.group().all_reduce(ones_there(world, 4)).wait(); }),
                      HasSubstr("this group has failed, make a new one"));
        },
        {.doomed = {1}});
  }
}

TEST_P(CudaIpcFailure, AStoppedPeerIsNamedByTheDeadline) {
  spawn_on_ipc(3, [](World& world) {
    if (world.rank() == 2) {
      // In a call for CPUs, from which it learns of the end.
      EXPECT_THAT(message_of([&] { world.group().recv(at::ones({4}), 0).wait(); }),
                  HasSubstr("timed out after 1.5 s"));
      return;
    }
    EXPECT_THAT(fate_of_all_reduce(world, 8, {.timeout = 1500ms, .label = "bucket 3"}),
                AllOf(HasSubstr("all_reduce #1 (bucket 3, sum, float32 x 8)"),
                      HasSubstr("rank 2 did not answer: it is outside this group's calls"),
                      AnyOf(HasSubstr("timed out after 1.5 s"), HasSubstr("was given up"))));
  });
}

// Kernels that a rank has enqueued still run after its group has failed there: what they leave must
// not reach the other ranks as sums.
TEST_P(CudaIpcFailure, WhoComesAfterTheOthersHaveGivenUpGetsNoWrongSums) {
  for (const auto& [count, shares] :
       {std::pair{1000, false}, {1'000'000, false}, {1'000'000, true}}) {
    spawn_on_ipc(2, [count = count, shares = shares](World& world) {
      // Each call has numbers of its own: those of a later one are wrong, too.
      std::vector<at::Tensor> all;
      for (int call = 0; call < 4; ++call) {
        all.push_back(shares ? world.group().empty({count}, world.device())
                             : at::empty({count}, world.device()));
        all.back().fill_(world.rank() + 1.0f + 10 * call);
      }
      const auto start_all = [&](std::chrono::milliseconds timeout) {
        std::vector<Work> works;
        for (const auto& each : all)
          works.push_back(world.group().all_reduce(each, comm::ReduceOp::Sum, {timeout}));
        return works;
      };
      if (world.rank() == 0) {
        message_of([&] {
          for (auto& work : start_all(500ms)) work.wait();
          (void)all.back().cpu();
        });
        world.store().set("rank 0 has timed out", "");
        world.store().get("is over");
        return;
      }
      world.store().get("rank 0 has timed out");
      message_of([&] {
        auto works = start_all(60s);
        for (int call = 0; call < 4; ++call) {
          works[call].wait();
          const at::Tensor sum = all[call].cpu();
          EXPECT_TRUE(world.group().failure() ||
                      at::equal(sum, at::full({count}, 3.0f + 20 * call)))
              << sum[0].item<float>() << ", " << sum[count - 1].item<float>();
        }
      });
      world.store().set("is over", "");
    });
  }
}

// A sum of what was not received, and a message of what was not summed.
TEST_P(CudaIpcFailure, NothingFollowsACallThatWasGivenUp) {
  for (const bool sends_first : {true, false}) {
    spawn_on_ipc(2, [&](World& world) {
      at::Tensor data = ones_there(world, 1000);
      const int other = 1 - world.rank();
      const auto message = [&](const CallOptions& options) {
        return (world.rank() == 0) == sends_first ? world.group().recv(data, other, 0, options)
                                                  : world.group().send(data, other, 0, options);
      };
      const auto both = [&](std::chrono::milliseconds timeout) {
        std::vector<Work> works;
        if (sends_first) works.push_back(message({timeout}));
        works.push_back(world.group().all_reduce(data, comm::ReduceOp::Sum, {timeout}));
        if (!sends_first) works.push_back(message({timeout}));
        for (auto& work : works) work.wait();
      };
      if (world.rank() == 0) {
        message_of([&] {
          if (sends_first) data.fill_(-100);
          both(500ms);
          (void)data.cpu();
        });
        world.store().set("rank 0 has timed out", "");
        world.store().get("is over");
        return;
      }
      world.store().get("rank 0 has timed out");
      message_of([&] {
        both(60s);
        const float got = data.cpu()[0].item<float>();
        EXPECT_TRUE(world.group().failure() || got == 2) << got;
      });
      world.store().set("is over", "");
    });
  }
}

TEST_P(CudaIpcFailure, DifferentCallsAreQuotedLongBeforeTheDeadline) {
  expect_different_calls_are_quoted(spawn_on_ipc);
}

// Kernels that meet would take the one's bytes for the other's.
TEST_P(CudaIpcFailure, DifferentCollectivesOfOneSizeAreQuotedOnBothSides) {
  expect_different_collectives_are_quoted(spawn_on_ipc);
}

TEST_P(CudaIpcFailure, AShorterMessageThanExpectedIsQuoted) {
  spawn_on_ipc(2, [](World& world) {
    const std::string said = message_of([&] {
      at::Tensor data = ones_there(world, 4 + world.rank());
      Work work = world.rank() == 0 ? world.group().send(data, 1) : world.group().recv(data, 0);
      work.wait();
      (void)data.cpu();
      world.group().barrier({.timeout = 10s}).wait();
    });
    EXPECT_NE(said, "nothing");
    if (world.rank() == 1) {
      EXPECT_THAT(said, HasSubstr("float32 x 5"));
    }
  });
}

TEST_P(CudaIpcFailure, UnequalPartsThatDoNotFitAreRefusedBeforeTheyAreSent) {
  expect_parts_that_do_not_fit_are_refused(spawn_on_ipc);
}

// Of a group that ended, well or not, no memory stays behind.
TEST_P(CudaIpcFailure, AGroupThatGoesAwayLeavesNoMemory) {
  spawn_on_ipc(2, [](World& world) {
    at::Tensor data = ones_there(world, 1000);
    world.group().all_reduce(data).wait();
    EXPECT_THAT(maps(), HasSubstr("fake-cuda"));
    world = World::solo();
    EXPECT_EQ(data.cpu().sum().item<float>(), 2000);
    EXPECT_THAT(maps(), Not(HasSubstr("memfd:fake-cuda")));
  });
  spawn_on_ipc(2, [](World& world) {
    if (world.rank() == 1) return;
    { const Work dropped = world.group().all_reduce(ones_there(world, 4)); }
    world = World::solo();
    EXPECT_THAT(maps(), Not(HasSubstr("memfd:fake-cuda")));
  });
}

// What World::from_env() throws on each of two ranks.
void expect_refusal(const std::vector<std::pair<std::string, std::string>>& of_rank_1,
                    const testing::Matcher<const std::string&>& said) {
  spawn_bare(2, [&](int rank) {
    setenv("LOCKSTEP_DEVICE", "privateuseone", 1);
    setenv("LOCKSTEP_BACKEND", "cuda_ipc", 1);
    setenv("LOCKSTEP_CUDA_DRIVER", FAKE_CUDA, 1);
    setenv("LOCKSTEP_NVRTC", FAKE_CUDA, 1);
    for (const auto& [name, value] : of_rank_1) {
      if (rank == 1) setenv(name.c_str(), value.c_str(), 1);
    }
    EXPECT_THAT(message_of([] { World::from_env({.timeout = 60s}); }), said) << "rank " << rank;
  });
}

TEST(CudaIpcStart, WhatOneRankLacksIsSaidOnAll) {
  expect_refusal({{"LOCKSTEP_NVRTC", "/nowhere/libnvrtc.so"}},
                 AllOf(HasSubstr("[cuda_ipc] NVRTC cannot be opened (/nowhere/libnvrtc.so: "),
                       HasSubstr("(rank 1)")));
  expect_refusal({{"LOCKSTEP_CUDA_DRIVER", "/nowhere/libcuda.so.1"}},
                 HasSubstr("[cuda_ipc] NVIDIA's driver cannot be opened (/nowhere/libcuda.so.1: "));
  expect_refusal({{"FAKE_NVRTC_FAILS", "1"}},
                 AllOf(HasSubstr("does not compile the kernels"),
                       HasSubstr("error: told by FAKE_NVRTC_FAILS"), HasSubstr("(rank 1)")));
  expect_refusal({{"FAKE_CUDA_VERSION", "61"}},
                 HasSubstr("(compute capability 6.1) is older than 7.0"));
  expect_refusal({{"FAKE_CUDA_NO_PEERS", "1"}},
                 AllOf(HasSubstr("[cuda_ipc] cuMemSetAccess, which devices without peer access "
                                 "refuse: operation not supported"),
                       HasSubstr("(rank 1)")));
}

TEST(CudaIpcStart, RanksTakeTheDevicesThatThereAreInTurn) {
  setenv("FAKE_DEVICES", "2", 1);
  spawn_on_ipc(3, [](World& world) {
    EXPECT_EQ(world.device().index(), world.rank() % 2);
    EXPECT_THAT(world.describe(), HasSubstr("3 ranks on 1 host, cuda_ipc"));
  });
  unsetenv("FAKE_DEVICES");
}

TEST(CudaIpcStart, AnOldDriverDoesNotKnowWhetherRanksTakeTurns) {
  setenv("FAKE_DEVICES", "1", 1);
  setenv("FAKE_CUDA_OLD", "1", 1);
  spawn_on_ipc(2, [](World& world) {
    const at::Tensor data = ones_there(world, 1000);
    world.group().all_reduce(data).wait();
    EXPECT_EQ(data.cpu().sum().item<float>(), 2000);
  });
  unsetenv("FAKE_CUDA_OLD");
  unsetenv("FAKE_DEVICES");
}

TEST(CudaIpcStart, SeveralHostsAreRefused) {
  spawn_bare(2,
             [](int) {
               setenv("LOCKSTEP_DEVICE", "privateuseone", 1);
               setenv("LOCKSTEP_BACKEND", "cuda_ipc", 1);
               EXPECT_THAT(
                   message_of([] { World::from_env({.timeout = 60s}); }),
                   HasSubstr("the cuda_ipc backend was asked for, but the 2 ranks are on 2 hosts"));
             },
             {.hosts = {0, 1}});
}

}  // namespace
}  // namespace lockstep::test
