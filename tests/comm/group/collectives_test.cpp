// Every collective on every transport, dtype and awkward size, against a scalar reference.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "support/spawn.h"

namespace lockstep::comm {
namespace {

using test::name_of;
using test::Ranks;
using test::spawn;

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                             at::kChar,  at::kShort,  at::kInt,  at::kLong,
                                             at::kByte,  at::kBool};

// None, one, odd, just over the one-meeting size; and larger than the staging slots, where there
// are any.
std::vector<int64_t> sizes(const World& world, at::ScalarType dtype = at::kFloat) {
  std::vector<int64_t> sizes = {0, 1, 7, 16385};
  if (world.group().backend() == "shm" || dtype == at::kFloat) sizes.push_back(300001);
  return sizes;
}

class Collectives : public testing::TestWithParam<Ranks> {
 protected:
  void run(const std::function<void(World&)>& body) { spawn(GetParam(), body); }
};

INSTANTIATE_TEST_SUITE_P(On, Collectives,
                         testing::Values(Ranks{"shm", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                         Ranks{"shm", 4}, Ranks{"shm", 7}, Ranks{"tcp", 2},
                                         Ranks{"tcp", 3}, Ranks{"tcp", 4}, Ranks{"tcp", 7},
                                         Ranks{"gloo", 2}, Ranks{"gloo", 3}, Ranks{"gloo", 4},
                                         Ranks{"gloo", 7}, Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"auto", 4, {0, 1, 0, 1}},
                                         Ranks{"auto", 5, {0, 0, 0, 1, 1}}),
                         name_of);

// Whole numbers from `low` to `low + 2` that differ by rank and place and are exact in every dtype.
at::Tensor values(int64_t count, int rank, at::ScalarType dtype, int low = 0) {
  return (at::arange(count, at::kLong) + rank).remainder(3).add(low).to(dtype);
}

bool same(const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); }

at::Tensor reference(ReduceOp op, int ranks, const std::function<at::Tensor(int)>& of) {
  const at::ScalarType dtype = of(0).scalar_type();
  at::Tensor all = of(0).to(at::kLong);
  for (int r = 1; r < ranks; ++r) {
    const at::Tensor next = of(r).to(at::kLong);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Average:
        all = all + next;
        break;
      case ReduceOp::Min:
        all = at::minimum(all, next);
        break;
      case ReduceOp::Max:
        all = at::maximum(all, next);
        break;
      case ReduceOp::Product:
        all = all * next;
        break;
      case ReduceOp::BitwiseAnd:
        all = at::bitwise_and(all, next);
        break;
      case ReduceOp::BitwiseOr:
        all = at::bitwise_or(all, next);
        break;
      case ReduceOp::BitwiseXor:
        all = at::bitwise_xor(all, next);
        break;
      case ReduceOp::PreMulSum:  // tests/comm/group/dtypes_test.cpp
        break;
    }
  }
  if (op != ReduceOp::Average) return all.to(dtype);
  if (at::isFloatingType(dtype)) return all.to(dtype).div_(ranks);
  return all.div(ranks, "trunc").to(dtype);
}

bool allowed(ReduceOp op, at::ScalarType dtype) {
  if (op == ReduceOp::BitwiseAnd || op == ReduceOp::BitwiseOr) return !at::isFloatingType(dtype);
  return op != ReduceOp::Average || dtype != at::kBool;
}

constexpr ReduceOp kOps[] = {ReduceOp::Sum,      ReduceOp::Average, ReduceOp::Min,
                             ReduceOp::Max,      ReduceOp::Product, ReduceOp::BitwiseAnd,
                             ReduceOp::BitwiseOr};

TEST_P(Collectives, AllReduce) {
  run([](World& world) {
    const Group& group = world.group();
    for (auto dtype : kDtypes) {
      for (int64_t size : sizes(world, dtype)) {
        for (ReduceOp op : kOps) {
          if (!allowed(op, dtype) ||
              (size > 20000 && op != ReduceOp::Sum && op != ReduceOp::Average))
            continue;
          const int low = op == ReduceOp::Product && dtype != at::kBool ? 1 : 0;
          if (op == ReduceOp::Product && world.size() > 4 && dtype != at::kBool)
            continue;  // 3^7 is no bfloat16
          const auto of = [&](int r) { return values(size, r, dtype, low); };
          at::Tensor data = of(world.rank());
          group.all_reduce(data, op).wait();
          EXPECT_TRUE(same(data, reference(op, world.size(), of)))
              << dtype << " x " << size << " op " << int(op);
        }
      }
    }
  });
}

