// A group over sockets whose ranks end, stay away or disagree.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "core/process/stat.h"
#include "lockstep/core/error.h"
#include "support/pretend_launcher.h"
#include "support/signal.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using std::chrono::steady_clock;
using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

class NetFailure : public testing::TestWithParam<std::string> {
 protected:
  // With which errors begin.
  std::string address() const { return "[" + GetParam() + "]"; }
};
INSTANTIATE_TEST_SUITE_P(Backends, NetFailure, testing::Values("tcp", "gloo"),
                         [](const auto& one) { return one.param; });

TEST_P(NetFailure, ALostPeerEndsTheWaitAtOnce) {
  spawn(3,
        [&](World& world) {
          world.group().barrier().wait();
          if (world.rank() == 2) raise(SIGKILL);
          at::Tensor t = at::ones({1000});
          const auto start = steady_clock::now();
          const std::string error =
              message_of<CommError>([&] { world.group().all_reduce(t).wait(); });
          EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
          EXPECT_THAT(error, AllOf(HasSubstr(address() + " all_reduce #2"),
                                   HasSubstr("float32 x 1000"), HasSubstr("rank 2")));
        },
        {.backend = GetParam(), .doomed = {2}});
}

TEST_P(NetFailure, TheLaunchersWordEndsTheWaitThoughConnectionsStay) {
  PretendLauncher launcher(3);
  spawn(3,
        [&](World& world) {
          world.group().barrier().wait();
          const auto start = steady_clock::now();
          if (world.rank() == 2) {
            launcher.control.record_exit(2, SIGKILL);
            launcher.control.report_failure();
          }
          // Rank 2, which the launcher says is gone, waits for the others and so keeps its
          // connections.
          const std::string error = message_of<CommError>([&] {
            if (world.rank() == 2) world.group().recv(at::ones({4}), 0).wait();
            world.group().all_reduce(at::ones({4})).wait();
          });
          EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
          if (world.rank() < 2) {
            EXPECT_THAT(error, HasSubstr("rank 2 was killed by SIGKILL"));
          }
        },
        {.backend = GetParam()});
}

TEST_P(NetFailure, TheDeadlineNamesTheRankThatStaysAway) {
  spawn(3,
        [&](World& world) {
          world.group().barrier().wait();
          // Rank 2 comes when the others have given up.
          if (world.rank() == 2) {
            const std::string late = message_of<CommError>([&] {
              for (;;) world.group().recv(at::zeros({1}), 0, 0, {.label = "elsewhere"}).wait();
            });
            EXPECT_NE(late, "nothing");
            return;
          }
          at::Tensor t = at::ones({8}, at::kDouble);
          // Longer than a rank waits before it says what it waits for.
          const std::string error = message_of<CommError>([&] {
            world.group()
                .all_reduce(t, ReduceOp::Sum, {.timeout = 2500ms, .label = "bucket 3"})
                .wait();
          });
          EXPECT_THAT(error,
                      AllOf(HasSubstr(address() + " all_reduce #2 (bucket 3, sum, float64 x 8)"),
                            HasSubstr("rank 2 is at recv #1 (elsewhere, from rank 0")));
          EXPECT_THAT(error, testing::AnyOf(HasSubstr("timed out after 2.5 s on rank"),
                                            HasSubstr("failed (")));
        },
        {.backend = GetParam()});
}

TEST_P(NetFailure, DifferentCallsAreQuotedLongBeforeTheDeadline) {
  spawn(2,
        [](World& world) {
          const auto start = steady_clock::now();
          const std::string error = message_of<CommError>([&] {
            if (world.rank() == 0) world.group().all_reduce(at::ones({4})).wait();
            if (world.rank() == 1) world.group().all_reduce(at::ones({5})).wait();
          });
          EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
          EXPECT_THAT(error, AllOf(HasSubstr("x 4"), HasSubstr("x 5")));
        },
        {.backend = GetParam()});
}

TEST_P(NetFailure, DifferentCollectivesAreQuotedOnBothSides) {
  spawn(2,
        [](World& world) {
          const std::string error = message_of<CommError>([&] {
            if (world.rank() == 0) world.group().all_reduce(at::ones({4})).wait();
            if (world.rank() == 1) world.group().broadcast(at::ones({4})).wait();
          });
          EXPECT_THAT(error, AllOf(HasSubstr("all_reduce #1"), HasSubstr("broadcast #1")));
        },
        {.backend = GetParam()});
}

