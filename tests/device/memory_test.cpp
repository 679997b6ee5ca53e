// What of the device's memory a group keeps when the host is ahead of the device.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <latch>
#include <vector>

#include "device/cuda_ipc/on_ipc.h"
#include "device/on_device.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fsdp.h"

namespace lockstep::test {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

WeakStorage weak(const at::Tensor& tensor) {
  return WeakStorage(tensor.storage().getWeakStorageImpl());
}
int alive(const std::vector<WeakStorage>& all) {
  int count = 0;
  for (const auto& each : all) count += each.expired() ? 0 : 1;
  return count;
}

void gather_and_drop(World& world) {
  const at::Tensor own = at::ones({1000}).to(world.device());
  std::latch late(1);
  fake::enqueue(fake::current_stream(), [&] { late.wait(); });
  std::vector<WeakStorage> seen;
  for (int i = 0; i < 24; ++i) {
    const at::Tensor out = at::empty({1000 * world.size()}, own.options());
    seen.push_back(weak(out));
    world.group().all_gather(out, own).wait();
  }
  EXPECT_EQ(alive(seen), 0);
  late.count_down();
  world.group().barrier().wait();
}
TEST(MemoryOnDevice, GoesBackAtTheWaitWithNccl) { spawn_on_device(2, gather_and_drop); }
TEST(MemoryOnDevice, GoesBackAtTheWaitWithCudaIpc) { spawn_on_ipc(2, gather_and_drop); }

// The allocator is told which stream waits, or it would have the memory in the order of the one
// on which it was taken, which is ahead of the operation.
TEST(MemoryOnDevice, WhatAnotherStreamWaitsForIsNotGivenAwayBefore) {
  spawn_on_device(2, [](World& world) {
    const c10::impl::VirtualGuardImpl device(world.device().type());
    const c10::Stream other = device.getStreamFromGlobalPool(world.device());
    fake::shut_gate();
    const at::Tensor out = at::zeros({5000 * world.size()}).to(world.device());
    {
      const at::Tensor mine = at::full({5000}, world.rank() + 1.0f).to(world.device());
      const c10::Stream first = device.getStream(world.device());
      comm::Work work = world.group().all_gather(out, mine);
      {
        const c10::StreamGuard guard(other);
        work.wait();
      }
      device.synchronizeStream(first);
    }
    fake::enqueue(fake::current_stream(), [] {});
    const c10::StreamGuard guard(other);
    EXPECT_EQ(out.cpu().sum().item<float>(), 15000);
  });
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::vector<WeakStorage>* all) : seen(all) {
    weight = register_parameter("weight", torch::ones({64, 64}));
  }
  at::Tensor forward(const at::Tensor& x) {
    // A parameter's memory keeps the unit's.
    const auto* flat = static_cast<at::Tensor*>(weight.storage().data_ptr().get_context());
    seen->push_back(weak(*flat));
    at::Tensor y = at::empty_like(x);
    at::mul_out(y, x, weight.detach());
    return y;
  }
  std::vector<WeakStorage>* seen;
  at::Tensor weight;
};
TORCH_MODULE(Block);

struct BlocksImpl : torch::nn::Module {
  BlocksImpl() {
    for (int i = 0; i < 24; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(&seen)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) {
      x = lockstep::parallel::call(block, x);
      most = std::max(most, alive(seen));
    }
    return x;
  }
  std::vector<Block> blocks;
  std::vector<WeakStorage> seen;
  int most = 0;
};
TORCH_MODULE(Blocks);

TEST(MemoryOnDevice, FsdpHasFewUnitsWhereTheHostIsAhead) {
  spawn_on_device(2, [](World& world) {
    Blocks net;
    net->to(world.device());
    parallel::FsdpOptions options;
    options.share_memory = false;
    for (const auto& block : net->blocks) options.units.push_back(block.ptr());
    parallel::Fsdp fsdp(net, world.group(), options);
    const torch::NoGradGuard no_grad;
    const at::Tensor x = at::ones({64, 64}).to(world.device());
    lockstep::parallel::call(net, x);
    fake::memory_in_use();
    net->seen.clear();
    net->most = 0;
    std::latch late(1);
    fake::enqueue(fake::current_stream(), [&] { late.wait(); });
    lockstep::parallel::call(net, x);
    EXPECT_LE(net->most, 3);
    late.count_down();
    world.group().barrier().wait();
  });
}

}  // namespace
}  // namespace lockstep::test
