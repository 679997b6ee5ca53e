// The order in which ranks start collectives, when callbacks of futures start some of them.
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "c10d/support.h"

namespace lockstep::test {
namespace {

using c10::ivalue::Future;
using ::c10d::Backend;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

void await(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::yield();
}

void when_over(const WorkPtr& work, std::function<void()> callback) {
  work->getFuture()->addCallback([callback = std::move(callback)](Future&) { callback(); });
}

// All of one shape, so that a wrong order mixes sums without an error.
Tensors all_of(float value) { return {at::full({100}, value)}; }

class Orders : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, Orders, testing::Values(Ranks{"shm", 3}, Ranks{"tcp", 2}), name_of);

// What two buckets of DDP do with a communication hook of two parts, as PowerSGD's.
TEST_P(Orders, ACallbacksCollectiveComesBeforeTheNextOfTheProgram) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const int size = backend.getSize();
    const bool is_late = backend.getRank() == 0;
    for (int i = 0; i < 30; ++i) {
      const std::string key = "submitted " + std::to_string(i);
      Tensors first = all_of(1), second = all_of(10), next = all_of(100);
      std::atomic<bool> done = false;
      // The others submit all before the first can end, the late rank when the callback is over.
      if (is_late) await([&] { return store->add(key, 0) == size - 1; });
      const auto work = backend.allreduce(first);
      when_over(work, [&] {
        backend.allreduce(second)->wait();
        done = true;
      });
      if (is_late) await([&] { return done.load(); });
      const auto after = backend.allreduce(next);
      if (!is_late) store->add(key, 1);
      if (i % 2 == 0) after->wait();
      await([&] { return done && after->isCompleted(); });
      EXPECT_EQ(first[0][0].item<int>(), size);
      EXPECT_EQ(second[0][0].item<int>(), 10 * size);
      EXPECT_EQ(next[0][0].item<int>(), 100 * size);
    }
  });
}

// The same two deep, and beside each other in one callback.
TEST_P(Orders, CallbacksWithinCallbacksAreDepthFirst) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const int size = backend.getSize();
    const bool is_late = backend.getRank() == 0;
    for (int i = 0; i < 30; ++i) {
      const std::string key = "submitted " + std::to_string(i);
      std::vector<Tensors> sums;
      for (int part = 0; part < 6; ++part) sums.push_back(all_of(float(1 + part)));
      std::vector<WorkPtr> works(sums.size());
      std::atomic<bool> inner = false, outer = false;
      const auto start = [&](int part) { works[part] = backend.allreduce(sums[part]); };
      if (is_late) await([&] { return store->add(key, 0) == size - 1; });
      start(0);
      when_over(works[0], [&] {
        start(1);
        when_over(works[1], [&] {
          start(2);
          works[2]->wait();
          inner = true;
        });
        if (is_late) await([&] { return inner.load(); });
        start(3);
        outer = true;
      });
      if (is_late) await([&] { return inner && outer; });
      start(4);
      start(5);
      if (!is_late) store->add(key, 1);
      works[5]->wait();
      await([&] { return inner && outer; });
      for (const auto& work : works) work->wait();
      for (int part = 0; part < 6; ++part)
        EXPECT_EQ(sums[part][0][0].item<int>(), (1 + part) * size) << part;
    }
  });
}

// The late rank attaches its callbacks when all operations are over, the others before any can end.
TEST_P(Orders, WhatACallbackStartsHasThePlaceWhereItWasAttached) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    constexpr int kCalls = 4;
    const int size = backend.getSize();
    const bool is_late = backend.getRank() == 0;
    for (int i = 0; i < 20; ++i) {
      const std::string key = "attached " + std::to_string(i);
      std::vector<Tensors> sums, started, inner;
      std::vector<c10::intrusive_ptr<Future>> futures;
      if (is_late) await([&] { return store->add(key, 0) == size - 1; });
      for (int call = 0; call < kCalls; ++call) {
        sums.push_back(all_of(float(1 + call)));
        started.push_back(all_of(float(10 * (1 + call))));
        inner.push_back(all_of(float(100 * (1 + call))));
        futures.push_back(backend.allreduce(sums[call])->getFuture());
      }
      for (const auto& future : futures) {
        if (is_late) future->wait();
      }
      std::atomic<int> over = 0;
      for (int call = 0; call < kCalls; ++call) {
        futures[call]->addCallback([&, call](Future&) {
          when_over(backend.allreduce(started[call]),
                    [&, call] { when_over(backend.allreduce(inner[call]), [&] { ++over; }); });
        });
      }
      Tensors last = all_of(1000);
      const auto after = backend.allreduce(last);
      if (!is_late) store->add(key, 1);
      after->wait();
      await([&] { return over == kCalls; });
      for (int call = 0; call < kCalls; ++call) {
        EXPECT_EQ(sums[call][0][0].item<int>(), size * (1 + call));
        EXPECT_EQ(started[call][0][0].item<int>(), size * 10 * (1 + call));
        EXPECT_EQ(inner[call][0][0].item<int>(), size * 100 * (1 + call));
      }
      EXPECT_EQ(last[0][0].item<int>(), 1000 * size);
    }
  });
}

