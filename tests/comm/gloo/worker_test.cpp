// The threads that wait for Gloo's messages.
#include "comm/gloo/worker.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <barrier>
#include <set>
#include <vector>

#include "support/fork.h"

namespace lockstep::comm {
namespace {

using test::in_a_child;

// libtorch keeps 128 bytes for every thread that has waited for a message.
TEST(GlooWorker, ThreadsAreUsedAgain) {
  std::set<pid_t> threads;
  for (int i = 0; i < 1000; ++i) Worker::run_apart([&] { threads.insert(gettid()); })->wait();
  // With those of tests before, and those that were not back yet when the next task came.
  EXPECT_LE(threads.size(), 100);
}

TEST(GlooWorker, TasksThatWaitForEachOtherRunAtOnce) {
  for (const int tasks : {1, 3, 20, 7}) {
    std::barrier<> met(tasks);
    std::vector<WireWork> works;
    for (int i = 0; i < tasks; ++i)
      works.push_back(Worker::run_apart([&] { met.arrive_and_wait(); }));
    for (const WireWork& work : works) EXPECT_TRUE(work->wait());
  }
}

TEST(GlooWorker, AChildByForkHasThreadsOfItsOwn) {
  EXPECT_TRUE(Worker::run_apart([] {})->wait());
  in_a_child([] { EXPECT_TRUE(Worker::run_apart([] {})->wait()); });
  EXPECT_TRUE(Worker::run_apart([] {})->wait());
}

}  // namespace
}  // namespace lockstep::comm
