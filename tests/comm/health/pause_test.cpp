// A rank stands still for longer than any of the short waits within a deadline.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "comm/store/store.h"
#include "core/process/stat.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;

class Pause : public testing::TestWithParam<Ranks> {};

INSTANTIATE_TEST_SUITE_P(Transports, Pause,
                         testing::Values(Ranks{"shm", 3}, Ranks{"tcp", 3}, Ranks{"gloo", 3},
                                         Ranks{"auto", 3, {0, 0, 1}}),
                         name_of);

// Until a process that waits has looked at what it waits for: it sleeps, or, on a busy machine
// where it is seldom seen to, has been given the processor often.
void await_sleep(pid_t process) {
  const auto turns = [process] {
    std::ifstream file("/proc/" + std::to_string(process) + "/schedstat");
    uint64_t ran = 0, waited = 0, count = 0;
    file >> ran >> waited >> count;
    return count;
  };
  const uint64_t before = turns();
  for (;;) {
    const auto stat = process_stat(process);
    const uint64_t since = turns() - before;
    const bool has_run = since > 0 || before == 0;  // 0: this system does not count
    if (!stat || stat->state == 'Z' || since > 50 || (has_run && stat->state == 'S')) return;
    usleep(1000);
  }
}

// For longer than the store's clients wait for the answer to what they have cancelled; it begins
// when the last rank comes.
TEST_P(Pause, OfRankZeroWhileRanksMeetIsNoFailure) {
  auto* const leader = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(leader, MAP_FAILED);
  spawn_bare(
      3,
      [&](int rank) {
        if (rank == 0) *leader = getpid();
        std::jthread pauses;
        if (rank == 2) {
          const auto store = comm::Store::connect(
              {.host = "127.0.0.1", .port = std::atoi(std::getenv("MASTER_PORT")), .timeout = 60s});
          pauses = std::jthread([leader] {
            kill(*leader, SIGSTOP);
            std::this_thread::sleep_for(1300ms);
            kill(*leader, SIGCONT);
          });
        }
        World world = World::from_env({.timeout = 60s});
        at::Tensor t = at::ones({4});
        world.group().all_reduce(t).wait();
        EXPECT_EQ(t[3].item<float>(), 3.f);
      },
      {.backend = GetParam().backend, .hosts = GetParam().hosts});
  munmap(leader, 4096);
}

// Wherever it is then: no short wait within the deadline may end the job.
TEST_P(Pause, OfARankDuringCollectivesIsNoFailure) {
  auto* const other = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(other, MAP_FAILED);
  spawn(3,
        [&](World& world) {
          if (world.rank() == 1) *other = getpid();
          world.group().barrier().wait();
          std::atomic<bool> is_over = false;
          std::jthread pauses;
          if (world.rank() == 0) {
            pauses = std::jthread([&] {
              kill(*other, SIGSTOP);
              std::this_thread::sleep_for(1300ms);
              kill(*other, SIGCONT);
              is_over = true;
            });
          }
          // The first element says whether the pause is over.
          at::Tensor t = at::zeros({100'000});
          while (t[0].item<float>() == 0.f) {
            t.fill_(1.f);
            t[0] = world.rank() == 0 && is_over ? 1.f : 0.f;
            world.group().all_reduce(t).wait();
            ASSERT_EQ(t[99'999].item<float>(), 3.f);
          }
        },
        {.backend = GetParam().backend, .hosts = GetParam().hosts});
  munmap(other, 4096);
}

// As by Ctrl-Z and `fg`, or `scontrol suspend` and `resume`: for longer than it would wait.
TEST_P(Pause, OfARankThatWaitsCountsNotAsWaiting) {
  struct Common {
    std::atomic<pid_t> waiter;
    std::atomic<bool> is_over;
  };
  auto* const common = static_cast<Common*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(common, MAP_FAILED);
  const pid_t stopper = fork();
  if (stopper == 0) {
    while (common->waiter == 0) usleep(1000);
    await_sleep(common->waiter);
    kill(common->waiter, SIGSTOP);
    std::this_thread::sleep_for(4s);
    kill(common->waiter, SIGCONT);
    await_sleep(common->waiter);
    common->is_over = true;
    _exit(0);
  }
  spawn(3,
        [&](World& world) {
          world.group().barrier().wait();
          if (world.rank() == 0) {
            common->waiter = getpid();
          } else {
            while (!common->is_over) usleep(1000);
          }
          world.group().barrier({.timeout = 3s}).wait();
        },
        {.backend = GetParam().backend, .hosts = GetParam().hosts});
  kill(stopper, SIGKILL);
  waitpid(stopper, nullptr, 0);
  munmap(common, 4096);
}

}  // namespace
}  // namespace lockstep::test