TEST_P(Orders, ACollectiveBeforeTheCallbackWasAttachedIsNotHeldBack) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const int size = backend.getSize();
    const bool is_late = backend.getRank() == 0;
    for (int i = 0; i < 20; ++i) {
      const std::string key = "attached " + std::to_string(i);
      Tensors first = all_of(1), next = all_of(10), second = all_of(100);
      std::atomic<bool> done = false;
      if (is_late) await([&] { return store->add(key, 0) == size - 1; });
      const auto future = backend.allreduce(first)->getFuture();
      if (is_late) future->wait();
      const auto other = backend.allreduce(next);
      future->addCallback([&](Future&) {
        backend.allreduce(second)->wait();
        done = true;
      });
      if (!is_late) store->add(key, 1);
      other->wait();
      await([&] { return done.load(); });
      EXPECT_EQ(first[0][0].item<int>(), size);
      EXPECT_EQ(next[0][0].item<int>(), 10 * size);
      EXPECT_EQ(second[0][0].item<int>(), 100 * size);
    }
  });
}

// Callbacks run one at a time, so that the future cannot be told while the message's callback runs.
TEST_P(Orders, AFutureWithoutCallbacksHoldsNothingBack) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    Tensors word = all_of(1), got = all_of(0), first = all_of(2), next = all_of(3);
    std::atomic<bool> begun = false, over = false, returned = false;
    const auto received = backend.recv(got, (rank + size - 1) % size, 0);
    when_over(received, [&] {
      begun = true;
      await([&] { return over.load(); });
      returned = true;
    });
    backend.barrier()->wait();  // it is attached on all ranks
    const auto sent = backend.send(word, (rank + 1) % size, 0);
    await([&] { return begun.load(); });
    const auto future = backend.allreduce(first)->getFuture();
    backend.allreduce(next)->wait();
    over = true;
    future->wait();
    await([&] { return returned.load(); });
    sent->wait();
    EXPECT_EQ(next[0][0].item<int>(), 3 * size);
  });
}

// The late rank lets the others attach the callback before the earlier operation is over.
TEST_P(Orders, ACallbackMayWaitForAnEarlierFutureWithoutCallbacks) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const int size = backend.getSize();
    const bool is_late = backend.getRank() == 0;
    Tensors first = all_of(1), second = all_of(2), next = all_of(3);
    std::atomic<bool> done = false;
    if (is_late) await([&] { return store->add("submitted", 0) == size - 1; });
    const auto earlier = backend.allreduce(first)->getFuture();
    when_over(backend.allreduce(second), [&] {
      earlier->wait();
      done = true;
    });
    const auto after = backend.allreduce(next);
    if (!is_late) store->add("submitted", 1);
    after->wait();
    await([&] { return done.load(); });
    EXPECT_EQ(first[0][0].item<int>(), size);
    EXPECT_EQ(next[0][0].item<int>(), 3 * size);
  });
}

// Rank 1 starts the operation with callbacks when the one before it is over on rank 0.
TEST_P(Orders, AFutureWithoutCallbacksDoesNotWaitForLaterCallbacks) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const int rank = backend.getRank(), size = backend.getSize();
    Tensors first = all_of(1), second = all_of(2), next = all_of(3), word = all_of(4);
    if (rank == 0) {
      const auto work = backend.allreduce(first);
      const auto future = work->getFuture();
      when_over(backend.allreduce(second), [] {});
      const auto after = backend.allreduce(next);
      store->add("submitted", 1);
      work->wait();
      EXPECT_TRUE(future->completed());
      EXPECT_FALSE(after->isCompleted());
      backend.send(word, 1, 0)->wait();
      after->wait();
    } else {
      await([&] { return store->add("submitted", 0) == 1; });
      backend.allreduce(first)->wait();
      if (rank == 1) backend.recv(word, 0, 0)->wait();
      backend.allreduce(second)->wait();
      backend.allreduce(next)->wait();
    }
    EXPECT_EQ(next[0][0].item<int>(), 3 * size);
  });
}