TEST_P(NetFailure, UnequalPartsThatDoNotFitAreRefusedBeforeTheyAreSent) {
  spawn(2,
        [](World& world) {
          // Rank 0 sends three elements where rank 1 makes room for two.
          const int other = world.rank() == 0 ? 3 : 1;
          const int room = world.rank() == 0 ? 1 : 2;
          std::vector<at::Tensor> inputs(2), outputs(2);
          inputs[world.rank()] = outputs[world.rank()] = at::ones({1});
          inputs[1 - world.rank()] = at::ones({other});
          outputs[1 - world.rank()] = at::ones({room});
          const std::string error =
              message_of<CommError>([&] { world.group().all_to_all(outputs, inputs).wait(); });
          EXPECT_THAT(error, HasSubstr("all_to_all #1"));
          if (world.rank() == 1) {
            // Over tcp whichever side finds it first.
            EXPECT_THAT(error,
                        testing::AnyOf(HasSubstr("rank 0 sends 12 bytes where 8 are expected"),
                                       HasSubstr("rank 1 expects 8 bytes where 12 are sent")));
          }
        },
        {.backend = GetParam()});
}

TEST_P(NetFailure, ADeadGroupThrowsAtOnce) {
  spawn(2,
        [](World& world) {
          at::Tensor t = at::ones({4}), other = at::ones({9});
          comm::Work pending = world.rank() == 0 ? world.group().all_reduce(other) : comm::Work();
          const std::string first = message_of<CommError>([&] {
            if (world.rank() == 0) world.group().barrier({.timeout = 300ms}).wait();
            if (world.rank() == 1) world.group().recv(t, 0, 5).wait();
          });
          EXPECT_NE(first, "nothing");
          const auto start = steady_clock::now();
          EXPECT_THAT(message_of<CommError>([&] { world.group().all_reduce(t).wait(); }),
                      HasSubstr("group has failed"));
          const std::string second = message_of<CommError>([&] { pending.wait(); });
          EXPECT_EQ(second != "nothing", world.rank() == 0) << second;
          EXPECT_LT(steady_clock::now() - start, 20s);
        },
        {.backend = GetParam()});
}

// Each waits for a message of the next rank. None ends before the first has thrown, since that
// closes connections, too.
TEST_P(NetFailure, AnAbortReachesRanksThatWaitForOthersThanTheOneThatAborted) {
  const Signal met, thrown;
  spawn(4,
        [&](World& world) {
          world.group().barrier().wait();
          if (world.rank() < 3) met.give();
          if (world.rank() == 3) {
            for (int other = 0; other < 3; ++other) met.wait();
            world.group().abort("bad data");
            return thrown.wait();
          }
          const auto start = steady_clock::now();
          const std::string error = message_of<CommError>(
              [&] { world.group().recv(at::ones({300000}), world.rank() + 1).wait(); });
          EXPECT_LT(steady_clock::now() - start, 20s);
          EXPECT_THAT(error, HasSubstr("rank 3 aborted"));
          EXPECT_THAT(error, HasSubstr("bad data"));
          EXPECT_EQ(error.find("rank 3 aborted"), error.rfind("rank 3 aborted")) << error;
          if (world.rank() > 0) return thrown.wait();
          for (int other = 1; other < world.size(); ++other) thrown.give();
        },
        {.backend = GetParam(), .timeout = 30s});
}

TEST_P(NetFailure, AGroupThatGoesAwayWaitsForNobody) {
  const auto start = steady_clock::now();
  spawn(2,
        [](World& world) {
          if (world.rank() == 0) {
            const comm::Work dropped = world.group().all_reduce(at::ones({4}));
            world = World::solo();
          } else {
            // Ends when rank 0's connections do.
            EXPECT_NE(message_of<CommError>([&] { world.group().recv(at::ones({4}), 0).wait(); }),
                      "nothing");
          }
        },
        {.backend = GetParam()});
  EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
}

