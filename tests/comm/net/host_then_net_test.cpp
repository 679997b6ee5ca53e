// What is particular to ranks on several hosts, which are pretended by LOCKSTEP_HOST;
// tests/comm/group/collectives_test.cpp runs every collective on them, tests/system/wire_test.py
// real networks.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using std::chrono::steady_clock;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using namespace std::chrono_literals;

const std::vector<int> kTwoByTwo{0, 0, 1, 1};

TEST(HostThenNet, IsWhatAutoTakesForSeveralRanksOnSeveralHosts) {
  spawn(4,
        [](World& world) {
          EXPECT_EQ(world.group().backend(), "host-then-net");
          EXPECT_THAT(world.describe(), HasSubstr("4 ranks on 2 hosts, host-then-net"));
          EXPECT_EQ(world.local_size(), 2);
          EXPECT_EQ(world.local_rank(), world.rank() % 2);
        },
        {.hosts = kTwoByTwo});
}

TEST(HostThenNet, PartsTakeTheTransportThatSuitsThem) {
  spawn(6,
        [](World& world) {
          const int rank = world.rank();
          const auto sum_of = [rank](const Group& group) {
            at::Tensor t = at::full({1000}, static_cast<float>(rank));
            group.all_reduce(t).wait();
            return t[999].item<float>();
          };
          const Group host = world.group().split(rank / 3), across = world.group().split(rank % 3);
          EXPECT_EQ(host.backend(), "shm");
          EXPECT_EQ(sum_of(host), rank < 3 ? 3.f : 12.f);
          EXPECT_EQ(across.backend(), "tcp");
          EXPECT_EQ(sum_of(across), 3.f + 2 * (rank % 3));
          const Group some = world.group().split(rank % 3 == 2 ? -1 : 0);
          EXPECT_EQ(some.backend(), rank % 3 == 2 ? "solo" : "host-then-net");
          EXPECT_EQ(sum_of(some), rank % 3 == 2 ? rank : 8.f);
          EXPECT_EQ(sum_of(world.group()), 15.f);
        },
        {.hosts = {0, 0, 0, 1, 1, 1}});
}

// Ranks compare the sizes of lists before they send them: those that have come to that move on what
// rank 1 waits for first.
TEST(HostThenNet, ACallThatComparesSizesHoldsUpNoEarlierOne) {
  spawn(4,
        [](World& world) {
          const Group& group = world.group();
          at::Tensor told = at::full({100000}, static_cast<float>(world.rank()));
          std::vector<at::Tensor> in, out;
          for (int r = 0; r < 4; ++r) {
            in.push_back(at::full({r + 1}, static_cast<float>(world.rank())));
            out.push_back(at::zeros({world.rank() + 1}));
          }
          comm::Work broadcast = group.broadcast(told, 2);
          if (world.rank() == 1) broadcast.wait();
          group.all_to_all(out, in).wait();
          broadcast.wait();
          EXPECT_EQ(told[99999].item<float>(), 2.f);
          for (int r = 0; r < 4; ++r) EXPECT_EQ(out[r][0].item<float>(), static_cast<float>(r));
        },
        {.hosts = kTwoByTwo, .timeout = 20s});
}

TEST(HostThenNet, IsRefusedOnOneHost) {
  spawn_bare(
      2,
      [](int) {
        try {
          World::from_env();
          FAIL() << "no error";
        } catch (const ConfigError& error) {
          EXPECT_THAT(
              error.what(),
              HasSubstr("host-then-net backend was asked for, but the 2 ranks are on 1 host"));
        }
      },
      {.backend = "host-then-net"});
}

// A rank is lost on one host: those of the other hear of it over the network, or from a rank of
// their own host that has.
TEST(HostThenNet, ALostRankIsNamedOnEveryHost) {
  spawn(4,
        [](World& world) {
          world.group().barrier().wait();
          if (world.rank() == 3) raise(SIGKILL);
          at::Tensor t = at::ones({100000});
          const auto start = steady_clock::now();
          const std::string error = message_of<CommError>([&] {
            for (;;) world.group().all_reduce(t, ReduceOp::Sum, {.label = "bucket 1"}).wait();
          });
          EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
          EXPECT_THAT(error, AllOf(HasSubstr("all_reduce sum #"), HasSubstr("bucket 1"),
                                   HasSubstr("float32 x 100000"), HasSubstr("rank 3")));
          EXPECT_THAT(message_of<CommError>([&] { world.group().barrier().wait(); }),
                      HasSubstr("this group has failed"));
        },
        {.hosts = kTwoByTwo, .doomed = {3}});
}