// Not even those of what the callback has started itself: it need not expect them in the call.
TEST_P(Orders, ASubmissionRunsNoCallbacks) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int size = backend.getSize();
    std::atomic<int> over = 0, within = 0;
    Tensors first = all_of(1);
    std::vector<Tensors> sums(200, Tensors());
    when_over(backend.allreduce(first), [&] {
      const auto self = std::this_thread::get_id();
      bool submits = false;
      for (Tensors& sum : sums) {
        sum = all_of(2);
        submits = true;
        const auto work = backend.allreduce(sum);
        submits = false;
        when_over(work, [&, self] {
          if (std::this_thread::get_id() == self && submits) ++within;
          ++over;
        });
      }
      await([&] { return over == static_cast<int>(sums.size()); });
    });
    await([&] { return over == static_cast<int>(sums.size()); });
    EXPECT_EQ(within, 0);
    for (const Tensors& sum : sums) EXPECT_EQ(sum[0][0].item<int>(), 2 * size);
  });
}

TEST_P(Orders, ACallbackMayWaitForALaterCollective) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const int size = backend.getSize();
    for (int i = 0; i < 20; ++i) {
      const std::string key = "submitted " + std::to_string(i);
      Tensors first = all_of(1), between = all_of(2), later = all_of(3);
      std::atomic<bool> done = false;
      if (backend.getRank() == 0) {
        await([&] { return store->add(key, 0) == size - 1; });
        backend.allreduce(first)->wait();
        backend.allreduce(between)->wait();
        backend.allreduce(later)->wait();
      } else {
        WorkPtr last;
        when_over(backend.allreduce(first), [&] {
          last->wait();
          done = true;
        });
        backend.allreduce(between);
        last = backend.allreduce(later);
        store->add(key, 1);
        await([&] { return done.load(); });
      }
      EXPECT_EQ(later[0][0].item<int>(), 3 * size);
    }
  });
}

// A callback that fails holds nothing back.
TEST_P(Orders, AnExceptionInACallbackEndsIt) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    Tensors first = all_of(1), next = all_of(2);
    const auto failing = backend.allreduce(first)->getFuture()->then(
        [](Future&) -> c10::IValue { throw std::runtime_error("mine"); }, c10::AnyType::get());
    backend.allreduce(next)->wait();
    EXPECT_EQ(next[0][0].item<int>(), 2 * backend.getSize());
    EXPECT_THROW(failing->waitAndThrow(), std::runtime_error);
  });
}

// A program may start a collective without waiting, then the messages for which the others wait.
TEST_P(Orders, MessagesAreNotHeldBackAndHoldNothingBack) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank();
    for (int i = 0; i < 20; ++i) {
      Tensors first = all_of(1), next = all_of(2), word{at::full({1}, 7.0f)};
      if (rank == 0) {
        const auto got = backend.recv(word, 1, i);
        when_over(got, [] {});
        const auto started = backend.allreduce(first);
        when_over(started, [] {});
        backend.allreduce(next)->wait();
        got->wait();
        EXPECT_EQ(word[0][0].item<int>(), 8);
      } else {
        backend.allreduce(first)->wait();
        backend.allreduce(next)->wait();
        word[0].fill_(8);
        if (rank == 1) backend.send(word, 0, i)->wait();
      }
      EXPECT_EQ(next[0][0].item<int>(), 2 * backend.getSize());
    }
  });
}

