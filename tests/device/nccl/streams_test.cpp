// The order of operations on a device: after what the caller has enqueued, before what it enqueues
// next.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <sched.h>

#include <latch>

#include "device/nccl/of_one.h"
#include "device/on_device.h"

namespace lockstep::test {
namespace {

using comm::Work;

TEST(NcclStreams, AnOperationBeginsAfterWhatTheCallerHasEnqueued) {
  spawn_on_device(2, [](World& world) {
    at::Tensor data = at::zeros({1000}).to(world.device());
    std::latch late(1);
    fake::enqueue(fake::current_stream(), [&] { late.wait(); });
    data.fill_(world.rank() + 1);  // behind it
    Work work = world.group().all_reduce(data);
    // Neither starting nor waiting blocks the host.
    EXPECT_FALSE(work.is_completed());
    work.wait();
    late.count_down();
    EXPECT_EQ(data.cpu().sum().item<float>(), 3000);
  });
}

// What tests/device/on_gpu has on one real GPU.
TEST(NcclStreams, AGroupOfOneRankKeepsTheOrderToo) {
  spawn_on_device(1, [](World& world) {
    const Group group = nccl_of_one(world.device());
    EXPECT_EQ(group.backend(), "nccl");
    fake::shut_gate();
    at::Tensor data = at::zeros({1000}).to(world.device());
    data.fill_(3);
    Work work = group.all_reduce(data);
    work.wait();
    at::Tensor after = data * 2;
    EXPECT_EQ(after.cpu().sum().item<float>(), 6000);
    at::Tensor gathered = at::zeros({1000}).to(world.device());
    group.all_gather(gathered, after).wait();
    EXPECT_EQ(gathered.cpu().sum().item<float>(), 6000);
    group.barrier().wait();
  });
}

TEST(NcclStreams, WhatFollowsAWaitBeginsAfterTheOperation) {
  spawn_on_device(2, [](World& world) {
    fake::shut_gate();
    at::Tensor data = at::full({1000}, world.rank() + 1.0f).to(world.device());
    Work work = world.group().all_reduce(data);
    at::Tensor before = data.clone();  // nothing waits: the operation has not begun
    EXPECT_EQ(before.cpu().sum().item<float>(), 1000.0f * static_cast<float>(world.rank() + 1));
    EXPECT_EQ(fake::held_back(), 1);
    EXPECT_FALSE(work.is_completed());
    work.wait();
    at::Tensor after = data * 2;
    EXPECT_EQ(after.cpu().sum().item<float>(), 6000);
    EXPECT_TRUE(work.is_completed());
  });
}

TEST(NcclStreams, TheStreamThatIsCurrentInWaitIsTheOneThatWaits) {
  spawn_on_device(2, [](World& world) {
    fake::shut_gate();
    const c10::impl::VirtualGuardImpl device(world.device().type());
    const c10::Stream other = device.getStreamFromGlobalPool(world.device());
    at::Tensor data = at::ones({1000}).to(world.device());
    Work work = world.group().all_reduce(data);
    const c10::StreamGuard guard(other);
    work.wait();
    EXPECT_EQ(data.cpu().sum().item<float>(), 2000);
  });
}

// What the caller lets go of early is kept until the device is done with it; its memory would be
// overwritten otherwise.
TEST(NcclStreams, TensorsAreKeptUntilTheDeviceIsDone) {
  spawn_on_device(2, [](World& world) {
    fake::shut_gate();
    at::Tensor data = at::zeros({5000}).to(world.device());
    {
      at::Tensor mine = at::full({5000}, world.rank() + 1.0f).to(world.device());
      (void)world.group().broadcast(world.rank() == 0 ? mine : data, 0);
    }
    // Memory that was let go of is overwritten in the order of its stream: by now.
    fake::current_stream().synchronize();
    fake::open_gate();
    world.group().barrier().wait();
    if (world.rank() == 1) {
      EXPECT_EQ(data.cpu().sum().item<float>(), 5000);
    }
  });
}

TEST(NcclStreams, ADroppedOperationIsFinishedAllTheSame) {
  spawn_on_device(2, [](World& world) {
    at::Tensor data = at::ones({1000}).to(world.device()), next = at::ones({10}).to(world.device());
    { const Work dropped = world.group().all_reduce(data); }
    world.group().all_reduce(next).wait();
    EXPECT_EQ(data.cpu().sum().item<float>(), 2000);
  });
}

TEST(NcclStreams, ABarrierIsCompletedOnceTheDeviceIsIdle) {
  spawn_on_device(2, [](World& world) {
    at::Tensor data = at::ones({1000}).to(world.device());
    std::latch late(1);
    fake::enqueue(fake::current_stream(), [&] { late.wait(); });
    world.group().all_reduce(data).wait();
    Work barrier = world.group().barrier();
    EXPECT_FALSE(barrier.is_completed());
    late.count_down();
    while (!barrier.is_completed()) sched_yield();
    barrier.wait();
  });
}

// Calls for both, in any order, and many under way.
TEST(NcclStreams, CallsForCpuAndDeviceMayBeMixed) {
  spawn_on_device(3, [](World& world) {
    fake::shut_gate();
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 60; ++i) {
      tensors.push_back(at::full({100 + i}, world.rank() + i, at::kFloat));
      if (i % 3 != 0) tensors.back() = tensors.back().to(world.device());
      works.push_back(world.group().all_reduce(tensors.back(), ReduceOp::Max));
      (void)works[i / 2].is_completed();
    }
    for (int i = 59; i >= 0; --i) works[i].wait();
    for (int i = 0; i < 60; ++i)
      EXPECT_TRUE(at::equal(tensors[i].cpu(), at::full({100 + i}, 2.0f + i))) << i;
  });
}

// Messages are put off, but not beyond what waits for ranks that may need them first.
TEST(NcclStreams, AMessageGoesBeforeACallInWhichTheHostWaits) {
  spawn_on_device(2, [](World& world) {
    const Group& group = world.group();
    const auto expect_sent_before = [&](const auto& call) {
      const at::Tensor data = at::full({4}, world.rank() + 1.0f).to(world.device());
      if (world.rank() == 0) {
        Work sent = group.send(data, 1);
        call();
        sent.wait();
      } else {
        group.recv(data, 0).wait();
        EXPECT_EQ(data.cpu().sum().item<float>(), 4);  // the host waits for the message
        call();
      }
    };
    expect_sent_before([&] {
      const at::Tensor part = at::ones({world.rank() + 1}).to(world.device());
      std::vector<at::Tensor> parts;
      for (int r = 0; world.rank() == 0 && r < 2; ++r)
        parts.push_back(at::zeros({r + 1}).to(world.device()));
      group.gather(parts, part).wait();
    });
    expect_sent_before([&] { (void)group.empty({4}, at::kCPU); });
    expect_sent_before([&] { (void)group.shared({4}); });
  });
}

TEST(NcclStreams, GroupMemoryIsRegistered) {
  spawn_on_device(2, [](World& world) {
    void* library = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_NOLOAD);
    ASSERT_NE(library, nullptr);
    const auto registered = reinterpret_cast<int64_t (*)()>(dlsym(library, "fakeNcclRegistered"));
    const auto options = at::TensorOptions(world.device()).dtype(at::kFloat);
    at::Tensor small = world.group().empty({16}, options);
    EXPECT_EQ(registered(), 0);
    at::Tensor memory = world.group().empty({1 << 20}, options);
    EXPECT_EQ(registered(), 4 << 20);
    EXPECT_EQ(memory.device(), world.device());
    EXPECT_EQ(memory.cpu().abs().sum().item<float>(), 0);
    memory.fill_(1);
    world.group().all_reduce(memory).wait();
    EXPECT_EQ(memory.sum().cpu().item<float>(), 2 << 20);
    memory.reset();
    small.reset();
    world.group().barrier().wait();
    world.group().all_reduce(at::ones({4}).to(world.device())).wait();  // lets go of what is over
    EXPECT_EQ(registered(), 0);
    EXPECT_TRUE(world.group().empty({4}).is_cpu());
    EXPECT_FALSE(world.group().shared({4}, options).defined());
  });
}

// Also when its last call used its own memory.
TEST(NcclStreams, AGroupAndItsMemoryGoInAnyOrder) {
  spawn_on_device(2, [](World& world) {
    void* library = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_NOLOAD);
    ASSERT_NE(library, nullptr);
    const auto allocations = reinterpret_cast<int64_t (*)()>(dlsym(library, "fakeNcclAllocations"));
    at::Tensor memory = world.group().empty({1 << 20}, world.device());
    ASSERT_EQ(allocations(), 1);
    Group group = world.group().split(0, world.rank());
    at::Tensor other = group.empty({1 << 20}, world.device());
    group.all_reduce(other).wait();
    (void)other.cpu();
    group = {};
    other.reset();
    EXPECT_EQ(allocations(), 1);
    world.group().all_reduce(memory).wait();
    (void)memory.cpu();
    memory.reset();
    world = World::solo();
    EXPECT_EQ(allocations(), 0);
  });
}

}  // namespace
}  // namespace lockstep::test
