// Calls of Group that need no collective of their own kind: several tensors at once, groups by a
// list, who is who, the end of a group, the store.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "comm/group/transports.h"
#include "lockstep/core/error.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using test::message_of;
using test::name_of;

class GroupCalls : public test::OnTransports {};
INSTANTIATE_TEST_SUITE_P(On, GroupCalls, test::kTransports, name_of);

TEST_P(GroupCalls, SendRecvShiftsARing) {
  run([](World& world) {
    const int n = world.size(), me = world.rank(), to = (me + 1) % n, from = (me + n - 1) % n;
    for (const int64_t size : {int64_t{0}, int64_t{3}, int64_t{200000}}) {
      const at::Tensor out = at::full({size}, static_cast<float>(me));
      at::Tensor in = at::zeros({size});
      world.group().send_recv(in, out, {.to = to, .from = from, .tag = 7}).wait();
      EXPECT_TRUE(at::equal(in, at::full({size}, static_cast<float>(from)))) << size;
    }
    at::Tensor self = at::zeros({2, 3});
    world.group().send_recv(self, at::ones({2, 3}), {.to = me, .from = me}).wait();
    EXPECT_EQ(self.sum().item<float>(), 6.f);
    if (n > 1) {
      EXPECT_NE(message_of<ConfigError>([&] {
                  world.group().send_recv(self, self, {.to = to, .from = me}).wait();
                }).find("both or neither"),
                std::string::npos);
    }
    world.group().barrier().wait();
  });
}

TEST_P(GroupCalls, SeveralTensorsAtOnceAreWhatOneByOneIs) {
  run([](World& world) {
    const Group& group = world.group();
    const int n = world.size(), me = world.rank();
    const auto list = [&](int r) {
      at::Tensor strided = at::zeros({4, 3}).t();
      strided.copy_(at::arange(12).view({3, 4}) + r);
      return std::vector<at::Tensor>{at::full({5}, r + 0.5f),
                                     at::full({2, 3}, r, at::kLong),
                                     strided,
                                     at::full({8}, r + 0.25f).slice(0, 0, 8, 2),
                                     at::full({2, 5}, r + 0.75f).select(0, 1).narrow(0, 2, 1),
                                     at::zeros({0}),
                                     at::full({3}, r % 2, at::kBool),
                                     at::full({7}, 2.0 * r, at::kFloat8_e5m2).to(at::kHalf)};
    };
    std::vector<at::Tensor> together = list(me), single = list(me);
    group.all_reduce(together).wait();
    for (const at::Tensor& tensor : single) group.all_reduce(tensor).wait();
    for (size_t i = 0; i < single.size(); ++i) EXPECT_TRUE(at::equal(together[i], single[i])) << i;

    together = list(me);
    group.broadcast(together, n - 1).wait();
    const auto expected = list(n - 1);
    for (size_t i = 0; i < single.size(); ++i)
      EXPECT_TRUE(at::equal(together[i], expected[i])) << i;

    std::vector<at::Tensor> all, gathered;
    for (const at::Tensor& tensor : list(me)) {
      all.push_back(at::zeros({n * tensor.numel()}, tensor.options()));
      gathered.push_back(at::zeros_like(all.back()));
      group.all_gather(gathered.back(), tensor).wait();
    }
    group.all_gather(all, list(me)).wait();
    for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i], gathered[i])) << i;

    std::vector<at::Tensor> parts, part_by_part, inputs;
    for (const at::Tensor& tensor : list(me)) {
      inputs.push_back((at::cat(std::vector<at::Tensor>(n, tensor.reshape({-1}))) * (me + 1))
                           .to(tensor.dtype()));
      parts.push_back(at::zeros({tensor.numel()}, inputs.back().options()));
      part_by_part.push_back(at::zeros_like(parts.back()));
      group.reduce_scatter(part_by_part.back(), inputs.back(), ReduceOp::Max).wait();
    }
    group.reduce_scatter(parts, inputs, ReduceOp::Max).wait();
    for (size_t i = 0; i < parts.size(); ++i)
      EXPECT_TRUE(at::equal(parts[i], part_by_part[i])) << i;

    group.all_reduce(std::vector<at::Tensor>()).wait();
    EXPECT_NE(message_of<ConfigError>([&] {
                group.all_gather(all, inputs).wait();
              }).find(n == 1 ? "nothing" : "of the list has"),
              std::string::npos);
  });
}

// All elements of theirs together are as many.
TEST_P(GroupCalls, ListsOfOtherSizesAreToldAndSoAreOtherDivisors) {
  run_together([](World& world) {
    const Group lists = world.group().split(0), divisors = world.group().split(0);
    const bool odd = world.rank() % 2 == 1;
    std::vector<at::Tensor> list{at::ones({odd ? 2 : 3}), at::ones({odd ? 3 : 2})};
    const auto two = message_of<CommError>([&] { lists.all_reduce(list).wait(); });
    EXPECT_NE(two.find("5 in parts of ["), std::string::npos) << two;
    const auto seven = message_of<CommError>([&] {
      divisors.all_reduce(at::ones({4}), ReduceOp::Average, {.divide_by = 7 + world.rank()}).wait();
    });
    EXPECT_NE(seven.find("divided by "), std::string::npos) << seven;
    world.group().barrier().wait();
  });
}