TEST_P(Collectives, AllReduceInGroupMemory) {
  run([](World& world) {
    for (auto dtype : kDtypes) {
      for (int64_t size : sizes(world, dtype)) {
        at::Tensor data = world.group().empty({size}, dtype);
        EXPECT_TRUE(same(data, at::zeros({size}, dtype)));
        const auto of = [&](int r) { return values(size, r, dtype); };
        data.copy_(of(world.rank()));
        world.group().all_reduce(data).wait();
        EXPECT_TRUE(same(data, reference(ReduceOp::Sum, world.size(), of)))
            << dtype << " x " << size;
      }
    }
  });
}

TEST_P(Collectives, AllReduceWhereOnlySomeRanksUseGroupMemory) {
  run([](World& world) {
    for (int64_t size : sizes(world)) {
      at::Tensor shared = world.group().empty({size}),
                 data = world.rank() % 2 ? shared : at::empty({size});
      const auto of = [&](int r) { return values(size, r, at::kFloat); };
      for (int i = 0; i < 3; ++i) {
        data.copy_(of(world.rank()));
        world.group().all_reduce(data).wait();
        EXPECT_TRUE(same(data, reference(ReduceOp::Sum, world.size(), of))) << size;
      }
    }
  });
}

TEST_P(Collectives, ReduceLeavesTheOthersAlone) {
  run([](World& world) {
    const int root = world.size() - 1;
    for (auto dtype : kDtypes) {
      for (int64_t size : sizes(world, dtype)) {
        const auto of = [&](int r) { return values(size, r, dtype); };
        at::Tensor data = of(world.rank());
        world.group().reduce(data, root).wait();
        const at::Tensor expected =
            world.rank() == root ? reference(ReduceOp::Sum, world.size(), of) : of(world.rank());
        EXPECT_TRUE(same(data, expected)) << dtype << " x " << size;
      }
    }
  });
}