// As a hook that sums within a host, then between hosts, then within the host again.
TEST_P(Orders, CallbacksOfTwoGroupsMayWaitForEachOther) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const auto second = c10d_backend::make_backend(
        c10::make_intrusive<::c10d::PrefixStore>("second", store),
        {backend.getRank(), backend.getSize()}, {.timeout = std::chrono::seconds(60)});
    for (int i = 0; i < 10; ++i) {
      Tensors within = all_of(1), between = all_of(2), again = all_of(3), next = all_of(4);
      std::atomic<bool> done = false;
      when_over(backend.allreduce(within), [&] {
        std::atomic<bool> over = false;
        when_over(second->allreduce(between), [&] {
          backend.allreduce(again)->getFuture()->wait();
          over = true;
        });
        await([&] { return over.load(); });
        done = true;
      });
      backend.allreduce(next)->wait();
      await([&] { return done.load(); });
      EXPECT_EQ(again[0][0].item<int>(), 3 * backend.getSize());
      EXPECT_EQ(next[0][0].item<int>(), 4 * backend.getSize());
    }
    second->shutdown();
  });
}

TEST(HeldBack, AnAbortEndsIt) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    if (backend.getRank() == 0) {
      Tensors first = all_of(1), next = all_of(2);
      const auto work = backend.allreduce(first);
      when_over(work, [] {});
      const auto held = backend.allreduce(next);
      backend.abort();
      EXPECT_THROW(held->wait(), c10::DistBackendError);
      EXPECT_THROW(work->wait(), c10::DistBackendError);
    } else {
      Tensors word = all_of(3);
      EXPECT_THROW(backend.recv(word, 0, 0)->wait(), c10::DistBackendError);
    }
  });
}

// Whether or not a thread waits for it; that thread does not run the callback.
TEST(HeldBack, ItsDeadlineEndsTheGroup) {
  for (const bool waits : {true, false}) {
    spawn_backends(2, [waits](Backend& backend, const StorePtr& store) {
      Tensors first = all_of(1), next = all_of(2);
      if (backend.getRank() == 0) {
        await([&] { return store->add("held", 0) == 1; });
        backend.allreduce(first);
        EXPECT_THROW(backend.allreduce(next)->wait(), c10::DistBackendError);
        return;
      }
      std::atomic<bool> called = false, failed = false, returned = false;
      when_over(backend.allreduce(first), [&] {
        await([&] { return called = true, failed.load(); });
        returned = true;
      });
      store->add("held", 1);
      await([&] { return called.load(); });
      const auto held = backend.allreduce(next, {.timeout = std::chrono::milliseconds(300)});
      if (!waits) await([&] { return held->isCompleted(); });
      try {
        held->wait();
        ADD_FAILURE() << "it was not held back";
      } catch (const c10::DistBackendError& error) {
        const std::string text = error.what_without_backtrace();
        EXPECT_NE(text.find("operation 2 of the group (ALLREDUCE) was held back for 300 ms by the "
                            "callbacks of operation 1 (ALLREDUCE), which have not returned"),
                  std::string::npos)
            << text;
      }
      EXPECT_EQ(backend.getError(), ::c10d::ErrorType::COMM_ERROR);
      failed = true;
      await([&] { return returned.load(); });
    });
  }
}

TEST(HeldBack, AnEndFinishesIt) {
  spawn_backends(2, [](Backend& backend, const StorePtr& store) {
    Tensors first = all_of(1), next = all_of(2);
    if (backend.getRank() == 1) await([&] { return store->add("ends", 0) == 1; });
    const auto work = backend.allreduce(first);
    when_over(work, [] {});
    const auto held = backend.allreduce(next);
    if (backend.getRank() == 0) store->add("ends", 1);
    backend.shutdown();
    EXPECT_TRUE(held->isSuccess());
    EXPECT_EQ(next[0][0].item<int>(), 4);
  });
}

TEST(HeldBack, ACallbackMayEndTheGroup) {
  spawn_backends(2, [](Backend& backend, const StorePtr& store) {
    Tensors first = all_of(1), next = all_of(2);
    std::atomic<bool> done = false;
    const int rank = backend.getRank();
    if (rank == 0) await([&] { return store->add("submitted", 0) == 1; });
    const auto work = backend.allreduce(first);
    when_over(work, [&] {
      if (rank == 1) backend.shutdown();
      done = true;
    });
    const auto held = backend.allreduce(next);
    if (rank == 1) store->add("submitted", 1);
    await([&] { return done && held->isCompleted(); });
    EXPECT_TRUE(held->isSuccess());
    EXPECT_EQ(next[0][0].item<int>(), 4);
  });
}

}  // namespace
}  // namespace lockstep::test
