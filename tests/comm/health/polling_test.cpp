// A rank that only asks whether an operation is over learns of what would end a wait.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "core/flight/segment.h"
#include "lockstep/core/error.h"
#include "support/signal.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::message_of;
using test::Ranks;
using test::spawn;
using testing::HasSubstr;

class Polling : public testing::TestWithParam<Ranks> {
 protected:
  // The last rank does `other` in the place of the collective.
  void poll_while(const std::function<void(const Group&)>& other, const std::string& said,
                  std::vector<int> doomed = {}) {
    const int last = GetParam().count - 1;
    const test::Signal thrown;
    spawn(GetParam().count,
          [&](World& world) {
            const Group& group = world.group();
            group.barrier().wait();
            if (world.rank() == last) {
              other(group);
              for (int rank = 0; rank < last; ++rank) thrown.wait();
              return;
            }
            Work work = group.all_reduce(at::ones({1000}), ReduceOp::Sum,
                                         {.timeout = std::chrono::seconds(said == kLate ? 2 : 60)});
            const auto start = Clock::now();
            while (!work.is_completed() && Clock::now() - start < 15s) {
              std::this_thread::sleep_for(1ms);
            }
            EXPECT_LT(Clock::now() - start, 15s);
            if (!testing::Test::HasFailure()) {
              EXPECT_THAT(message_of<CommError>([&] { work.wait(); }), HasSubstr(said));
            }
            thrown.give();
          },
          {.backend = GetParam().backend, .hosts = GetParam().hosts, .doomed = std::move(doomed)});
  }
  static constexpr const char* kLate = "timed out after";
};
INSTANTIATE_TEST_SUITE_P(Transports, Polling,
                         testing::Values(Ranks{"shm", 3}, Ranks{"tcp", 3}, Ranks{"gloo", 3},
                                         Ranks{"auto", 4, {0, 0, 1, 1}}),
                         test::name_of);

TEST_P(Polling, EndsWhenAnotherRankAborts) {
  poll_while([](const Group& group) { group.abort("bad data"); }, "bad data");
}

TEST_P(Polling, EndsWhenAnotherRankIsKilled) {
  const int last = GetParam().count - 1;
  // Over shm ranks see that its process is gone.
  const std::string said = GetParam().backend == "shm" ? " (process" : "";
  poll_while([](const Group&) { raise(SIGKILL); }, "rank " + std::to_string(last) + said, {last});
}

TEST_P(Polling, EndsAtTheDeadline) {
  poll_while([](const Group&) {}, kLate);
}

// Asked in turn, less often than a rank looks at its peers.
TEST_P(Polling, EndsAtTheDeadlineOfTheSecondOfTwoCalls) {
  const test::Signal over;
  spawn(GetParam().count,
        [&](World& world) {
          const Group& group = world.group();
          group.barrier().wait();
          if (world.rank() > 0) return over.wait();
          Work first = group.recv(at::ones({4}), 1);
          Work second = group.recv(at::ones({4}), 2, 0, {.timeout = 1s});
          const auto start = Clock::now();
          while (!first.is_completed() & !second.is_completed() && Clock::now() - start < 15s) {
            std::this_thread::sleep_for(20ms);
          }
          EXPECT_LT(Clock::now() - start, 15s);
          if (!testing::Test::HasFailure()) {
            EXPECT_THAT(message_of<CommError>([&] { second.wait(); }),
                        testing::AllOf(HasSubstr("from rank 2"), HasSubstr(kLate)));
          }
          for (int rank = 1; rank < world.size(); ++rank) over.give();
        },
        {.backend = GetParam().backend, .hosts = GetParam().hosts});
}

// Time that passed while this rank asked for an earlier one is not its own.
TEST(PollingOverSharedMemory, ALaterCallHasAllOfItsTime) {
  spawn(2, [](World& world) {
    const Group& group = world.group();
    if (world.rank() > 0) {
      (void)world.store().get("go");
      group.all_reduce(at::ones({4})).wait();
      return group.barrier().wait();
    }
    Work first = group.all_reduce(at::ones({4}));
    const auto start = Clock::now();
    while (Clock::now() - start < 3s) EXPECT_FALSE(first.wait_for(50ms));
    Work second = group.barrier({.timeout = 2s});
    EXPECT_EQ(message_of<CommError>([&] { EXPECT_FALSE(second.wait_for(1ms)); }), "nothing");
    world.store().set("go", "");
    first.wait();
    second.wait();
  });
}

// Nor is that for which it waited until all had come, once they have.
TEST(PollingOverSharedMemory, TheDeadlineStartsAgainWhenTheCallHasGoneOn) {
  spawn(3, [](World& world) {
    const Group& group = world.group();
    const at::Tensor data = group.empty({4}).fill_(1);
    Work work;
    const auto call = [&] { work = group.all_reduce(data, ReduceOp::Sum, {.timeout = 2s}); };
    const auto& store = world.store();
    if (world.rank() == 0) {
      call();
      const auto start = Clock::now();
      EXPECT_FALSE(work.is_completed());  // begins to wait
      std::this_thread::sleep_until(start + 2100ms);
      store.set("late", "");
      store.wait({"begun/1", "begun/2"});
      EXPECT_FALSE(work.is_completed());  // rank 1 has not added up its part
      EXPECT_EQ(message_of<CommError>([&] { EXPECT_FALSE(work.wait_for(1ms)); }), "nothing");
      store.set("goes on", "");
    } else {
      if (world.rank() == 2) store.wait({"late", "begun/1"});
      call();
      store.set("begun/" + std::to_string(world.rank()), "");
      store.wait({"goes on"});
    }
    work.wait();
    EXPECT_EQ(data[0].item<float>(), 3);
    group.barrier().wait();
  });
}

// As one that is found by a wait.
TEST(PollingOverSharedMemory, AFailureIsReportedToTheLauncher) {
  const flight::Segment launcher(2);
  test::spawn_bare(2, [&](int rank) {
    setenv(flight::kVariable, std::to_string(launcher.fd()).c_str(), 1);
    unsetenv("TORCHELASTIC_ERROR_FILE");
    const World world = World::from_env();
    if (rank > 0) {
      (void)world.store().get("go");
      EXPECT_NE(message_of<CommError>([&] { world.group().barrier().wait(); }), "nothing");
      return;
    }
    Work work = world.group().all_reduce(at::ones({4}));
    world.store().set("go", "");
    while (!work.is_completed()) std::this_thread::yield();
    EXPECT_THAT(message_of<CommError>([&] { work.wait(); }), HasSubstr("the ranks disagree"));
  });
  const auto failure = launcher.read(0).failure;
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->blame, flight::Blame::Peer);
  EXPECT_THAT(failure->text, HasSubstr("the ranks disagree"));
}

}  // namespace
}  // namespace lockstep::comm
