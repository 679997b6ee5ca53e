// Things made ahead by threads, without torch: the order, the bounds, the end, what is thrown.
#include "data/loader/ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <latch>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>

namespace lockstep::data {
namespace {

// Heap memory, so that a sanitizer sees who uses it when.
using Thing = std::unique_ptr<std::vector<int64_t>>;

Thing make_thing(int64_t number, std::optional<Thing> spare) {
  Thing thing = spare ? std::move(*spare) : std::make_unique<std::vector<int64_t>>(8);
  std::iota(thing->begin(), thing->end(), number);
  return thing;
}

const std::vector<AheadPlan> kPlans = {{0, 1, 1},  {1, 1, 1},  {1, 5, 4},  {50, 1, 1}, {50, 1, 4},
                                       {50, 3, 2}, {50, 3, 8}, {50, 8, 3}, {7, 50, 3}, {50, 50, 8}};

TEST(Ahead, GivesAllInTurn) {
  for (const AheadPlan& plan : kPlans) {
    Ahead<Thing> ahead(make_thing, plan);
    std::optional<Thing> last;
    for (int64_t number = 0; number < plan.count; ++number) {
      Thing thing = ahead.next(std::exchange(last, std::nullopt));
      EXPECT_EQ(thing->front(), number);
      EXPECT_EQ(thing->back(), number + 7);
      if (number % 3 != 0) last = std::move(thing);
    }
  }
}

TEST(Ahead, MayBeLeftAtAnyPoint) {
  for (const AheadPlan& plan : kPlans) {
    for (int64_t taken = 0; taken <= plan.count; taken += 1 + plan.count / 5) {
      Ahead<Thing> ahead(make_thing, plan);
      for (int64_t number = 0; number < taken; ++number) ahead.next(std::nullopt);
    }
  }
}

// No more than `depth` are made or being made beyond those that the reader has.
TEST(Ahead, StaysWithinItsDepth) {
  for (const AheadPlan& plan : kPlans) {
    std::atomic<int64_t> taken = 0;
    std::atomic<bool> is_beyond = false;
    Ahead<Thing> ahead(
        [&](int64_t number, std::optional<Thing> spare) {
          if (number > taken + plan.depth) is_beyond = true;
          return make_thing(number, std::move(spare));
        },
        plan);
    for (int64_t number = 0; number < plan.count; ++number) {
      ahead.next(std::nullopt);
      ++taken;
    }
    EXPECT_FALSE(is_beyond);
  }
}

// As many at once as there are threads: each of the first waits until the others are being made,
// too.
TEST(Ahead, MakesSeveralAtOnce) {
  constexpr int64_t kThreads = 4;
  std::latch all(kThreads);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  Ahead<int64_t> ahead(
      [&](int64_t number, std::optional<int64_t>) {
        if (number < kThreads) all.arrive_and_wait();
        const std::lock_guard lock(mutex);
        threads.insert(std::this_thread::get_id());
        return number;
      },
      {20, kThreads, kThreads});
  for (int64_t number = 0; number < 20; ++number) EXPECT_EQ(ahead.next(std::nullopt), number);
  EXPECT_EQ(std::ssize(threads), kThreads);
}

TEST(Ahead, AnErrorComesInItsTurnAndAgain) {
  for (const AheadPlan& plan : kPlans) {
    for (const int64_t bad : {int64_t{0}, plan.count / 2, plan.count - 1}) {
      if (bad < 0 || plan.count == 0) continue;
      Ahead<Thing> ahead(
          [&](int64_t number, std::optional<Thing> spare) {
            if (number >= bad) throw std::runtime_error("number " + std::to_string(number));
            return make_thing(number, std::move(spare));
          },
          plan);
      for (int64_t number = 0; number < bad; ++number) {
        EXPECT_EQ(ahead.next(std::nullopt)->front(), number);
      }
      for (int again = 0; again < 3; ++again) {
        try {
          ahead.next(std::nullopt);
          ADD_FAILURE() << "no error";
        } catch (const std::runtime_error& error) {
          EXPECT_EQ(error.what(), "number " + std::to_string(bad));
        }
      }
    }
  }
}

// A loop that blocks SIGTERM while it saves would be ended by these.
TEST(Ahead, ItsThreadsTakeNoSignalsOfTheProcess) {
  Ahead<sigset_t> ahead(
      [](int64_t, std::optional<sigset_t>) {
        sigset_t blocked;
        pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
        return blocked;
      },
      {2, 2, 2});
  for (int64_t number = 0; number < 2; ++number) {
    const sigset_t blocked = ahead.next(std::nullopt);
    for (const int signal : {SIGINT, SIGTERM, SIGALRM}) {
      EXPECT_EQ(sigismember(&blocked, signal), 1) << signal;
    }
    EXPECT_EQ(sigismember(&blocked, SIGBUS), 0);
  }
}

TEST(Ahead, WhatIsNoExceptionIsThrownToo) {
  Ahead<Thing> ahead([](int64_t, std::optional<Thing>) -> Thing { throw 42; }, {3, 2, 2});
  EXPECT_THROW(ahead.next(std::nullopt), int);
  EXPECT_THROW(ahead.next(std::nullopt), int);
}

}  // namespace
}  // namespace lockstep::data