TEST(HostThenNet, DifferentCallsOnTheTwoHostsAreQuoted) {
  spawn(4,
        [](World& world) {
          const auto start = steady_clock::now();
          const std::string error = message_of<CommError>([&] {
            if (world.rank() < 2) world.group().all_reduce(at::ones({4})).wait();
            if (world.rank() >= 2) world.group().all_reduce(at::ones({5})).wait();
          });
          EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
          // The ranks that exchange data quote both calls; the others of their hosts quote them.
          EXPECT_THAT(error, AllOf(HasSubstr("float32 x 4"), HasSubstr("float32 x 5")));
        },
        {.hosts = kTwoByTwo});
}

TEST(HostThenNet, DifferentCallsOnOneHostAreQuotedAtOnce) {
  spawn(4,
        [](World& world) {
          const std::string error = message_of<CommError>([&] {
            if (world.rank() == 3) world.group().barrier().wait();
            if (world.rank() != 3) world.group().all_reduce(at::ones({4})).wait();
          });
          EXPECT_THAT(error, AllOf(HasSubstr("all_reduce sum #"), HasSubstr("barrier #"),
                                   HasSubstr("rank 3")));
        },
        {.hosts = kTwoByTwo});
}

TEST(HostThenNet, TheDeadlineNamesTheRankThatStaysAway) {
  spawn(4,
        [](World& world) {
          const Group& group = world.group();
          group.barrier().wait();
          if (world.rank() == 0) {
            // Comes when the others have given up, over the network, too.
            EXPECT_NE(message_of<CommError>([&] { group.recv(at::zeros({1}), 2).wait(); }),
                      "nothing");
            return;
          }
          const std::string error = message_of<CommError>(
              [&] { group.all_reduce(at::ones({8}), ReduceOp::Sum, {.timeout = 2s}).wait(); });
          EXPECT_THAT(error, HasSubstr("all_reduce sum #"));
          EXPECT_THAT(error, HasSubstr("rank 0"));
        },
        {.hosts = kTwoByTwo});
}

// The failure of a call that only the network carries ends what goes over shared memory, too.
TEST(HostThenNet, AfterAFailureOnOneLevelBothAreDead) {
  spawn(4,
        [](World& world) {
          const Group& group = world.group();
          group.barrier().wait();
          const auto start = steady_clock::now();
          if (world.rank() == 0) {
            EXPECT_NE(message_of<CommError>(
                          [&] { group.recv(at::zeros({1}), 2, 0, {.timeout = 300ms}).wait(); }),
                      "nothing");
          }
          const std::string error =
              message_of<CommError>([&] { group.all_reduce(at::ones({8})).wait(); });
          EXPECT_THAT(error, HasSubstr("recv"));
          EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
        },
        {.hosts = kTwoByTwo});
}

// What one rank calls with another root than the others, and the barrier after it: a rank whose
// part is over returns before the others find out. Errors then quote the barrier that it has
// reached, not its root.
TEST(HostThenNet, RootsThatDifferAreAnError) {
  using Call = std::function<void(const Group&, int root)>;
  const std::vector<Call> calls{
      [](const Group& group, int root) { group.reduce(at::ones({4}), root).wait(); },
      [](const Group& group, int root) { group.reduce(at::ones({400000}), root).wait(); },
      [](const Group& group, int root) { group.broadcast(at::ones({4}), root).wait(); },
      [](const Group& group, int root) { group.broadcast(at::ones({400000}), root).wait(); },
      [](const Group& group, int root) {
        std::vector<at::Tensor> parts;
        for (int r = 0; r < (group.rank() == root ? 4 : 0); ++r) parts.push_back(at::ones({4}));
        group.gather(parts, at::ones({4}), root).wait();
      },
      [](const Group& group, int root) {
        std::vector<at::Tensor> parts;
        for (int r = 0; r < (group.rank() == root ? 4 : 0); ++r) parts.push_back(at::ones({4}));
        group.scatter(at::ones({4}), parts, root).wait();
      },
  };
  spawn(4,
        [&](World& world) {
          for (size_t i = 0; i < calls.size(); ++i) {
            for (int other = 0; other < 4; ++other) {
              SCOPED_TRACE(testing::Message() << "call " << i << ", rank " << other);
              const Group group = world.group().split(0);
              const std::string error = message_of<CommError>([&] {
                calls[i](group, world.rank() == other ? 2 : 0);
                group.barrier().wait();
              });
              EXPECT_THAT(error, AnyOf(HasSubstr("root 0"), HasSubstr("root 2")));
              EXPECT_THAT(error, Not(HasSubstr("timed out")));
            }
          }
        },
        {.hosts = kTwoByTwo});
}

// Each host agrees with itself, so only the network sees it.
TEST(HostThenNet, SumsForDifferentRootsOnTheHostsAreAnError) {
  spawn(4,
        [](World& world) {
          EXPECT_THAT(message_of<CommError>([&] {
                        world.group().reduce(at::ones({4}), world.rank() < 2 ? 0 : 2).wait();
                      }),
                      AllOf(HasSubstr("root 0"), HasSubstr("root 2")));
        },
        {.hosts = kTwoByTwo});
}

