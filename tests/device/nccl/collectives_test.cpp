// Every collective on device tensors, against the same call on CPU tensors in the same group. Whole
// numbers that are exact in every dtype, so all orders of summation give the same bits: tolerance
// 0.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/device/capture.h"
#include "device/alike.h"
#include "device/moves.h"
#include "device/on_device.h"

namespace lockstep::comm {
namespace {

using test::spawn_on_device;

using test::expect_alike;
using test::for_all;
using test::values;

at::Tensor small_values(int64_t count, int seed, at::ScalarType dtype) {
  return values(count, seed, dtype);
}

class Nccl : public testing::TestWithParam<int> {
 protected:
  // Once as it comes, once with nothing over before it is waited for.
  void run(const std::function<void(World&)>& body) {
    spawn_on_device(GetParam(), [&](World& world) {
      ASSERT_EQ(world.group().backend(), "nccl");
      body(world);
      test::fake::shut_gate();
      body(world);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Nccl, testing::Values(2, 4), testing::PrintToStringParamName());

bool allowed(ReduceOp op, at::ScalarType dtype) {
  const bool sum = op == ReduceOp::Sum || op == ReduceOp::Average;
  if (at::isComplexType(dtype)) return sum;
  // Not every product of four is exact in one byte.
  if (at::isFloatingType(dtype) && c10::elementSize(dtype) == 1 && op == ReduceOp::Product)
    return false;
  return op != ReduceOp::Average || (dtype != at::kBool && dtype != at::kUInt64);
}

constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max,
                             ReduceOp::Product};

TEST_P(Nccl, AllReduce) {
  run([](World& world) {
    for_all([&](auto dtype, int64_t size, const std::string& what) {
      for (ReduceOp op : kOps) {
        if (!allowed(op, dtype)) continue;
        const int low = op == ReduceOp::Product ? 1 : -1;
        const bool is_signed =
            dtype != at::kBool && dtype != at::kByte && !at::isBarebonesUnsignedType(dtype);
        expect_alike(
            world, {values(size, world.rank(), dtype, is_signed ? low : 0)},
            [&](auto& t) { world.group().all_reduce(t[0], op).wait(); },
            fmt::format("op {} {}", int(op), what));
      }
    });
  });
}

TEST_P(Nccl, Reduce) {
  run([](World& world) {
    for_all([&](auto dtype, int64_t size, const std::string& what) {
      for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Max}) {
        if (!allowed(op, dtype)) continue;
        expect_alike(
            world, {values(size, world.rank(), dtype)},
            [&](auto& t) { world.group().reduce(t[0], world.size() - 1, op).wait(); }, what);
      }
    });
  });
}

TEST_P(Nccl, ReduceScatter) {
  run([](World& world) {
    const int n = world.size();
    for_all([&](auto dtype, int64_t size, const std::string& what) {
      const ReduceOp op = allowed(ReduceOp::Average, dtype) ? ReduceOp::Average : ReduceOp::Sum;
      expect_alike(
          world, {at::zeros({size}, dtype), values(n * size, world.rank(), dtype)},
          [&](auto& t) { world.group().reduce_scatter(t[0], t[1], op).wait(); }, what);
      std::vector<at::Tensor> tensors{at::zeros({size + world.rank()}, dtype)};
      for (int r = 0; r < n; ++r) tensors.push_back(values(size + r, world.rank(), dtype));
      expect_alike(
          world, tensors,
          [&](auto& t) {
            const ReduceOp second = allowed(ReduceOp::Max, dtype) ? ReduceOp::Max : ReduceOp::Sum;
            world.group()
                .reduce_scatter(t[0], std::vector<at::Tensor>(t.begin() + 1, t.end()), second)
                .wait();
          },
          what);
    });
  });
}

TEST_P(Nccl, AllGather) {
  run([](World& world) { test::expect_all_gathers_alike(world, small_values); });
}

TEST_P(Nccl, Broadcast) {
  run([](World& world) { test::expect_broadcasts_alike(world, small_values); });
}

TEST_P(Nccl, GatherAndScatter) {
  run([](World& world) { test::expect_gathers_and_scatters_alike(world, small_values); });
}

TEST_P(Nccl, AllToAll) {
  run([](World& world) { test::expect_all_to_alls_alike(world, small_values); });
}

TEST_P(Nccl, MessagesRoundARing) {
  run([](World& world) { test::expect_messages_round_a_ring_alike(world, small_values); });
}

TEST_P(Nccl, TensorsThatAreNotContiguous) {
  run([](World& world) {
    expect_alike(
        world, {values(24, world.rank(), at::kFloat).view({6, 4})},
        [&](auto& t) { world.group().all_reduce(t[0].t().slice(0, 0, 4, 2)).wait(); },
        "every other column");
  });
}

// Bits of random numbers: two addends have one order.
TEST(NcclPair, SumsAndAveragesHaveTheBitsOfSharedMemory) {
  spawn_on_device(2, [](World& world) {
    EXPECT_TRUE(world.group().deterministic());
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product, ReduceOp::Min}) {
        auto generator = at::detail::createCPUGenerator(world.rank());
        expect_alike(
            world, {at::randn({5000}, generator).to(dtype)},
            [&](auto& t) { world.group().all_reduce(t[0], op).wait(); },
            fmt::format("op {}", int(op)));
      }
    }
  });
}

TEST_P(Nccl, NotANumberWins) { run(test::expect_not_a_number_wins); }

