// Many messages at once, long after the first ones; and the places of a device that several groups
// share.
#include <ATen/ATen.h>
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "comm/cuda_ipc/calls.h"
#include "comm/device/capture.h"
#include "device/cuda_ipc/on_ipc.h"

namespace lockstep::test {
namespace {

template <class Call>
Call of_fake(const char* name) {
  return reinterpret_cast<Call>(dlsym(dlopen(FAKE_CUDA, RTLD_NOW), name));
}

void send_then_receive(const World& world, int count, int64_t elements) {
  const int peer = 1 - world.rank();
  std::vector<at::Tensor> out, in;
  for (int i = 0; i < count; ++i) {
    out.push_back(
        at::full({elements}, static_cast<float>(1000 * world.rank() + i)).to(world.device()));
    in.push_back(at::zeros({elements}).to(world.device()));
  }
  std::vector<comm::Work> works;
  for (const auto& tensor : out) works.push_back(world.group().send(tensor, peer));
  for (const auto& tensor : in) works.push_back(world.group().recv(tensor, peer));
  comm::wait_all(works);
  for (int i = 0; i < count; ++i) {
    const auto expected = at::full({elements}, static_cast<float>(1000 * peer + i));
    EXPECT_TRUE(at::equal(in[static_cast<size_t>(i)].cpu(), expected)) << i;
  }
}

// More than a lane has room for, and than a kernel's arguments have.
TEST(CudaIpcMessages, AnyNumberMayBeSentBeforeTheFirstIsReceived) {
  spawn_on_ipc(2,
               [](World& world) {
                 send_then_receive(world, 33, 140'000);
                 send_then_receive(world, 100, 10'000);
                 send_then_receive(world, 2, 10'000);
               },
               {.timeout = std::chrono::seconds(20)});
}

TEST(CudaIpcMessages, ManyOfACudaGraphToo) {
  comm::set_capture_question(&fake::is_capturing);
  spawn_on_ipc(2, [](World& world) {
    const int peer = 1 - world.rank();
    const at::Tensor mine = at::zeros({100, 10}).to(world.device()),
                     theirs = at::zeros({100, 10}).to(world.device());
    const fake::Graph graph([&] {
      std::vector<comm::Work> works;
      for (int i = 0; i < 100; ++i) works.push_back(world.group().send(mine[i], peer));
      for (int i = 0; i < 100; ++i) works.push_back(world.group().recv(theirs[i], peer));
      comm::wait_all(works);
    });
    for (int launch = 1; launch < 4; ++launch) {
      mine.fill_(static_cast<float>(10 * launch + world.rank()));
      graph.launch();
      EXPECT_EQ(theirs.cpu().mean().item<float>(), static_cast<float>(10 * launch + peer));
    }
  });
  comm::set_capture_question(nullptr);
}

// It is sent before the graph is launched, and once.
TEST(CudaIpcMessages, OneThatWasPutOffBeforeACaptureIsNoPartOfTheGraph) {
  comm::set_capture_question(&fake::is_capturing);
  spawn_on_ipc(
      2,
      [](World& world) {
        const auto& group = world.group();
        const int peer = 1 - world.rank();
        const at::Tensor early = at::full({10}, 7.F).to(world.device()),
                         mine = at::zeros({10}).to(world.device()),
                         theirs = at::zeros({10}).to(world.device());
        comm::Work begun = world.rank() == 0 ? group.send(early, peer) : group.recv(theirs, peer);
        if (world.rank() == 1) {
          begun.wait();
          EXPECT_EQ(theirs.cpu().sum().item<float>(), 70);
        }
        const fake::Graph graph([&] {
          comm::Work sent = group.send(mine, peer), received = group.recv(theirs, peer);
          sent.wait();
          received.wait();
        });
        begun.wait();
        group.barrier().wait();
        for (int launch = 1; launch < 4; ++launch) {
          mine.fill_(static_cast<float>(10 * launch + world.rank()));
          graph.launch();
          EXPECT_EQ(theirs.cpu().mean().item<float>(), static_cast<float>(10 * launch + peer));
        }
      },
      {.timeout = std::chrono::seconds(20)});
  comm::set_capture_question(nullptr);
}

// A kernel of the sender's and one of the receiver's, as after `before` chunks.
void move_six_chunks(comm::cuda_ipc::U64 before) {
  using namespace comm::cuda_ipc;
  const auto run = of_fake<void (*)(const Messages*)>("fakeCudaRunMessages");
  ASSERT_NE(run, nullptr);
  const U64 bytes = memory_bytes(2, 4096);
  std::shared_ptr<char> memory[2];
  U32 over = 0;
  for (auto& each : memory) {
    each.reset(static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)), &free);
    std::memset(each.get(), 0, bytes);
  }
  auto& sender = *reinterpret_cast<Flags*>(memory[0].get());
  auto& receiver = *reinterpret_cast<Flags*>(memory[1].get());
  for (int lane = 0; lane < kLanes; ++lane)
    sender.sent[1][lane] = sender.taken[1][lane] = receiver.received[0][lane] = before;
  std::string from(6 * kChunkBytes, '\0'), to = from;
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 2654435761U >> 13);
  const auto side = [&](int rank) {
    Messages messages{};
    messages.peers = {{memory[0].get(), memory[1].get()}, &over, nullptr, nullptr, rank, 2};
    messages.count = 1;
    messages.all[0] = {rank == 0 ? from.data() : to.data(), from.size(), 7, 1 - rank,
                       rank == 0 ? 1 : 0};
    run(&messages);
  };
  std::thread sends(side, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::thread receives(side, 1);
  std::thread ends([&] {
    for (int i = 0; i < 200 && sender.sent[1][0] < before + 6; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    __atomic_store_n(&over, 1U, __ATOMIC_SEQ_CST);
  });
  for (std::thread* each : {&sends, &receives, &ends}) each->join();
  EXPECT_TRUE(from == to) << before;
}
TEST(CudaIpcMessages, TheirNumbersMayPassThirtyTwoBits) {
  for (const comm::cuda_ipc::U64 before : {0x0ULL, 0xfffffffdULL, 0xffffffffULL, 0x1fffffffeULL})
    move_six_chunks(before);
}

// 16 multiprocessors with room for two blocks each.
TEST(CudaIpcBlocks, SeveralGroupsOnOneDeviceHavePlacesForAllTheirBlocks) {
  setenv("FAKE_CUDA_MPS", "1", 1);
  setenv("FAKE_CUDA_THREADS", "2", 1);
  const auto body = [](World& world, unsigned in_world, unsigned in_group) {
    const auto most = of_fake<unsigned (*)()>("fakeCudaMostBlocks");
    ASSERT_NE(most, nullptr);
    const auto blocks_of = [&](const comm::Group& group) {
      most();
      const at::Tensor data = at::ones({1'000'000}).to(world.device());
      group.all_reduce(data).wait();
      (void)data.cpu();
      return most();
    };
    EXPECT_EQ(blocks_of(world.group()), in_world);
    const comm::Group part = world.group().split(world.rank() / 2, world.rank());
    EXPECT_EQ(blocks_of(part), in_group);
    EXPECT_EQ(blocks_of(part.split(0, world.rank())), in_group);
  };
  setenv("FAKE_DEVICES", "1", 1);
  spawn_on_ipc(4, [&](World& world) { body(world, 4, 2); });
  setenv("FAKE_DEVICES", "8", 1);
  spawn_on_ipc(2, [&](World& world) { body(world, 8, 8); });
  for (const char* name : {"FAKE_DEVICES", "FAKE_CUDA_THREADS", "FAKE_CUDA_MPS"}) unsetenv(name);
}

}  // namespace
}  // namespace lockstep::test
