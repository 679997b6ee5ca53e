// Every collective over cuda_ipc against the same call on CPU tensors in the same group, which goes
// over shared memory: random numbers and the same bits, since both take sums in the one tree.
#include "device/alike.h"
#include "device/cuda_ipc/on_ipc.h"
#include "device/moves.h"

namespace lockstep::comm {
namespace {

using test::expect_alike;
using test::for_all;
using test::spawn_on_ipc;

at::Tensor random_values(int64_t count, int seed, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(seed);
  if (dtype == at::kBool) return at::rand({count}, generator).gt(0.5);
  if (at::isComplexType(dtype) || at::isFloatingType(dtype)) {
    const at::Tensor wide = at::randn({count}, generator);
    if (!at::isComplexType(dtype)) return wide.to(dtype);
    return at::complex(wide, at::randn({count}, generator)).to(dtype);
  }
  return at::randint(0, 256, {count}, generator, at::kLong).to(dtype);
}

bool allowed(ReduceOp op, at::ScalarType dtype) {
  const bool bitwise =
      op == ReduceOp::BitwiseAnd || op == ReduceOp::BitwiseOr || op == ReduceOp::BitwiseXor;
  if (bitwise) return !at::isComplexType(dtype) && !at::isFloatingType(dtype);
  if (op == ReduceOp::Min || op == ReduceOp::Max) return !at::isComplexType(dtype);
  return op != ReduceOp::Average || dtype != at::kBool;
}

constexpr ReduceOp kOps[] = {ReduceOp::Sum,       ReduceOp::Average,   ReduceOp::Min,
                             ReduceOp::Max,       ReduceOp::Product,   ReduceOp::BitwiseAnd,
                             ReduceOp::BitwiseOr, ReduceOp::BitwiseXor};

// Ranks, devices that they share, threads of a block, and whether ranks on one device compute at
// the same time: if not, streams wait in place of kernels.
struct Setting {
  int ranks, devices, threads;
  bool at_once = false;
};

class CudaIpc : public testing::TestWithParam<Setting> {
 protected:
  // Once as it comes, once with nothing over before it is waited for.
  void run(const std::function<void(World&)>& body) {
    setenv("FAKE_DEVICES", std::to_string(GetParam().devices).c_str(), 1);
    setenv("FAKE_CUDA_THREADS", std::to_string(GetParam().threads).c_str(), 1);
    setenv("FAKE_CUDA_MPS", GetParam().at_once ? "1" : "0", 1);
    spawn_on_ipc(GetParam().ranks, [&](World& world) {
      ASSERT_EQ(world.group().backend(), "cuda_ipc");
      EXPECT_TRUE(world.group().deterministic());
      body(world);
      test::fake::shut_gate();
      body(world);
    });
    unsetenv("FAKE_DEVICES");
    unsetenv("FAKE_CUDA_THREADS");
    unsetenv("FAKE_CUDA_MPS");
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, CudaIpc,
                         testing::Values(Setting{2, 1, 1, true}, Setting{3, 2, 1},
                                         Setting{4, 8, 1}),
                         [](const auto& test) {
                           return fmt::format("{}on{}{}", test.param.ranks, test.param.devices,
                                              test.param.at_once ? "AtOnce" : "");
                         });

TEST_P(CudaIpc, AllReduce) {
  run([](World& world) {
    for_all([&](auto dtype, int64_t size, const std::string& what) {
      for (ReduceOp op : kOps) {
        if (!allowed(op, dtype)) continue;
        expect_alike(
            world, {random_values(size, world.rank(), dtype)},
            [&](auto& t) { world.group().all_reduce(t[0], op).wait(); },
            fmt::format("op {} {}", int(op), what));
      }
    });
  });
}

// More than a stage holds, and parts that are no whole packets.
TEST_P(CudaIpc, ManyRounds) {
  run([](World& world) {
    const int n = world.size();
    // Where ranks take turns a stage holds more.
    expect_alike(
        world, {random_values(9'000'001, world.rank(), at::kFloat)},
        [&](auto& t) { world.group().all_reduce(t[0]).wait(); }, "all_reduce");
    for (const int64_t size : {5'000'003, 2'097'152}) {
      expect_alike(
          world, {random_values(size, world.rank(), at::kFloat)},
          [&](auto& t) { world.group().all_reduce(t[0], ReduceOp::Average).wait(); }, "all_reduce");
      expect_alike(
          world, {at::zeros({size / n}), random_values(size / n * n, world.rank(), at::kFloat)},
          [&](auto& t) { world.group().reduce_scatter(t[0], t[1]).wait(); }, "reduce_scatter");
      expect_alike(
          world, {at::zeros({n * size}), random_values(size, world.rank(), at::kFloat)},
          [&](auto& t) { world.group().all_gather(t[0], t[1]).wait(); }, "all_gather");
      const int to = (world.rank() + 1) % n, from = (world.rank() + n - 1) % n;
      expect_alike(
          world, {random_values(size, world.rank(), at::kFloat), at::zeros({size})},
          [&](auto& t) { world.group().send_recv(t[1], t[0], {.to = to, .from = from}).wait(); },
          "send_recv");
    }
  });
}

TEST_P(CudaIpc, Reduce) {
  run([](World& world) {
    for_all([&](auto dtype, int64_t size, const std::string& what) {
      for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Max}) {
        if (!allowed(op, dtype)) continue;
        expect_alike(
            world, {random_values(size, world.rank(), dtype)},
            [&](auto& t) { world.group().reduce(t[0], world.size() - 1, op).wait(); }, what);
      }
    });
  });
}

TEST_P(CudaIpc, ReduceScatter) {
  run([](World& world) {
    const int n = world.size();
    for_all([&](auto dtype, int64_t size, const std::string& what) {
      const ReduceOp op = allowed(ReduceOp::Average, dtype) ? ReduceOp::Average : ReduceOp::Sum;
      expect_alike(
          world, {at::zeros({size}, dtype), random_values(n * size, world.rank(), dtype)},
          [&](auto& t) { world.group().reduce_scatter(t[0], t[1], op).wait(); }, what);
      std::vector<at::Tensor> tensors{at::zeros({size + world.rank()}, dtype)};
      for (int r = 0; r < n; ++r) tensors.push_back(random_values(size + r, world.rank(), dtype));
      expect_alike(
          world, tensors,
          [&](auto& t) {
            world.group()
                .reduce_scatter(t[0], std::vector<at::Tensor>(t.begin() + 1, t.end()), op)
                .wait();
          },
          what);
    });
  });
}

TEST_P(CudaIpc, AllGatherAndBroadcast) {
  run([](World& world) {
    test::expect_all_gathers_alike(world, random_values);
    test::expect_broadcasts_alike(world, random_values);
  });
}

TEST_P(CudaIpc, GatherAndScatter) {
  run([](World& world) { test::expect_gathers_and_scatters_alike(world, random_values); });
}

TEST_P(CudaIpc, AllToAll) {
  run([](World& world) { test::expect_all_to_alls_alike(world, random_values); });
}

// All send before any receives, more than a kernel is told of, with collectives between.
TEST_P(CudaIpc, MessagesRoundARing) {
  run([](World& world) {
    test::expect_messages_round_a_ring_alike(world, random_values);
    const int n = world.size(), to = (world.rank() + 1) % n, from = (world.rank() + n - 1) % n;
    std::vector<at::Tensor> sources, targets;
    std::vector<Work> works;
    for (int i = 0; i < 50; ++i) {
      sources.push_back(at::full({i + 1}, 100 * world.rank() + i).to(world.device()));
      targets.push_back(at::zeros({i + 1}, at::kLong).to(world.device()));
      works.push_back(world.group().send(sources.back(), to));
      works.push_back(world.group().recv(targets.back(), from));
    }
    for (Work& work : works) work.wait();
    for (int i = 0; i < 50; ++i)
      EXPECT_TRUE(at::equal(targets[i].cpu(), at::full({i + 1}, 100 * from + i)));
  });
}

TEST_P(CudaIpc, ATensorAtAnOddAddressAndOneThatIsNotContiguous) {
  run([](World& world) {
    for (const int64_t skipped : {1, 2, 3}) {
      for (const int64_t size : {50, 100003}) {
        expect_alike(
            world, {random_values(size + skipped, world.rank(), at::kBFloat16)},
            [&](auto& t) {
              world.group().all_reduce(t[0].narrow(0, skipped, size)).wait();
              world.group().broadcast(t[0].narrow(0, skipped, size - 7)).wait();
            },
            "narrowed");
      }
    }
    expect_alike(
        world, {random_values(24, world.rank(), at::kFloat).view({6, 4})},
        [&](auto& t) { world.group().all_reduce(t[0].t().slice(0, 0, 4, 2)).wait(); },
        "every other column");
  });
}

TEST_P(CudaIpc, ASplitGroupHasADeviceToo) {
  run([](World& world) {
    const Group half = world.group().split(world.rank() % 2, -world.rank());
    at::Tensor sum = at::full({5}, world.rank()).to(world.device());
    half.all_reduce(sum).wait();
    int expected = 0;
    for (int r = world.rank() % 2; r < world.size(); r += 2) expected += r;
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({5}, expected)));
    EXPECT_EQ(world.group().split(0, world.rank()).backend(), "cuda_ipc");
  });
}