TEST_P(Nccl, ASplitGroupHasADeviceToo) {
  run([](World& world) {
    const Group half = world.group().split(world.rank() % 2, -world.rank());
    EXPECT_EQ(half.size(), world.size() / 2);
    at::Tensor sum = at::full({5}, world.rank()).to(world.device());
    half.all_reduce(sum).wait();
    int expected = 0;
    for (int r = world.rank() % 2; r < world.size(); r += 2) expected += r;
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({5}, expected)));
    // Twice in a row, and from the halves.
    EXPECT_EQ(world.group().split(0, world.rank()).size(), world.size());
  });
}

TEST_P(Nccl, StringsAndBarriersGoOverTheCpu) {
  run([](World& world) {
    const auto all = world.group().all_gather_bytes(std::string(world.rank() + 1, 'x'));
    EXPECT_EQ(all.back(), std::string(world.size(), 'x'));
    at::Tensor data = at::ones({1000}).to(world.device());
    Work work = world.group().all_reduce(data);
    world.group().barrier().wait();
    // The device has done what was before it, gate or no gate.
    EXPECT_TRUE(work.is_completed());
    work.wait();
    EXPECT_EQ(data.cpu().sum().item<float>(), 1000.0f * static_cast<float>(world.size()));
  });
}

TEST_P(Nccl, FactorsAndListsAndMessagesBothWays) {
  run([](World& world) {
    const int n = world.size(), me = world.rank();
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
      expect_alike(
          world, {values(100, me, dtype)},
          [&](auto& t) {
            world.group().all_reduce(t[0], ReduceOp::PreMulSum, {.factor = 0.5 + me}).wait();
          },
          "factor");
    }
    expect_alike(
        world, {values(5, me, at::kFloat), values(7, me, at::kLong), values(3, me, at::kFloat)},
        [&](auto& t) { world.group().all_reduce(t).wait(); }, "list");
    expect_alike(
        world, {at::zeros({9}), values(9, me, at::kFloat)},
        [&](auto& t) {
          world.group()
              .send_recv(t[0], t[1], {.to = (me + 1) % n, .from = (me + n - 1) % n})
              .wait();
        },
        "ring");
  });
}

// The other stream is what the operation follows and what its end is seen on.
TEST_P(Nccl, AnotherStreamThanTheCurrentOne) {
  run([](World& world) {
    const c10::impl::VirtualGuardImpl device(world.device().type());
    const c10::Stream other = device.getStreamFromGlobalPool(world.device(), false);
    at::Tensor data, result;
    {
      const c10::StreamGuard guard(other);
      data = at::full({1000}, world.rank() + 1.f).to(world.device());
    }
    Work work = world.group().all_reduce(data, ReduceOp::Sum, {.stream = other});
    work.wait();
    {
      const c10::StreamGuard guard(other);
      result = data.cpu();
    }
    const auto n = static_cast<float>(world.size());
    EXPECT_EQ(result[999].item<float>(), n * (n + 1) / 2);
    const at::Tensor here = at::ones({3});
    EXPECT_NE(test::message_of([&] {
                world.group().all_reduce(here, ReduceOp::Sum, {.stream = other}).wait();
              }).find("CallOptions::stream is for tensors on a device"),
              std::string::npos);
  });
}

TEST_P(Nccl, AStreamThatCapturesAGraphIsRefused) {
  run([](World& world) {
    at::Tensor there = at::ones({4}).to(world.device());
    set_capture_question([](const c10::Stream&) { return true; });
    const std::string said = test::message_of([&] { world.group().all_reduce(there).wait(); });
    set_capture_question(nullptr);
    EXPECT_NE(said.find("[nccl] all_reduce sum: the current stream is capturing a CUDA graph"),
              std::string::npos)
        << said;
    world.group().all_reduce(there).wait();
    EXPECT_EQ(there.cpu().sum().item<float>(), 4.f * static_cast<float>(world.size()));
  });
}

TEST(NcclPair, WhatNcclCannotDoIsRefused) {
  spawn_on_device(2, [](World& world) {
    at::Tensor there = at::ones({4}, at::kInt).to(world.device());
    EXPECT_EQ(
        test::message_of([&] { world.group().all_reduce(there, ReduceOp::BitwiseAnd).wait(); }),
        "[nccl] all_reduce: NCCL has no bit_and: gather the tensors and combine them, or move "
        "them to the CPU");
    EXPECT_EQ(
        test::message_of([&] { world.group().all_gather(at::ones({8}, at::kInt), there).wait(); }),
        "[comm] all_gather: tensors on cpu and " + world.device().str() + " in one call");
    const at::Tensor wide = at::ones({4}).to(at::kUInt64).to(world.device());
    EXPECT_EQ(test::message_of([&] { world.group().all_reduce(wide, ReduceOp::Average).wait(); }),
              "[nccl] all_reduce: NCCL has no average of uint64: gather the tensors and combine "
              "them, or move them to the CPU");
    const at::Tensor elsewhere = at::ones({4}, at::TensorOptions(at::kMeta));
    EXPECT_EQ(test::message_of([&] { world.group().all_reduce(elsewhere).wait(); }),
              fmt::format("[comm] all_reduce: a tensor is on meta, but this group communicates "
                          "between {0} and CPU tensors: "
                          "move it with .to({0})",
                          world.device().str()));
    world.group().all_reduce(there).wait();
    EXPECT_EQ(there.cpu().sum().item<int>(), 8);
  });
}

}  // namespace
}  // namespace lockstep::comm
