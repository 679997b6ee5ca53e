// Ranks over TCP, each a thread of this process with a net of its own. Sanitizers see all of it.
#include "comm/net/net.h"

#include <gmock/gmock.h>

#include <barrier>
#include <numeric>
#include <random>

#include "comm/net/ops.h"
#include "engine/net_ranks.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// An all_reduce in place, of int64.
struct Sum {
  Sum(int rank, int size, std::vector<int64_t>& data) {
    const auto count = static_cast<int64_t>(data.size());
    call.reduction = {Element::Int64, Combine::Sum};
    call.parts.resize(1);
    for (int r = 0; r < size; ++r) {
      const int64_t begin = count * r / size, end = count * (r + 1) / size;
      char* const at = reinterpret_cast<char*>(data.data() + begin);
      call.parts[0].push_back(at);
      call.results.push_back(at);
      call.bytes.push_back((end - begin) * 8);
      if (r != rank) call.takers.push_back(r);
    }
    call.sum = call.results[static_cast<size_t>(rank)];
  }
  DirectCall call;
};

class NetOf : public testing::TestWithParam<std::pair<int, NetPayload>> {};

std::string name_of(const testing::TestParamInfo<std::pair<int, NetPayload>>& test) {
  const bool encrypted = test.param.second == NetPayload::Encrypted;
  return std::to_string(test.param.first) + (encrypted ? "Encrypted" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, NetOf,
    testing::Values(std::pair(2, NetPayload::Plain), std::pair(3, NetPayload::Plain),
                    std::pair(4, NetPayload::Plain), std::pair(7, NetPayload::Plain),
                    std::pair(2, NetPayload::Encrypted), std::pair(4, NetPayload::Encrypted)),
    name_of);

TEST_P(NetOf, CollectivesOfEverySize) {
  const auto [size, payload] = GetParam();
  Ranks ranks(size, payload);
  const auto direct = std::make_shared<const Direct>(Direct::of_ranks(size));
  ranks.run([&, size = size](NetGroup& group, int rank) {
    Caller caller(group);
    caller.call([](const NetPort& port) { net::barrier(port); });
    for (const size_t count : {0, 1, 5, 4096, 40'000, 700'000}) {
      std::vector<int64_t> data(count);
      for (size_t i = 0; i < count; ++i) data[i] = static_cast<int64_t>(i) + rank;
      Sum sum(rank, size, data);
      caller.call([&](const NetPort& port) { net::reduce(port, direct, sum.call); });
      const int64_t ranks_sum = size * (size - 1) / 2;
      bool same = true;
      for (size_t i = 0; i < count; ++i) {
        same = same && data[i] == static_cast<int64_t>(i) * size + ranks_sum;
      }
      EXPECT_TRUE(same) << count;
      // From each root.
      const int root = static_cast<int>(count % static_cast<size_t>(size));
      for (int64_t& value : data) value = rank == root ? value + 1 : -1;
      const net::Span whole{reinterpret_cast<char*>(data.data()), static_cast<int64_t>(count) * 8};
      caller.call([&](const NetPort& port) { net::broadcast(port, root, whole); });
      same = true;
      for (size_t i = 0; i < count; ++i) {
        same = same && data[i] == static_cast<int64_t>(i) * size + ranks_sum + 1;
      }
      EXPECT_TRUE(same) << count;
      // All to all, each pair another size.
      std::vector<std::vector<char>> in, out;
      std::vector<net::Span> in_spans, out_spans;
      for (int r = 0; r < size; ++r) {
        out.emplace_back(count * static_cast<size_t>(r + 1) + 1, static_cast<char>(rank));
        in.emplace_back(count * static_cast<size_t>(rank + 1) + 1, '\x7f');
        out_spans.push_back({out.back().data(), static_cast<int64_t>(count) * (r + 1)});
        in_spans.push_back({in.back().data(), static_cast<int64_t>(count) * (rank + 1)});
      }
      caller.call([&](const NetPort& port) { net::exchange(port, in_spans, out_spans); });
      for (size_t r = 0; count > 0 && r < in.size(); ++r) {
        EXPECT_EQ(in[r].front(), static_cast<char>(r));
        EXPECT_EQ(in[r][in[r].size() - 2], static_cast<char>(r));
        EXPECT_EQ(in[r].back(), '\x7f');
      }
    }
  });
}

TEST(Net, CountersMayWrap) {
  constexpr int kCalls = 40;
  Ranks ranks(3);
  const auto direct = std::make_shared<const Direct>(Direct::of_ranks(3));
  ranks.run([&](NetGroup& group, int rank) {
    Caller caller(group, -uint32_t{kCalls / 2});
    // All under way at once, short ones and long ones.
    std::vector<std::vector<int64_t>> data;
    std::vector<Sum> sums;
    std::vector<std::shared_ptr<NetJob>> jobs;
    for (int i = 0; i < kCalls; ++i) {
      data.emplace_back(i % 5 == 0 ? 20'000 : 5, rank + i);
      sums.emplace_back(rank, 3, data.back());
    }
    for (const Sum& sum : sums) {
      jobs.push_back(
          caller.start([&](const NetPort& port) { net::reduce(port, direct, sum.call); }));
    }
    for (int i = 0; i < kCalls; ++i) {
      caller.finish(*jobs[static_cast<size_t>(i)]);
      EXPECT_EQ(data[static_cast<size_t>(i)].back(), 3 + 3 * i);
    }
  });
}

TEST(Net, AFastRankDoesNotFillASlowOnesMemory) {
  Ranks ranks(2);
  constexpr int kCalls = 3000, kBytes = 16 << 10;
  ranks.run([&](NetGroup& group, int rank) {
    Caller caller(group);
    std::vector<char> data(kBytes, static_cast<char>(rank));
    const net::Span span{data.data(), kBytes};
    for (int i = 0; i < kCalls; ++i) {
      caller.call([&](const NetPort& port) { net::broadcast(port, 0, span); });
    }
    caller.call([](const NetPort& port) { net::barrier(port); });
  });
}

TEST(Net, CallsAreWaitedForInAnyOrder) {
  Ranks ranks(3);
  const auto direct = std::make_shared<const Direct>(Direct::of_ranks(3));
  ranks.run([&](NetGroup& group, int rank) {
    Caller caller(group);
    std::vector<std::vector<int64_t>> data;
    std::vector<std::unique_ptr<Sum>> sums;
    std::vector<std::shared_ptr<NetJob>> jobs;
    for (size_t i = 0; i < 30; ++i) data.emplace_back(1 + 997 * i, rank);
    for (size_t i = 0; i < 30; ++i) {
      sums.push_back(std::make_unique<Sum>(rank, 3, data[i]));
      jobs.push_back(
          caller.start([&](const NetPort& port) { net::reduce(port, direct, sums.back()->call); }));
    }
    std::vector<size_t> order(30);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(rank)));
    for (const size_t i : order) {
      caller.finish(*jobs[i]);
      EXPECT_EQ(data[i].back(), 3);
    }
  });
}

