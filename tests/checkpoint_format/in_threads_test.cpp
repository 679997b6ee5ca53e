#include "checkpoint/in_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace lockstep::test {
namespace {

using checkpoint::in_threads;

TEST(InThreads, EachNumberOnce) {
  for (const int threads : {0, 1, 3, 8}) {
    for (const int64_t count : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> times(100);
      in_threads(count, threads, [&](int64_t i) { ++times[static_cast<size_t>(i)]; });
      for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(times[static_cast<size_t>(i)], i < count) << i;
    }
  }
}

TEST(InThreads, EachThreadBeginsWithAStretchOfItsOwn) {
  std::mutex mutex;
  std::vector<int64_t> begun;
  std::latch both(2);
  in_threads(8, 2, [&](int64_t i) {
    bool is_first = false;
    {
      const std::lock_guard lock(mutex);
      is_first = begun.size() < 2;
      begun.push_back(i);
    }
    if (is_first) both.arrive_and_wait();
  });
  std::sort(begun.begin(), begun.begin() + 2);
  EXPECT_EQ(begun[0], 0);
  EXPECT_EQ(begun[1], 4);
  EXPECT_EQ(begun.size(), 8);
}

TEST(InThreads, WhoIsThroughHelpsTheOthers) {
  std::latch others(7);
  in_threads(8, 2, [&](int64_t i) {
    if (i == 0) {
      others.wait();
    } else {
      others.count_down();
    }
  });
}

TEST(InThreads, AFailureIsThrownOnceAllAreDone) {
  for (const int threads : {1, 4}) {
    std::atomic<int> busy = 0, begun = 0;
    const auto run = [&] {
      in_threads(1000, threads, [&](int64_t i) {
        ++begun;
        ++busy;
        const bool fails = i == 5;
        --busy;
        if (fails) throw std::runtime_error("five");
      });
    };
    EXPECT_THROW(run(), std::runtime_error);
    EXPECT_EQ(busy, 0);
    EXPECT_GE(begun, 6);
    if (threads == 1) {
      EXPECT_EQ(begun, 6);
    }
  }
}

}  // namespace
}  // namespace lockstep::test