TEST_P(GroupCalls, WhatBelongsToOneReductionIsRefusedInAllOtherCalls) {
  run([](World& world) {
    const Group& group = world.group();
    const int n = world.size(), me = world.rank();
    const at::Tensor one = at::ones({2}), all = at::ones({2 * n});
    std::vector<at::Tensor> list{one, at::ones({1})};
    const auto refuses = [&](const CallOptions& options, const std::string& text, ReduceOp op) {
      const auto expect = [&](const char* call, const std::function<void()>& make) {
        const std::string what = message_of<ConfigError>(make);
        EXPECT_NE(what.find(text), std::string::npos) << call << ": " << what;
      };
      expect("all_reduce", [&] { group.all_reduce(one, op, options).wait(); });
      expect("a list", [&] { group.all_reduce(list, op, options).wait(); });
      expect("reduce", [&] { group.reduce(one, 0, op, options).wait(); });
      expect("reduce_scatter", [&] { group.reduce_scatter(one, all, op, options).wait(); });
      expect("all_gather", [&] { group.all_gather(all, one, options).wait(); });
      expect("broadcast", [&] { group.broadcast(list, 0, options).wait(); });
      expect("barrier", [&] { group.barrier(options).wait(); });
      expect("send_recv",
             [&] { group.send_recv(at::ones({2}), one, {.to = me, .from = me}, options).wait(); });
    };
    refuses({.divide_by = 7}, "divide_by = 7 is for ReduceOp::Average", ReduceOp::Sum);
    refuses({.divide_by = 7}, "divide_by = 7 is for ReduceOp::Average", ReduceOp::PreMulSum);
    refuses({.factor = 0.5}, "factor = 0.5 is for ReduceOp::PreMulSum", ReduceOp::Sum);
    refuses({.factor = 0.5}, "factor = 0.5 is for ReduceOp::PreMulSum", ReduceOp::Average);
    EXPECT_EQ(one[0].item<float>(), 1.f);
    group.all_reduce(one, ReduceOp::Average, {.divide_by = 2 * n}).wait();
    EXPECT_EQ(one[0].item<float>(), 0.5f);
  });
}

// Dropped, it is finished with the copies into the tensors.
TEST_P(GroupCalls, SeveralTensorsAtOnceMayBeDropped) {
  run([](World& world) {
    std::vector<at::Tensor> list{at::ones({3}), at::ones({2}, at::kLong)};
    { const Work dropped = world.group().all_reduce(list); }
    world.group().barrier().wait();
    EXPECT_EQ(list[0][2].item<float>(), static_cast<float>(world.size()));
    EXPECT_EQ(list[1][1].item<int64_t>(), world.size());
  });
}

TEST_P(GroupCalls, AGroupByAListOfRanks) {
  run_together([](World& world) {
    const int n = world.size(), me = world.rank();
    const std::vector<int> ranks{n - 1, 0};
    const Group group = world.group().subgroup(ranks);
    const bool inside = me == 0 || me == n - 1;
    EXPECT_EQ(group.size(), inside ? 2 : 1);
    EXPECT_EQ(group.rank(), me == 0 ? 1 : 0);
    EXPECT_EQ(group.world_ranks(), inside ? ranks : std::vector<int>{me});
    at::Tensor sum = at::full({3}, static_cast<float>(me));
    group.all_reduce(sum).wait();
    EXPECT_EQ(sum[0].item<float>(), inside ? n - 1 : me);

    EXPECT_EQ(group.rank_in(world.group(), 0), inside ? n - 1 : me);
    EXPECT_EQ(world.group().rank_in(group, 0), inside    ? std::optional(1)
                                               : me == 0 ? std::optional(0)
                                                         : std::nullopt);
    const Group turned = world.group().split(0, -me);
    EXPECT_EQ(turned.world_ranks().front(), n - 1);
    const Group again = turned.subgroup({0, 1});
    if (again.size() == 2) {
      EXPECT_EQ(again.world_ranks(), (std::vector<int>{n - 1, n - 2}));
    }

    EXPECT_NE(message_of<ConfigError>([&] {
                (void)world.group().subgroup({0, n});
              }).find("is not in this group"),
              std::string::npos);
    EXPECT_NE(message_of<ConfigError>([&] {
                (void)world.group().subgroup({0, 0});
              }).find("twice"),
              std::string::npos);
    EXPECT_NE(message_of<ConfigError>([&] {
                (void)world.group().subgroup({me});
              }).find("different lists"),
              std::string::npos);
    world.group().barrier().wait();
  });
}