TEST(Net, DifferentCallsFailOnBothSidesAtOnce) {
  for (const int64_t bytes : {8, 1 << 20}) {
    Ranks ranks(2);
    ranks.run([&](NetGroup& group, int rank) {
      Caller caller(group);
      std::vector<char> data(static_cast<size_t>(bytes));
      // Each is the root of its own, so that both send.
      const auto job = caller.start(
          [&](const NetPort& port) {
            net::broadcast(port, rank, {data.data(), bytes});
          },
          static_cast<uint32_t>(rank));
      if (bytes > 8) {
        // Or what the other, which knew it first, said of it.
        EXPECT_THAT(caller.failure_of(*job),
                    testing::AnyOf("is not what the others called", "aborted the group: test"));
      }
      const auto next = caller.start(
          [&](const NetPort& port) {
            net::broadcast(port, 0, {data.data(), bytes});
          },
          static_cast<uint32_t>(rank) + 5);
      if (rank == 1) {
        EXPECT_NE(caller.failure_of(*next), "nothing");
      }
      group.abort("test");
    });
  }
}

TEST(Net, SizesThatDoNotFitAreRefused) {
  for (const int64_t bytes : {16, 100'000}) {
    Ranks ranks(2);
    ranks.run([&](NetGroup& group, int rank) {
      Caller caller(group);
      std::vector<char> data(200'000);
      const auto job = caller.start([&](const NetPort& port) {
        if (rank == 0) port.send(1, 0, data.data(), bytes + 8);
        if (rank == 1) port.recv(0, 0, data.data(), bytes);
      });
      // What is short and was sent may be over there.
      const std::string failure = caller.failure_of(*job);
      if (rank == 1) {
        EXPECT_THAT(failure, HasSubstr("does not fit: rank 0 sends"));
      } else if (bytes > 16) {
        EXPECT_THAT(failure, HasSubstr("does not fit: rank 1 expects"));
      }
    });
  }
}

// Rank 0 leaves with a call under way: rank 1's wait ends with the reason.
TEST(Net, AGroupThatIsGivenUpEndsTheOthersWaits) {
  Ranks ranks(3);
  std::vector<char> data[3] = {std::vector<char>(1 << 20), std::vector<char>(1 << 20),
                               std::vector<char>(1 << 20)};
  std::barrier<> all_are_connected(3);
  ranks.run([&](NetGroup& group, int rank) {
    Caller caller(group);
    caller.call([](const NetPort& port) { net::barrier(port); });
    all_are_connected.arrive_and_wait();
    const auto job = caller.start(
        [&](const NetPort& port) {
          net::broadcast(port, 2, {data[rank].data(), 1 << 20});
        },
        rank == 2 ? 1u : 7u);
    if (rank == 0) {
      group.abort("of its own");
      return;
    }
    EXPECT_NE(caller.failure_of(*job), "nothing");
  });
}

// As where there is no route: connect() says so at once.
TEST(Net, AnAddressThatCannotBeCalledFailsWhoNeedsIt) {
  Ranks ranks(2, NetPayload::Plain, [](std::vector<std::string> addresses) {
    addresses[0] = "255.255.255.255 9";
    return addresses;
  });
  ranks.run([](NetGroup& group, int rank) {
    if (rank == 0) return;
    Caller caller(group);
    const auto job = caller.start([](const NetPort& port) { net::barrier(port); });
    EXPECT_THAT(caller.failure_of(*job), HasSubstr("cannot be reached at 255.255.255.255 9"));
  });
}

// As when its process ends.
TEST(Net, ARankThatEndsFailsWhoNeedsIt) {
  Ranks ranks(3);
  std::shared_ptr<NetJob> jobs[2];
  std::vector<char> data(64);
  ranks.run([&](NetGroup& group, int rank) {
    Caller caller(group);
    caller.call([](const NetPort& port) { net::barrier(port); });
    if (rank == 2) return;
    const auto job = caller.start([&](const NetPort& port) { net::barrier(port); });
    EXPECT_THAT(caller.failure_of(*job), HasSubstr("has left the group"));
  });
}

TEST(Net, StrangersGetNothingAndLeaveNoDescriptor) {
  Ranks ranks(2);
  std::vector<Fd> strangers;
  const auto stranger = [&](std::string_view bytes) {
    Fd fd = test::connection_to(ranks.port(0));
    if (!bytes.empty()) {
      EXPECT_GT(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
    }
    strangers.push_back(std::move(fd));
  };
  for (int i = 0; i < 200; ++i) stranger("");
  stranger("GET / HTTP/1.1\r\n\r\n");
  stranger(std::string(1000, '\x16'));
  NetHandshake wrong = NetHandshake::caller(key_of(2), 1, 0, NetPayload::Plain);
  stranger(wrong.take_output());
  ranks.run([&](NetGroup& group, int) {
    Caller caller(group);
    for (int i = 0; i < 10; ++i) caller.call([](const NetPort& port) { net::barrier(port); });
  });
  // All ranks have met: only each other's connection is left, and nobody listens any more.
  EXPECT_EQ(ranks.net(0)->connections(), 1u);
  for (const Fd& silent : strangers) {
    char byte;
    EXPECT_LE(recv(silent.get(), &byte, 1, 0), 0);
  }
  const Fd late(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = test::loopback(ranks.port(0));
  EXPECT_NE(connect(late.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
}

// Wires that lead nowhere.
class NoWires final : public NetWires, public NetSink {
 public:
  NetLine& line_to(int) override { return line_; }
  NetLine& line_if_any(int) override { return line_; }
  std::optional<std::string> gone(int) const override { return std::nullopt; }
  void forget(const NetJob* job) override { line_.forget(job); }
  void changed() override {}
  NetTarget arrived(int, const NetFrame&) override { return {}; }

 private:
  NetLine line_{1, *this};
};

// What follows a message may end its call, and whoever waited lets go of it at once.
TEST(NetBox, ACallThatEndsWithinItsOwnMessageIsStillThereAfterwards) {
  NoWires wires;
  NetBox box(1, wires);
  box.join(0, {0, 1});
  auto job = box.open({.number = 1, .checksum = 7});
  const std::weak_ptr<NetJob> seen = job;
  bool is_there = false;
  char data[8];
  box.recv(*job, 1, 0, data, sizeof data, [&] {
    box.abort("test");
    job.reset();
    is_there = !seen.expired();
  });
  box.begun(*job);
  const NetTarget target = box.arrived(
      1, {.kind = NetKind::Eager, .group = 1, .key = {.number = 1}, .checksum = 7, .bytes = 8});
  ASSERT_TRUE(target.done);
  target.done();
  EXPECT_TRUE(is_there);
  EXPECT_TRUE(job == nullptr);
}

TEST(NetHandshake, BothLearnWhoTheOtherIsAndTakeNothingThatFollows) {
  NetHandshake caller = NetHandshake::caller(key_of(1), 5, 2, NetPayload::Plain);
  NetHandshake called = NetHandshake::called(key_of(1), 2, NetPayload::Plain);
  std::string to_called = caller.take_output(), to_caller;
  while (!caller.is_over() || !called.is_over()) {
    const auto pass = [](std::string& bytes, NetHandshake& to) {
      while (!bytes.empty() && !to.is_over()) {
        const size_t count = std::min({bytes.size(), to.wants(), size_t{3}});
        to.feed(bytes.substr(0, count));
        bytes.erase(0, count);
      }
    };
    pass(to_called, called);
    to_caller += called.take_output();
    pass(to_caller, caller);
    to_called += caller.take_output();
  }
  EXPECT_EQ(called.peer(), 5);
  EXPECT_EQ(caller.peer(), 2);
  EXPECT_TRUE(to_called.empty() && to_caller.empty());
}

TEST(NetFrame, IsReadAsItWasWrittenAndNothingElseIs) {
  const NetFrame frame{.kind = NetKind::Grant,
                       .group = 0x1234567890abcdef,
                       .key = {1, 2, 3},
                       .checksum = 4,
                       .bytes = 5};
  std::string bytes = frame.packed();
  ASSERT_EQ(bytes.size(), NetFrame::kBytes);
  const NetFrame read = NetFrame::unpacked(bytes.data());
  EXPECT_EQ(read.group, frame.group);
  EXPECT_EQ(read.key, frame.key);
  EXPECT_EQ(read.bytes, 5);
  for (const size_t at : {0, 1, 2, 3, 28, 39}) {
    std::string wrong = bytes;
    wrong[at] ^= '\x40';
    EXPECT_THROW((void)NetFrame::unpacked(wrong.data()), Error) << at;
  }
}

}  // namespace
}  // namespace lockstep::comm
