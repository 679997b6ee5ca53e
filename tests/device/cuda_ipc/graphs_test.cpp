// Calls that are part of a CUDA graph, which is launched again and again without their host's code:
// the values, what they do beside other calls, and what a rank says that waits in one.
#include <gmock/gmock.h>

#include <chrono>
#include <csignal>
#include <vector>

#include "comm/device/capture.h"
#include "comm/device/memory.h"
#include "device/cuda_ipc/on_ipc.h"
#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;
using comm::ReduceOp;
using fake::Graph;
using std::chrono::steady_clock;
using testing::AllOf;
using testing::HasSubstr;

// A device for each rank, so that kernels wait.
void spawn_with_graphs(int ranks, const std::function<void(World&)>& body,
                       SpawnOptions options = {}) {
  comm::set_capture_question(&fake::is_capturing);
  spawn_on_ipc(ranks, body, options);
  comm::set_capture_question(nullptr);
}

float of(const World& world, int launch) {
  return static_cast<float>(world.rank() + 1 + 10 * launch);
}
float sum_over(const World& world, int launch) {
  const int n = world.size();
  return static_cast<float>(n * (n + 1) / 2 + 10 * launch * n);
}

class CudaIpcGraphs : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CudaIpcGraphs, testing::Values(2, 3),
                         testing::PrintToStringParamName());