TEST_P(CudaIpc, NotANumberWins) { run(test::expect_not_a_number_wins); }

// A block that is late in one round, while others come to the third, which uses the same stage and
// is smaller: it is cut into blocks as the others are.
TEST(CudaIpcBlocks, MayBeRoundsApart) {
  setenv("FAKE_CUDA_THREADS", "2", 1);
  setenv("FAKE_CUDA_MPS", "1", 1);
  setenv("FAKE_DEVICES", "1", 1);
  spawn_on_ipc(2, [](World& world) {
    if (world.rank() == 1) setenv("FAKE_CUDA_SLOW_MS", "300", 1);
    expect_alike(
        world, {random_values(5 << 20, world.rank(), at::kFloat)},
        [&](auto& t) { world.group().all_reduce(t[0]).wait(); }, "two and a half rounds");
  });
  for (const char* name : {"FAKE_CUDA_THREADS", "FAKE_CUDA_MPS", "FAKE_DEVICES"}) unsetenv(name);
}

// Blocks of several threads at the same time, as a GPU has them.
TEST(CudaIpcBlocks, OfSeveralThreadsGiveTheSameBits) {
  setenv("FAKE_CUDA_THREADS", "3", 1);
  spawn_on_ipc(2, [](World& world) {
    for (auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t size : {5, 4099, 300007}) {
        expect_alike(
            world, {random_values(size, world.rank(), dtype), at::zeros({size}, dtype)},
            [&](auto& t) {
              world.group().all_reduce(t[0]).wait();
              world.group()
                  .send_recv(t[1], t[0], {.to = 1 - world.rank(), .from = 1 - world.rank()})
                  .wait();
              world.group().all_reduce(t[1], ReduceOp::Max).wait();
            },
            fmt::format("{} x {}", c10::toString(dtype), size));
      }
    }
  });
  unsetenv("FAKE_CUDA_THREADS");
}

}  // namespace
}  // namespace lockstep::comm