TEST_P(GroupCalls, AnAbortedGroupEndsOnEveryRank) {
  run([](World& world) {
    const Group group = world.group().subgroup([&] {
      std::vector<int> all(world.size());
      std::iota(all.begin(), all.end(), 0);
      return all;
    }());
    EXPECT_EQ(group.failure(), std::nullopt);
    world.group().barrier().wait();
    at::Tensor data = at::ones({1000});
    if (world.rank() == world.size() - 1) {
      group.abort("the loss is not a number");
      EXPECT_NE(group.failure().value_or("").find("the loss is not a number"), std::string::npos);
    } else {
      const std::string said = message_of<CommError>([&] { group.all_reduce(data).wait(); });
      EXPECT_NE(said.find("the loss is not a number"), std::string::npos) << said;
    }
    EXPECT_NE(message_of<CommError>([&] { group.all_reduce(data).wait(); }), "nothing");
    EXPECT_TRUE(group.failure());
    // The others go on.
    world.group().barrier().wait();
  });
}

TEST_P(GroupCalls, AnotherThreadReleasesAWaitByAborting) {
  run_together([](World& world) {
    const Group group = world.group().split(0);
    if (world.rank() == 0) {
      std::atomic<bool> waits = false;
      std::thread other([&] {
        while (!waits) std::this_thread::yield();
        group.abort("it took too long");
      });
      at::Tensor data = at::ones({10});
      const std::string said = message_of<CommError>([&] {
        Work work = group.all_reduce(data);
        waits = true;
        work.wait();
      });
      EXPECT_NE(said.find("it took too long"), std::string::npos) << said;
      other.join();
    } else {
      std::optional<std::string> why;
      while (!(why = group.failure())) std::this_thread::sleep_for(milliseconds(5));
      EXPECT_NE(why->find("it took too long"), std::string::npos) << *why;
    }
    world.group().barrier().wait();
  });
}

TEST_P(GroupCalls, AStreamIsForDevices) {
  run([](World& world) {
    const c10::Stream stream(c10::Stream::DEFAULT, at::kCPU);
    at::Tensor data = at::ones({3});
    EXPECT_EQ(message_of<ConfigError>([&] {
                world.group().all_reduce(data, ReduceOp::Sum, {.stream = stream}).wait();
              }),
              "[comm] all_reduce: CallOptions::stream is for tensors on a device, these are on the "
              "CPU");
    world.group().all_reduce(data).wait();
    EXPECT_EQ(data[0].item<float>(), static_cast<float>(world.size()));
  });
}

TEST_P(GroupCalls, TheStoreIsCommonToTheRanks) {
  run([](World& world) {
    const KeyValueStore store = world.store().prefix("numbers");
    const int n = world.size();
    EXPECT_FALSE(store.contains("nobody's"));
    store.set("of " + std::to_string(world.rank()), std::string("a\0b", 3));
    std::vector<std::string> keys;
    for (int r = 0; r < n; ++r) keys.push_back("of " + std::to_string(r));
    store.wait(keys);
    EXPECT_EQ(store.get(keys.back()), std::string("a\0b", 3));
    EXPECT_TRUE(world.store().contains("numbers/of 0"));
    EXPECT_GE(store.add("count", 2), 2);
    world.group().barrier().wait();
    EXPECT_EQ(store.add("count", 0), 2 * n);
    // One of them is the first.
    const std::string first = store.compare_set("first", "", std::to_string(world.rank()));
    world.group().barrier().wait();
    EXPECT_EQ(store.get("first"), first);
    EXPECT_EQ(store.compare_set("first", "nobody", "x"), first);
    EXPECT_NE(message_of<CommError>([&] { (void)store.get("nobody's", milliseconds(20)); }),
              "nothing");
    world.group().barrier().wait();
    const auto refused = [&](const auto& call) { return message_of<ConfigError>(call); };
    EXPECT_NE(refused([&] { (void)store.add("of 0", 1); }).find("not a number"), std::string::npos);
    const std::string large((size_t{64} << 20) + 1, 'x');
    EXPECT_NE(refused([&] { store.set("large", large); }).find("64 MiB"), std::string::npos);
    EXPECT_EQ(store.get("of 0"), std::string("a\0b", 3));  // still usable
    world.group().barrier().wait();
    if (world.rank() == 0) {
      EXPECT_TRUE(store.erase("first"));
    }
    world.group().barrier().wait();
    EXPECT_FALSE(store.contains("first"));
    EXPECT_FALSE(store.erase("first"));
    world.group().barrier().wait();
  });
}

TEST_P(GroupCalls, AWrongRootOfByteStringsLeavesTheGroupAsItWas) {
  run([](World& world) {
    const Group& group = world.group();
    if (group.rank() == 0) {
      for (const int root : {-1, group.size()}) {
        EXPECT_THROW((void)group.gather_bytes("text", root), ConfigError);
        EXPECT_THROW((void)group.broadcast_bytes("text", root), ConfigError);
      }
    }
    const auto all = group.gather_bytes("text");
    EXPECT_EQ(all.size(), group.rank() == 0 ? static_cast<size_t>(group.size()) : 0);
  });
}

}  // namespace
}  // namespace lockstep::comm