// A thread that aborts first tells the store, which rank 0 serves and which gives no answer here:
// the wait has ended by then, and what is still sent to this rank must not come into its memory.
TEST_P(NetFailure, AnAbortByAThreadLeavesTheMemoryOfCallsThatHaveThrownAlone) {
  const Signal thrown, sent;
  spawn(3,
        [&](World& world) {
          const Group& group = world.group();
          const std::string first = group.all_gather_bytes(std::to_string(getpid()))[0];
          constexpr int64_t kCount = 2 << 20;
          if (world.rank() == 0) raise(SIGSTOP);
          if (world.rank() == 1) {
            std::vector<float> memory(kCount);
            comm::Work work = group.recv(at::from_blob(memory.data(), {kCount}), 2);
            while (!process_stat(std::stoi(first))->is_stopped()) std::this_thread::yield();
            std::thread aborting([&] { group.abort("bad data"); });
            EXPECT_THAT(message_of<CommError>([&] { work.wait(); }), HasSubstr("bad data"));
            std::fill(memory.begin(), memory.end(), 7.f);
            thrown.give();
            sent.wait();
            EXPECT_EQ(std::count(memory.begin(), memory.end(), 7.f), kCount);
            aborting.join();
            kill(std::stoi(first), SIGCONT);
          }
          if (world.rank() == 2) {
            thrown.wait();
            message_of<CommError>([&] { group.send(at::ones({kCount}), 1).wait(); });
            sent.give();
          }
        },
        {.backend = GetParam()});
}

// As when another host was lost: no rank of this one has ended.
void lose_host2(PretendLauncher& launcher) {
  launcher.control.explain("host2 was lost");
  launcher.control.report_failure();
}

TEST(LaunchersWord, IsQuotedOnEveryTransport) {
  for (const std::string backend : {"shm", "tcp", "gloo"}) {
    PretendLauncher launcher(2);
    spawn(2,
          [&](World& world) {
            world.group().barrier().wait();
            if (world.rank() == 1) lose_host2(launcher);
            const std::string error = message_of<CommError>([&] {
              if (world.rank() == 1) world.group().recv(at::ones({4}), 0).wait();
              world.group().all_reduce(at::ones({4})).wait();
            });
            EXPECT_THAT(error, HasSubstr("was aborted (host2 was lost)"));
          },
          {.backend = backend});
  }
}

// The launcher has given the reason, so the error does not guess why peers do not reply.
TEST(LaunchersWord, IsNotFollowedByAGuessAtTheOtherRanks) {
  PretendLauncher launcher(2);
  spawn(2,
        [&](World& world) {
          world.group().barrier().wait();
          if (world.rank() == 1) {
            lose_host2(launcher);
            return;
          }
          const std::string error =
              message_of<CommError>([&] { world.group().all_reduce(at::ones({4})).wait(); });
          EXPECT_THAT(error, testing::EndsWith("was aborted (host2 was lost) on rank 0"));
        },
        {.backend = "tcp"});
}

// Rank 1 tells its address, and then fails to connect: rank 0 would wait for it in Gloo.
TEST(LaunchersWord, EndsAStart) {
  PretendLauncher launcher(2);
  spawn_bare(2,
             [&](int rank) {
               if (rank == 1) setenv("GLOO_SOCKET_IFNAME", "nowhere", 1);
               const auto start = steady_clock::now();
               const std::string error =
                   message_of<CommError>([] { (void)World::from_env({.timeout = 60s}); });
               if (rank == 1) {
                 EXPECT_THAT(error, HasSubstr("GLOO_SOCKET_IFNAME"));
                 lose_host2(launcher);
                 return;
               }
               EXPECT_THAT(error, HasSubstr("was aborted (host2 was lost)"));
               EXPECT_LT(steady_clock::now() - start, 20s);
             },
             {.backend = "gloo"});
}

// The store goes with rank 0, which fails to connect; that is not what rank 1 has to say.
TEST(GlooStart, WithoutRankZeroSaysWhatItWasDoing) {
  spawn_bare(2,
             [](int rank) {
               if (rank == 0) setenv("GLOO_SOCKET_IFNAME", "nowhere", 1);
               EXPECT_THAT(message_of<CommError>([] { (void)World::from_env({.timeout = 60s}); }),
                           HasSubstr("could not connect to the others"));
             },
             {.backend = "gloo"});
}

// Rank 1 never comes.
TEST(LaunchersWord, EndsAStartThatWaitsForARank) {
  PretendLauncher launcher(2);
  spawn_bare(2, [&](int rank) {
    if (rank == 1) {
      launcher.control.record_exit(1, SIGKILL);
      launcher.control.report_failure();
      return;
    }
    const auto start = steady_clock::now();
    EXPECT_THAT(message_of<CommError>([] { (void)World::from_env({.timeout = 60s}); }),
                HasSubstr("the job was aborted (rank 1 was killed by SIGKILL)"));
    EXPECT_LT(steady_clock::now() - start, 20s);
  });
}

}  // namespace
}  // namespace lockstep::test
