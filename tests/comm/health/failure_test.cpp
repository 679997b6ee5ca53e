// What ranks that share memory say when one of them is lost, late or wrong.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <optional>

#include "lockstep/core/error.h"
#include "support/refuse.h"
#include "support/signal.h"
#include "support/spawn.h"
#include "support/threads.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::message_of;
using test::spawn;
using test::spawn_bare;
using testing::AllOf;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class Failure : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Failure, testing::Values(2, 4), testing::PrintToStringParamName());

// Far above what is promised (0.5 s, which the benchmark holds), far below the deadline (60 s): a
// busy machine is no failure.
constexpr auto kSoon = 10s;

TEST_P(Failure, AKilledPeerIsKnownLongBeforeTheDeadline) {
  spawn(GetParam(),
        [](World& world) {
          world.group().barrier().wait();
          if (world.rank() == 1) raise(SIGKILL);
          const auto start = Clock::now();
          at::Tensor data = at::ones({1000});
          const auto said = message_of<CommError>(
              [&] { world.group().all_reduce(data, ReduceOp::Sum, {.label = "bucket 3"}).wait(); });
          EXPECT_LT(Clock::now() - start, kSoon);
          EXPECT_THAT(said,
                      AllOf(HasSubstr("all_reduce sum #"), HasSubstr("bucket 3, float32 x 1000"),
                            AnyOf(HasSubstr("rank 1 (process"), HasSubstr("rank 1 aborted"),
                                  HasSubstr("aborted"))));
          // The group has failed for good, and says so at once.
          EXPECT_THAT(message_of<CommError>([&] { world.group().barrier().wait(); }),
                      HasSubstr("this group has failed"));
        },
        {.doomed = {1}});
}

// Without process descriptors, as under old kernels and containers' filters, or with none left.
TEST_P(Failure, AKilledPeerIsKnownWhereTheKernelGivesNoProcessDescriptors) {
  for (const int error : {ENOSYS, EPERM, EMFILE}) {
    spawn_bare(GetParam(),
               [&](int rank) {
                 test::refuse_system_call(SYS_pidfd_open, error);
                 World world = World::from_env({.timeout = 60s});
                 world.group().barrier().wait();
                 if (rank == 1) raise(SIGKILL);
                 const auto start = Clock::now();
                 const auto said = message_of<CommError>([&] { world.group().barrier().wait(); });
                 EXPECT_LT(Clock::now() - start, kSoon);
                 EXPECT_THAT(said, AnyOf(HasSubstr("rank 1 (process"), HasSubstr("aborted")));
               },
               {.doomed = {1}});
  }
}

TEST_P(Failure, APeerKilledInTheMiddleOfManyOperations) {
  spawn(GetParam(),
        [](World& world) {
          at::Tensor shared = world.group().empty({1 << 20}), data = at::ones({300000});
          const auto said = message_of<CommError>([&] {
            for (int i = 0;; ++i) {
              if (i == 50 && world.rank() == 0) raise(SIGKILL);
              world.group().all_reduce(i % 2 ? shared : data).wait();
            }
          });
          EXPECT_THAT(said, HasSubstr("rank 0"));
        },
        {.doomed = {0}});
}

TEST_P(Failure, AnEarlyCleanExitIsNoSuccess) {
  spawn(GetParam(), [](World& world) {
    if (world.rank() == 0) return;
    EXPECT_THAT(message_of<CommError>([&] { world.group().barrier().wait(); }), HasSubstr("rank"));
  });
}

// It said that rank 0's store did not answer.
TEST(FailureOf, ARankThatMayHaveNoFurtherThreadSaysSo) {
  const test::Signal over;
  spawn(2,
        [&](World& world) {
          if (world.rank() == 0) return over.wait();
          test::forbid_threads();
          EXPECT_THAT(message_of([&] {
                        world.group().barrier({.timeout = std::chrono::seconds(1)}).wait();
                      }),
                      AllOf(HasSubstr("timed out after 1 s"), HasSubstr("no further thread (Res"),
                            HasSubstr("ulimit -u"), Not(HasSubstr("does not answer"))));
          over.give();
        },
        {.backend = "tcp"});
}