TEST_P(Collectives, ReduceScatter) {
  run([](World& world) {
    const int n = world.size();
    for (auto dtype : kDtypes) {
      for (int64_t size : sizes(world, dtype)) {
        const auto of = [&](int r) { return values(n * size, r, dtype); };
        at::Tensor out = at::empty({size}, dtype);
        world.group().reduce_scatter(out, of(world.rank())).wait();
        const at::Tensor all = reference(ReduceOp::Sum, n, of);
        EXPECT_TRUE(same(out, all.narrow(0, world.rank() * size, size))) << dtype << " x " << size;
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterOfUnequalParts) {
  run([](World& world) {
    const int n = world.size(), me = world.rank();
    for (int64_t base : {int64_t{0}, int64_t{5}, int64_t{150000}}) {
      const auto part = [&](int from, int to) {
        return values(base + 3 * to, from + to, at::kDouble);
      };
      std::vector<at::Tensor> inputs;
      for (int r = 0; r < n; ++r) inputs.push_back(part(me, r));
      at::Tensor out = at::empty({base + 3 * me}, at::kDouble);
      world.group().reduce_scatter(out, inputs, ReduceOp::Average).wait();
      EXPECT_TRUE(same(out, reference(ReduceOp::Average, n, [&](int r) { return part(r, me); })))
          << base;
    }
  });
}

TEST_P(Collectives, AllGather) {
  run([](World& world) {
    for (auto dtype : kDtypes) {
      for (int64_t size : sizes(world, dtype)) {
        at::Tensor out = at::empty({world.size() * size}, dtype);
        world.group().all_gather(out, values(size, world.rank(), dtype)).wait();
        for (int r = 0; r < world.size(); ++r) {
          EXPECT_TRUE(same(out.narrow(0, r * size, size), values(size, r, dtype)))
              << dtype << " x " << size;
        }
      }
    }
  });
}

TEST_P(Collectives, AllGatherOfUnequalParts) {
  run([](World& world) {
    const auto of = [](int r) { return values(r * 50000, r, at::kLong); };
    std::vector<at::Tensor> outs;
    for (int r = 0; r < world.size(); ++r) outs.push_back(at::empty({r * 50000}, at::kLong));
    world.group().all_gather(outs, of(world.rank())).wait();
    for (int r = 0; r < world.size(); ++r) EXPECT_TRUE(same(outs[r], of(r)));
  });
}

// ZeroOptimizer's parameters: each rank has its part in place already.
TEST_P(Collectives, AllGatherInPlaceOfUnequalPartsOfOneMemory) {
  run([](World& world) {
    const auto of = [](int r) { return values((r + 1) * 30001, r, at::kFloat); };
    const int64_t count = 30001 * world.size() * (world.size() + 1) / 2;
    for (const at::Tensor& memory : {world.group().empty({count}), at::empty({count})}) {
      std::vector<at::Tensor> outs;
      for (int64_t r = 0, begin = 0; r < world.size(); begin += 30001 * ++r) {
        outs.push_back(memory.narrow(0, begin, 30001 * (r + 1)));
      }
      memory.fill_(-1);
      outs[world.rank()].copy_(of(world.rank()));
      world.group().all_gather(outs, outs[world.rank()]).wait();
      for (int r = 0; r < world.size(); ++r) EXPECT_TRUE(same(outs[r], of(r)));
    }
  });
}

TEST_P(Collectives, Broadcast) {
  run([](World& world) {
    for (int root = 0; root < world.size(); root += 2) {
      for (auto dtype : kDtypes) {
        for (int64_t size : sizes(world, dtype)) {
          at::Tensor data = values(size, world.rank() + (world.rank() != root), dtype);
          world.group().broadcast(data, root).wait();
          EXPECT_TRUE(same(data, values(size, root, dtype)))
              << dtype << " x " << size << " from " << root;
        }
      }
    }
  });
}

TEST_P(Collectives, GatherAndScatter) {
  run([](World& world) {
    const int n = world.size(), root = n - 1;
    for (auto dtype : kDtypes) {
      for (int64_t base : sizes(world, dtype)) {
        const auto of = [&](int r) { return values(base + r, r, dtype); };
        std::vector<at::Tensor> all;
        if (world.rank() == root) {
          for (int r = 0; r < n; ++r) all.push_back(at::empty({base + r}, dtype));
        }
        world.group().gather(all, of(world.rank()), root).wait();
        for (size_t r = 0; r < all.size(); ++r)
          EXPECT_TRUE(same(all[r], of(r))) << dtype << " x " << base;
        at::Tensor back = at::empty({base + world.rank()}, dtype);
        world.group().scatter(back, all, root).wait();
        EXPECT_TRUE(same(back, of(world.rank()))) << dtype << " x " << base;
      }
    }
  });
}

TEST_P(Collectives, AllToAll) {
  run([](World& world) {
    const int n = world.size(), me = world.rank();
    for (auto dtype : kDtypes) {
      for (int64_t size : sizes(world, dtype)) {
        at::Tensor in = values(n * size, me, dtype), out = at::empty({n * size}, dtype);
        world.group().all_to_all(out, in).wait();
        for (int r = 0; r < n; ++r) {
          EXPECT_TRUE(same(out.narrow(0, r * size, size),
                           values(n * size, r, dtype).narrow(0, me * size, size)));
        }
      }
    }
  });
}

TEST_P(Collectives, AllToAllOfUnequalParts) {
  run([](World& world) {
    const int n = world.size(), me = world.rank();
    const auto part = [](int from, int to) {
      return values(40000 * from + to, from + to, at::kFloat);
    };
    std::vector<at::Tensor> in, out;
    for (int r = 0; r < n; ++r) {
      in.push_back(part(me, r));
      out.push_back(at::empty({40000 * r + me}));
    }
    world.group().all_to_all(out, in).wait();
    for (int r = 0; r < n; ++r) EXPECT_TRUE(same(out[r], part(r, me)));
  });
}

// All send before any receives, and messages are larger than what the transport can hold.
TEST_P(Collectives, MessagesRoundARing) {
  if (GetParam().count == 1) return;  // nobody to write to
  run([](World& world) {
    const int n = world.size(), to = (world.rank() + 1) % n, from = (world.rank() + n - 1) % n;
    for (auto dtype : kDtypes) {
      for (int64_t size : sizes(world, dtype)) {
        at::Tensor out = values(size, world.rank(), dtype), in = at::empty({size}, dtype);
        Work sent = world.group().send(out, to, 5), received = world.group().recv(in, from, 5);
        sent.wait();
        received.wait();
        EXPECT_TRUE(same(in, values(size, from, dtype))) << dtype << " x " << size;
      }
    }
  });
}

TEST_P(Collectives, TensorsThatAreNotContiguous) {
  run([](World& world) {
    at::Tensor whole = at::zeros({6, 4}), every_other = whole.t().slice(0, 0, 4, 2);
    every_other.fill_(world.rank() + 1);
    world.group().all_reduce(every_other).wait();
    const float sum = world.size() * (world.size() + 1) / 2.0f;
    at::Tensor expected = at::zeros({6, 4});
    expected.t().slice(0, 0, 4, 2).fill_(sum);
    EXPECT_TRUE(same(whole, expected));
    at::Tensor gathered = at::zeros({3, world.size()}).t();
    world.group().all_gather(gathered, at::full({3}, float(world.rank()))).wait();
    for (int r = 0; r < world.size(); ++r) EXPECT_TRUE(same(gathered[r], at::full({3}, float(r))));
  });
}

TEST_P(Collectives, AsynchronousOnesOverlapAndFinishInAnyOrder) {
  run([](World& world) {
    std::vector<at::Tensor> data;
    std::vector<Work> works;
    for (int i = 0; i < 100; ++i) {
      data.push_back(i % 3 == 0 ? world.group().empty({1000 + i})
                                : at::empty({i % 3 == 1 ? 10 : 200000}));
      data.back().fill_(world.rank() + i);
      works.push_back(world.group().all_reduce(data.back(), ReduceOp::Max));
      (void)works[i / 2].is_completed();
    }
    for (int i = 99; i >= 0; --i) works[i].wait();
    for (int i = 0; i < 100; ++i)
      EXPECT_TRUE(same(data[i], at::full_like(data[i], world.size() - 1 + i))) << i;
  });
}

TEST_P(Collectives, ByteStrings) {
  run([](World& world) {
    const auto of = [](int r) { return std::string(r * 100000, static_cast<char>('a' + r)); };
    const auto all = world.group().all_gather_bytes(of(world.rank()));
    ASSERT_EQ(static_cast<int>(all.size()), world.size());
    for (int r = 0; r < world.size(); ++r) EXPECT_EQ(all[r], of(r));
    const auto at_root = world.group().gather_bytes(of(world.rank()), world.size() - 1);
    EXPECT_EQ(at_root, world.rank() == world.size() - 1 ? all : std::vector<std::string>());
    EXPECT_EQ(world.group().broadcast_bytes(of(world.rank()), world.size() - 1),
              of(world.size() - 1));
  });
}

TEST_P(Collectives, SplitGroupsAreOrderedByKeyAndIndependent) {
  run([](World& world) {
    const int n = world.size(), me = world.rank();
    const Group half = world.group().split(me % 2, -me);
    const int others = me % 2 ? n / 2 : (n + 1) / 2;
    ASSERT_EQ(half.size(), others);
    EXPECT_EQ(half.rank(), others - 1 - me / 2);
    at::Tensor sum = at::full({5}, me);
    half.all_reduce(sum).wait();
    int expected = 0;
    for (int r = me % 2; r < n; r += 2) expected += r;
    EXPECT_TRUE(same(sum, at::full({5}, expected)));
    at::Tensor shared = half.empty({100000});
    shared.fill_(1);
    half.all_reduce(shared).wait();
    EXPECT_TRUE(same(shared, at::full({100000}, float(others))));
    EXPECT_EQ(world.group().split(-1).size(), 1);
    world.group().barrier().wait();
  });
}

TEST_P(Collectives, NotANumberWins) {
  run([](World& world) {
    for (ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
      for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        at::Tensor data = at::full({40}, 1, dtype);
        if (world.rank() == world.size() - 1) data[3] = NAN;
        world.group().all_reduce(data, op).wait();
        EXPECT_TRUE(data[3].isnan().item<bool>());
        EXPECT_EQ(data[2].item<float>(), 1);
      }
    }
  });
}

// A graph that has saved a tensor which a call then writes has no right gradients any more.
TEST_P(Collectives, AreSeenByAutograd) {
  run([](World& world) {
    const auto& group = world.group();
    const auto refused = [](const std::function<void(const at::Tensor&)>& write) {
      const at::Tensor x = at::ones({6}).requires_grad_();
      const at::Tensor saved = x.exp();  // whose gradient is computed from the result
      write(saved.detach());
      EXPECT_THROW(saved.sum().backward(), c10::Error);
    };
    refused([&](const at::Tensor& y) { group.all_reduce(y).wait(); });
    refused([&](const at::Tensor& y) { group.broadcast(y).wait(); });
    refused([&](const at::Tensor& y) {
      group.send_recv(y, at::ones({6}), {.to = world.rank(), .from = world.rank()}).wait();
    });

    const at::Tensor x = at::ones({6}).requires_grad_();
    const at::Tensor sent = x.exp(), total = 2 * x;  // the input of a call; and saved by nobody
    group.all_gather(at::empty({6 * world.size()}), sent.detach()).wait();
    group.all_reduce(total.detach()).wait();
    (sent.sum() + total.sum()).backward();
    EXPECT_TRUE(at::allclose(x.grad(), x.exp() + 2));

    const c10::InferenceMode inference;  // where tensors have no version
    const at::Tensor counted = at::ones({3});
    group.all_reduce(counted).wait();
    EXPECT_EQ(counted[0].item<float>(), static_cast<float>(world.size()));
  });
}

}  // namespace
}  // namespace lockstep::comm