// They go by different parts of the transport, none of which sees both.
TEST(HostThenNet, DifferentCollectivesAreQuotedLongBeforeTheDeadline) {
  using Call = std::function<void(const Group&)>;
  const Call all_reduce = [](const Group& group) { group.all_reduce(at::ones({4})).wait(); };
  const Call broadcast = [](const Group& group) { group.broadcast(at::ones({4}), 2).wait(); };
  const Call barrier = [](const Group& group) { group.barrier().wait(); };
  const Call all_to_all = [](const Group& group) {
    group.all_to_all(at::ones({4}), at::ones({4})).wait();
  };
  const Call all_gather = [](const Group& group) {
    group.all_gather(at::ones({16}), at::ones({4})).wait();
  };
  struct Case {
    Call here, there;
    std::string name_here, name_there;
  };
  const std::vector<Case> cases{
      {all_reduce, broadcast, "all_reduce sum #1", "broadcast #1"},
      {broadcast, all_reduce, "broadcast #1", "all_reduce sum #1"},
      {all_to_all, all_reduce, "all_to_all #1", "all_reduce sum #1"},
      {barrier, all_to_all, "barrier #1", "all_to_all #1"},
      {all_gather, barrier, "all_gather #1", "barrier #1"},
  };
  spawn(4,
        [&](World& world) {
          for (const Case& one : cases) {
            SCOPED_TRACE(one.name_here + " and " + one.name_there);
            const Group group = world.group().split(0);
            const auto start = steady_clock::now();
            const std::string error = message_of<CommError>([&] {
              (world.rank() == 3 ? one.here : one.there)(group);
              (world.rank() == 3 ? one.there : one.here)(group);
            });
            EXPECT_LT(steady_clock::now() - start, 30s);  // of a deadline of 60 s
            EXPECT_THAT(error, AllOf(HasSubstr(one.name_here), HasSubstr(one.name_there)));
          }
        },
        {.hosts = kTwoByTwo});
}

// By a thread beside the one that waits, which then drops its operations.
TEST(HostThenNet, AnAbortReachesEveryRankWithItsReason) {
  spawn(4,
        [](World& world) {
          const int rank = world.rank();
          for (int i = 0; i < 20; ++i) {
            const Group group = world.group().split(0);
            std::atomic<int> calls = 0;
            std::thread aborting;
            if (rank == 0) {
              aborting = std::thread([&] {
                while (calls < 3) std::this_thread::yield();
                group.abort("bad data");
              });
            }
            const std::string error = message_of<CommError>([&] {
              for (;; ++calls) {
                const at::Tensor in = at::ones({4}), out = at::ones({4});
                group.send_recv(out, in, {.to = (rank + 1) % 4, .from = (rank + 3) % 4}).wait();
              }
            });
            EXPECT_THAT(error, HasSubstr("bad data"));
            if (aborting.joinable()) aborting.join();
          }
        },
        {.hosts = kTwoByTwo});
}

// Its neighbour waits for it in shared memory, the ranks of the other hosts wait for its neighbour.
TEST(HostThenNet, TheDeadlineBlamesNoRankThatWaitsForAnother) {
  spawn(6,
        [](World& world) {
          const std::vector<std::string> keys{"over/0", "over/2", "over/3", "over/4", "over/5"};
          if (world.rank() == 1) return world.store().wait(keys);
          const std::string error = message_of<CommError>([&] {
            const comm::CallOptions options{.timeout = 2s};
            world.group()
                .reduce_scatter(at::ones({6}), at::ones({36}), ReduceOp::Sum, options)
                .wait();
          });
          world.store().set("over/" + std::to_string(world.rank()), "");
          EXPECT_THAT(error,
                      AllOf(HasSubstr("timed out after 2 s"), HasSubstr("rank 1 did not answer"),
                            Not(HasSubstr("rank 0 did not answer"))));
        },
        {.hosts = {0, 0, 1, 1, 2, 2}});
}

TEST(HostThenNet, ARankThatPollsSeesTheDeadline) {
  spawn(4,
        [](World& world) {
          const std::vector<std::string> keys{"over/1", "over/2", "over/3"};
          if (world.rank() == 0) return world.store().wait(keys);
          const auto start = steady_clock::now();
          comm::Work work =
              world.group().all_reduce(at::ones({8}), ReduceOp::Sum, {.timeout = 300ms});
          while (!work.is_completed() && steady_clock::now() - start < 20s)
            std::this_thread::yield();
          EXPECT_LT(steady_clock::now() - start, 20s);
          EXPECT_THAT(message_of<CommError>([&] { work.wait(); }), HasSubstr("timed out"));
          world.store().set("over/" + std::to_string(world.rank()), "");
        },
        {.hosts = kTwoByTwo});
}

}  // namespace
}  // namespace lockstep::test