// One meeting; two; an odd number of rounds of two, of which each takes the other stage; and memory
// that all ranks map. Other calls between two launches move on what the graph's begin with.
TEST_P(CudaIpcGraphs, EachLaunchIsACallOfItsOwn) {
  spawn_with_graphs(GetParam(), [](World& world) {
    const auto& group = world.group();
    for (const auto& [count, shares] : std::vector<std::pair<int64_t, bool>>{
             {1000, false}, {100'000, false}, {2'500'000 * world.size(), false}, {300'000, true}}) {
      const at::Tensor data =
          shares ? group.empty({count}, world.device()) : at::zeros({count}).to(world.device());
      const at::Tensor result = at::zeros({count}).to(world.device());
      const Graph graph([&] {
        group.all_reduce(data).wait();
        result.copy_(data);
      });
      const at::Tensor other = at::ones({70'000}).to(world.device());
      for (int launch = 0; launch < 5; ++launch) {
        data.fill_(of(world, launch));
        graph.launch();
        if (launch % 2 == 1) group.all_reduce(other).wait();
        const at::Tensor here = result.cpu();
        EXPECT_EQ(here.min().item<float>(), sum_over(world, launch)) << count << " " << launch;
        EXPECT_EQ(here.max().item<float>(), sum_over(world, launch)) << count << " " << launch;
      }
      EXPECT_EQ(other.cpu().max().item<float>(), world.size() * world.size());
    }
  });
}

// Without the host in between, so that a rank can be a launch ahead.
TEST_P(CudaIpcGraphs, LaunchesFollowEachOther) {
  spawn_with_graphs(GetParam(), [](World& world) {
    for (const int64_t count : {1000, 100'000}) {
      const at::Tensor value = at::ones({count}).to(world.device());
      const at::Tensor data = at::zeros({count}).to(world.device());
      std::vector<at::Tensor> results;
      const Graph graph([&] { world.group().all_reduce(data).wait(); });
      for (int launch = 0; launch < 20; ++launch) {
        data.copy_(value * of(world, launch));
        graph.launch();
        results.push_back(data.clone());
      }
      for (int launch = 0; launch < 20; ++launch)
        EXPECT_EQ(results[launch].cpu().mean().item<float>(), sum_over(world, launch)) << launch;
    }
  });
}

TEST_P(CudaIpcGraphs, EveryCollectiveAndMessagesOfSeveralChunks) {
  spawn_with_graphs(GetParam(), [](World& world) {
    const auto& group = world.group();
    const int n = world.size(), next = (world.rank() + 1) % n, last = (world.rank() + n - 1) % n;
    constexpr int64_t kCount = 200'000;  // four chunks of a message
    const auto there = [&](int64_t count) { return at::zeros({count}).to(world.device()); };
    const at::Tensor own = there(kCount), part = there(kCount), all = there(n * kCount),
                     turned = there(n * kCount), root = there(kCount), got = there(kCount),
                     lists = there(kCount);
    const Graph graph([&] {
      group.all_gather(all, own).wait();
      group.reduce_scatter(part, all).wait();
      group.all_to_all(turned, all).wait();
      root.copy_(own);
      group.broadcast(root, n - 1).wait();
      auto sent = group.send(own, next);
      auto received = group.recv(got, last);
      sent.wait();
      received.wait();
      group.gather(world.rank() == 0 ? all.chunk(n) : std::vector<at::Tensor>{}, own, 0).wait();
      group.scatter(lists, world.rank() == 0 ? all.chunk(n) : std::vector<at::Tensor>{}, 0).wait();
    });
    for (int launch = 0; launch < 3; ++launch) {
      own.fill_(of(world, launch));
      graph.launch();
      const auto value = [&](int rank) { return static_cast<float>(rank + 1 + 10 * launch); };
      EXPECT_EQ(part.cpu().mean().item<float>(), n * value(world.rank()));
      for (int rank = 0; rank < n; ++rank) {
        EXPECT_EQ(all.cpu().chunk(n)[rank].mean().item<float>(), value(rank));
        EXPECT_EQ(turned.cpu().chunk(n)[rank].mean().item<float>(), value(world.rank()));
      }
      EXPECT_EQ(root.cpu().mean().item<float>(), value(n - 1));
      EXPECT_EQ(got.cpu().mean().item<float>(), value(last));
      EXPECT_EQ(lists.cpu().mean().item<float>(), value(world.rank()));
    }
  });
}

std::string fate_of_launches(World& world, const Graph& graph, const at::Tensor& data) {
  return message_of([&] {
    graph.launch();
    (void)data.cpu();
    world.group().barrier().wait();
  });
}

TEST(CudaIpcGraphsFailure, AKilledPeerEndsALaunch) {
  spawn_with_graphs(
      3,
      [](World& world) {
        const at::Tensor data = at::ones({1000}).to(world.device());
        const Graph graph(
            [&] { world.group().all_reduce(data, ReduceOp::Sum, {.label = "in a graph"}).wait(); });
        graph.launch();
        (void)data.cpu();
        world.group().barrier().wait();
        if (world.rank() == 1) raise(SIGKILL);
        EXPECT_THAT(fate_of_launches(world, graph, data),
                    AllOf(HasSubstr("all_reduce #1 (in a graph, sum, float32 x 1000)"),
                          HasSubstr("lost rank 1: its process")));
        EXPECT_NE(world.group().failure(), std::nullopt);
      },
      {.doomed = {1}});
}

TEST(CudaIpcGraphsFailure, AnAbsentRankIsNamedByTheDeadline) {
  spawn_with_graphs(2, [](World& world) {
    const at::Tensor data = at::ones({100'000}).to(world.device());
    const Graph graph([&] { world.group().all_reduce(data, ReduceOp::Sum, {1500ms}).wait(); });
    if (world.rank() == 1) {
      EXPECT_THAT(message_of([&] { world.group().recv(at::ones({4}), 0).wait(); }),
                  HasSubstr("timed out after 1.5 s"));
      return;
    }
    EXPECT_THAT(fate_of_launches(world, graph, data),
                AllOf(HasSubstr("all_reduce #1"), HasSubstr("timed out after 1.5 s")));
  });
}

TEST(CudaIpcGraphsFailure, DifferentGraphsAreQuoted) {
  spawn_with_graphs(2, [](World& world) {
    const at::Tensor small = at::ones({10}).to(world.device()),
                     large = at::ones({200}).to(world.device());
    const Graph first([&] { world.group().all_reduce(small).wait(); });
    const Graph second([&] { world.group().all_reduce(large).wait(); });
    const auto start = steady_clock::now();
    EXPECT_THAT(world.rank() == 0 ? fate_of_launches(world, first, small)
                                  : fate_of_launches(world, second, large),
                AllOf(HasSubstr("float32 x 10)"), HasSubstr("float32 x 200)")));
    EXPECT_LT(steady_clock::now() - start, 30s);  // of a deadline of 60 s
  });
}

TEST(CudaIpcGraphsFailure, WhatNoGraphCanHoldIsRefused) {
  spawn_with_graphs(2, [](World& world) {
    const at::Tensor data = at::ones({8}).to(world.device());
    std::string of_barrier, of_empty, of_late_wait;
    comm::Work work;
    const Graph graph([&] {
      of_barrier = message_of([&] { world.group().barrier().wait(); });
      of_empty = message_of([&] { world.group().empty({1'000'000}, world.device()); });
      work = world.group().all_reduce(data);
      EXPECT_FALSE(work.is_completed());
      work.wait();
    });
    for (const auto& said : {of_barrier, of_empty})
      EXPECT_THAT(said, HasSubstr("the current stream is capturing a CUDA graph, and"));
    // The group goes on.
    world.group().barrier().wait();
    data.fill_(1);
    graph.launch();
    EXPECT_EQ(data.cpu().sum().item<float>(), 16);
    const at::Tensor other = at::ones({8}).to(world.device());
    EXPECT_THAT(message_of([&] {
                  comm::Work late;
                  try {
                    const Graph unjoined([&] { late = world.group().all_reduce(other); });
                  } catch (const c10::Error&) {
                  }
                  late.wait();
                }),
                HasSubstr("wait() belongs to the captured part"));
  });
}

// To wait for the device, as memory that all ranks map has to, would invalidate the capture.
TEST(CudaIpcGraphsFailure, MemoryThatIsLetGoOfInACaptureGoesWithTheNextCall) {
  spawn_with_graphs(2, [](World& world) {
    const at::Tensor data = at::ones({8}).to(world.device());
    std::weak_ptr<int> owner;
    {
      const auto kept = std::make_shared<int>(1);
      owner = kept;
      at::Tensor memory =
          comm::tensor_over(kept.get(), {1}, at::TensorOptions(world.device()), [kept](void*) {});
      const Graph graph([&] {
        memory.reset();
        world.group().all_reduce(data).wait();
      });
      EXPECT_EQ(kept.use_count(), 2);
    }
    EXPECT_FALSE(owner.expired());
    world.group().all_reduce(data).wait();
    EXPECT_TRUE(owner.expired());
  });
}

// Streams would wait for the values of the first launch.
TEST(CudaIpcGraphsFailure, RanksThatTakeTurnsOnADeviceHaveNone) {
  setenv("FAKE_DEVICES", "1", 1);
  spawn_with_graphs(2, [](World& world) {
    const at::Tensor data = at::ones({8}).to(world.device());
    const Graph graph([&] {
      EXPECT_THAT(message_of([&] { world.group().all_reduce(data).wait(); }),
                  AllOf(HasSubstr("[cuda_ipc] all_reduce sum: the current stream is capturing"),
                        HasSubstr("start MPS")));
    });
    world.group().all_reduce(data).wait();
    EXPECT_EQ(data.cpu().sum().item<float>(), 16);
  });
  unsetenv("FAKE_DEVICES");
}

}  // namespace
}  // namespace lockstep::test