// Rank 0, which has learnt it without a call of the group, was named, and not the reason.
TEST(FailureOf, AReasonIsToldWhereARankHasEndedThatKnewIt) {
  for (const bool asks : {false, true}) {
    spawn(3, [&](World& world) {
      const Group& group = world.group();
      const auto pids = group.all_gather_bytes(std::to_string(getpid()));
      const auto pid_of = [&](int rank) { return static_cast<pid_t>(std::stol(pids[rank])); };
      const auto zero = static_cast<int>(syscall(SYS_pidfd_open, pid_of(0), 0));
      group.barrier().wait();
      if (world.rank() == 1) group.abort("out of data");
      if (world.rank() < 2) {
        while (!group.failure()) sched_yield();
        if (world.rank() == 0) return;
      }
      pollfd end{zero, POLLIN, 0};
      EXPECT_EQ(poll(&end, 1, 60'000), 1);
      close(zero);
      if (world.rank() == 1) return;
      const auto said = asks ? group.failure().value_or("")
                             : message_of<CommError>([&] { group.barrier().wait(); });
      EXPECT_THAT(said, AllOf(HasSubstr("rank 1 aborted"), HasSubstr("out of data")));
      EXPECT_THAT(said, Not(HasSubstr("has ended")));
    });
  }
}

TEST_P(Failure, ARankThatLeavesASubgroupIsNamedLongBeforeTheDeadline) {
  spawn(GetParam(), [](World& world) {
    std::optional<Group> part = world.group().split(0, world.rank());
    part->barrier().wait();
    if (world.rank() == 1) {
      part.reset();
    } else {
      const auto start = Clock::now();
      EXPECT_THAT(message_of<CommError>([&] { part->all_reduce(at::ones({4})).wait(); }),
                  HasSubstr("rank 1 has left the group"));
      EXPECT_LT(Clock::now() - start, kSoon);
    }
    world.group().barrier().wait();
  });
}

// Where rank 0 of the world lives, "rank 0 was killed" of a group that counts from 0 misleads.
TEST(FailureOf, ARankOfASubgroupIsNamedWithItsNumberInTheWorld) {
  spawn(3,
        [](World& world) {
          const Group part = world.group().split(world.rank() > 0 ? 1 : 0, -world.rank());
          if (world.rank() == 0) return;
          part.barrier().wait();
          if (world.rank() == 2) raise(SIGKILL);
          EXPECT_THAT(
              message_of<CommError>([&] { part.all_reduce(at::ones({4})).wait(); }),
              ContainsRegex(
                  "on rank 1 cannot go on: rank 0 \\(process [0-9]+, rank 2 of the world\\) has"));
        },
        {.doomed = {2}});
}

TEST_P(Failure, AStoppedRankIsNamedAtTheDeadline) {
  spawn(GetParam(),
        [](World& world) {
          const auto pids = world.group().all_gather_bytes(std::to_string(getpid()));
          world.group().barrier({.label = "before"}).wait();
          if (world.rank() == 1) raise(SIGSTOP);
          const auto start = Clock::now();
          at::Tensor data = at::ones({3});
          const auto said = message_of<CommError>(
              [&] { world.group().all_reduce(data, ReduceOp::Sum, {.timeout = 300ms}).wait(); });
          const auto waited = Clock::now() - start;
          EXPECT_LT(waited, kSoon);
          const auto by_itself =
              AnyOf(AllOf(HasSubstr("timed out after 0.3 s"), HasSubstr("rank 1 is past barrier #"),
                          HasSubstr("(before)")),
                    HasSubstr("aborted"));
          if (world.rank() == 0) {
            EXPECT_GE(waited, 250ms);
            EXPECT_THAT(said, by_itself);
          } else {
            // Rank 0 may end the stopped one while others still wait.
            EXPECT_THAT(said,
                        AnyOf(by_itself, HasSubstr("rank 1 (process " + pids[1] + ") has ended")));
          }
          if (world.size() == 2) {
            EXPECT_THAT(said, HasSubstr("stopped"));
          }
          // The stopped rank must end for the test to end.
          if (world.rank() == 0) kill(std::stoi(pids[1]), SIGKILL);
        },
        {.doomed = {1}});
}

TEST_P(Failure, DifferentCallsAreKnownAtOnceOnAllRanks) {
  struct Wrong {
    const char* what;
    std::function<void(const Group&, bool odd)> call;
    const char* said;
  };
  using Tensors = std::vector<at::Tensor>;
  const auto five = [](bool odd, int64_t times = 1) {
    return Tensors{at::ones({times * (odd ? 2 : 3)}), at::ones({times * (odd ? 3 : 2)})};
  };
  const char* const kParts = "5 in parts of [2,3]";
  const std::vector<Wrong> wrongs = {
      {"parts of a sum", [&](const Group& g, bool odd) { g.all_reduce(five(odd)).wait(); }, kParts},
      {"parts of a broadcast", [&](const Group& g, bool odd) { g.broadcast(five(odd)).wait(); },
       kParts},
      {"parts that are gathered",
       [&](const Group& g, bool odd) { g.all_gather(five(odd, g.size()), five(odd)).wait(); },
       kParts},
      {"parts that are scattered",
       [&](const Group& g, bool odd) { g.reduce_scatter(five(odd), five(odd, g.size())).wait(); },
       kParts},
      {"divisor",
       [](const Group& g, bool odd) {
         g.all_reduce(at::ones({3}), ReduceOp::Average, {.divide_by = odd ? 7 : 5}).wait();
       },
       "divided by 7"},
      {"count", [](const Group& g, bool odd) { g.all_reduce(at::ones({odd ? 4 : 3})).wait(); },
       "float32 x 4"},
      {"dtype",
       [](const Group& g, bool odd) {
         g.all_reduce(at::ones({3}, odd ? at::kInt : at::kFloat)).wait();
       },
       "int32 x 3"},
      {"operation",
       [](const Group& g, bool odd) {
         odd ? g.barrier().wait() : g.all_reduce(at::ones({3})).wait();
       },
       "barrier #"},
      {"reduction",
       [](const Group& g, bool odd) {
         g.all_reduce(at::ones({3}), odd ? ReduceOp::Max : ReduceOp::Sum).wait();
       },
       "all_reduce max"},
      {"root", [](const Group& g, bool odd) { g.broadcast(at::ones({3}), odd).wait(); }, "root 1"},
      {"list of counts",
       [](const Group& g, bool odd) {
         std::vector<at::Tensor> out;
         for (int r = 0; r < g.size(); ++r)
           out.push_back(at::ones({r == 0 && odd && g.rank() != 0 ? 4 : 3}));
         g.all_gather(out, at::ones({3})).wait();
       },
       "float32 x [4,3"},
      {"group memory", [](const Group& g, bool odd) { (void)g.empty({odd ? 10 : 20}); },
       "(float32 x 10)"},
  };
  for (const Wrong& wrong : wrongs) {
    SCOPED_TRACE(wrong.what);
    spawn(GetParam(), [&](World& world) {
      world.group().barrier().wait();
      const auto start = Clock::now();
      const auto said =
          message_of<CommError>([&] { wrong.call(world.group(), world.rank() % 2 == 1); });
      EXPECT_THAT(said, AllOf(HasSubstr("the ranks disagree"), HasSubstr(wrong.said)));
      EXPECT_LT(Clock::now() - start, kSoon);
    });
  }
}

TEST_P(Failure, PartsOfDifferentSizeOnTwoRanks) {
  spawn(GetParam(), [](World& world) {
    std::vector<at::Tensor> all;
    for (int r = 0; world.rank() == 0 && r < world.size(); ++r) all.push_back(at::ones({5}));
    EXPECT_THAT(message_of<CommError>([&] {
                  world.group().gather(all, at::ones({world.rank() == 1 ? 6 : 5})).wait();
                  world.group().barrier().wait();
                }),
                AllOf(HasSubstr("gather"), HasSubstr("24 bytes"), HasSubstr("20")));
  });
}

TEST(FailureOfOneRank, WrongArgumentsAreRefusedAndHarmNobody) {
  spawn(2, [](World& world) {
    const Group& g = world.group();
    const auto refused = [](const auto& call) { return message_of<ConfigError>(call); };
    EXPECT_THAT(refused([&] { (void)g.all_reduce(at::ones({3}), ReduceOp::BitwiseOr); }),
                HasSubstr("bit_or has no meaning for float32"));
    EXPECT_THAT(refused([&] { (void)g.all_reduce(at::ones({3}, at::kBool), ReduceOp::Average); }),
                HasSubstr("average"));
    EXPECT_THAT(refused([&] { (void)g.all_reduce(at::Tensor()); }), HasSubstr("undefined"));
    EXPECT_THAT(refused([&] { (void)g.all_reduce(at::ones({3}, at::kComplexHalf)); }),
                HasSubstr("complex32 is not supported"));
    EXPECT_THAT(refused([&] { (void)g.all_reduce(at::ones({3}, at::kMeta)); }), HasSubstr("meta"));
    EXPECT_THAT(refused([&] { (void)g.all_reduce(at::ones({1}).expand({3})); }),
                HasSubstr("share memory"));
    EXPECT_THAT(refused([&] { (void)g.broadcast(at::ones({3}), 2); }),
                HasSubstr("rank 2 is not in this group of 2"));
    EXPECT_THAT(refused([&] { (void)g.broadcast(at::ones({3}), -1); }), HasSubstr("rank -1"));
    EXPECT_THAT(refused([&] { (void)g.all_gather(at::ones({5}), at::ones({3})); }),
                HasSubstr("2 ranks need 6"));
    EXPECT_THAT(refused([&] { (void)g.all_gather(at::ones({6}), at::ones({3}, at::kInt)); }),
                HasSubstr("float32 and int32"));
    EXPECT_THAT(refused([&] { (void)g.reduce_scatter(at::ones({2}), at::ones({3})); }),
                HasSubstr("2 ranks need 4"));
    EXPECT_THAT(refused([&] { (void)g.all_to_all(at::ones({3}), at::ones({3})); }),
                HasSubstr("2 ranks divide"));
    EXPECT_THAT(refused([&] { (void)g.gather({at::ones({3})}, at::ones({3}), world.rank()); }),
                HasSubstr("1 tensors for 2 ranks"));
    EXPECT_THAT(refused([&] { (void)g.send(at::ones({3}), world.rank()); }),
                HasSubstr("to itself"));
    EXPECT_THAT(refused([&] { (void)g.empty({3}, at::kMeta); }), HasSubstr("not on meta"));
    const SendRecv other{.to = 1 - world.rank(), .from = 1 - world.rank()};
    EXPECT_THAT(refused([&] { (void)g.send_recv(at::ones({3}, at::kMeta), at::ones({3}), other); }),
                HasSubstr("meta"));
    at::Tensor data = at::zeros({3});
    g.send_recv(data, at::full({3}, 7.f), other).wait();
    EXPECT_EQ(data[0].item<float>(), 7);  // nothing was sent before
    data.fill_(1);
    g.all_reduce(data, ReduceOp::Sum, {.timeout = std::chrono::milliseconds::max()}).wait();
    EXPECT_EQ(data[0].item<float>(), 2);
  });
}

TEST(FailureOfOneRank, AMessageOfAnotherKindThanExpected) {
  spawn(2, [](World& world) {
    if (world.rank() == 0) {
      world.group().send(at::ones({3}), 1, 7).wait();
      EXPECT_THAT(message_of<CommError>([&] { world.group().barrier().wait(); }),
                  HasSubstr("aborted"));
    } else {
      EXPECT_THAT(message_of<CommError>([&] { world.group().recv(at::ones({4}), 0, 7).wait(); }),
                  AllOf(HasSubstr("float32 x 4"), HasSubstr("float32 x 3")));
    }
  });
}

TEST(SharedMemory, MoreThanThereIsIsAnErrorOnAllRanksAndTheGroupLivesOn) {
  spawn(3, [](World& world) {
    EXPECT_THAT(message_of<CommError>([&] { (void)world.group().empty({int64_t{1} << 44}); }),
                AllOf(HasSubstr("cannot get"), HasSubstr("bytes of shared memory"),
                      HasSubstr("available")));
    world.group().barrier().wait();
  });
}

TEST(SharedMemory, ALimitOnFileSizesIsNamedAtTheStart) {
  spawn_bare(2, [](int) {
    const rlimit small{4096, 4096};
    setrlimit(RLIMIT_FSIZE, &small);
    EXPECT_THAT(message_of<CommError>([&] { (void)World::from_env(); }), HasSubstr("ulimit -f"));
  });
}

TEST(SharedMemory, NothingIsLeftInTheFileSystem) {
  spawn(2, [](World& world) {
    (void)world.group().empty({1000});
    world.group().barrier().wait();
    for (const char* folder : {"/dev/shm", "/tmp"}) {
      for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        EXPECT_EQ(entry.path().filename().string().find("lockstep-shm"), std::string::npos)
            << entry.path();
      }
    }
    // All have attached, so no descriptor refers to the segment any more.
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      EXPECT_EQ(std::filesystem::read_symlink(entry.path(), gone).string().find("memfd:lockstep"),
                std::string::npos);
    }
  });
}

}  // namespace
}  // namespace lockstep::comm
