// What moves operations: the caller, the driver's thread, futures, errors and ends.
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "c10d/support.h"

namespace lockstep::test {
namespace {

using ::c10d::Backend;
using std::chrono::milliseconds;

std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

milliseconds processor_time() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return milliseconds(now.tv_sec * 1000 + now.tv_nsec / 1'000'000);
}

class Drivers : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, Drivers, testing::Values(Ranks{"shm", 3}, Ranks{"tcp", 2}), name_of);

TEST_P(Drivers, FinishWhatNobodyWaitsFor) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    // Beyond what a caller tries in its own thread.
    Tensors one{numbers(backend.getRank(), 1 << 20)};
    const auto work = backend.allreduce(one);
    const auto future = work->getFuture();
    while (!future->completed()) std::this_thread::yield();
    EXPECT_EQ(future->value().toTensorList().get(0).data_ptr(), one[0].data_ptr());
    while (!work->isCompleted()) std::this_thread::yield();
    EXPECT_TRUE(work->isSuccess());
    backend.barrier()->wait();
  });
}

// Some programs start a collective, then exchange messages without which the others do not come.
TEST_P(Drivers, LetMessagesPassACollectiveThatWaits) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank();
    for (int i = 0; i < 50; ++i) {
      Tensors sum{at::ones({10})}, word{at::full({1}, float(rank))};
      if (rank == 0) {
        const auto collective = backend.allreduce(sum);
        for (int r = 1; r < backend.getSize(); ++r) backend.send(word, r, i)->wait();
        collective->wait();
      } else {
        backend.recv(word, 0, i)->wait();
        backend.allreduce(sum)->wait();
      }
      EXPECT_EQ(sum[0][0].item<int>(), backend.getSize());
    }
  });
}

TEST_P(Drivers, ServeSeveralThreads) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    // Each thread passes a token around, under a tag of its own, while the main thread sums.
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 3; ++tag) {
      threads.emplace_back([&, tag] {
        for (int i = 0; i < 30; ++i) {
          Tensors out{numbers(rank, 10 + 1000 * tag)}, in{at::zeros({10 + 1000 * tag})};
          const auto sent = backend.send(out, (rank + 1) % size, tag);
          const auto got = backend.recv(in, (rank + size - 1) % size, tag);
          got->wait();
          sent->wait();
          EXPECT_EQ(in[0][3].item<int>(), (rank + size - 1) % size + 3);
        }
      });
    }
    for (int i = 0; i < 100; ++i) {
      Tensors one{at::ones({100})};
      backend.allreduce(one)->wait();
      EXPECT_EQ(one[0][99].item<int>(), size);
    }
    for (auto& thread : threads) thread.join();
    backend.barrier()->wait();
  });
}

TEST_P(Drivers, RunCallbacksThatCall) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    Tensors first{at::ones({1 << 18})}, second{at::ones({3})};
    std::atomic<bool> done = false;
    const auto work = backend.allreduce(first);
    work->getFuture()->addCallback([&](c10::ivalue::Future&) {
      backend.allreduce(second)->wait();
      done = true;
    });
    while (!done) std::this_thread::yield();
    EXPECT_EQ(second[0][0].item<int>(), backend.getSize());
    backend.barrier()->wait();
  });
}

// As PyTorch's PowerSGD hook does, in the driver's thread or in that of a caller who waits.
TEST_P(Drivers, RunCallbacksThatWaitForFutures) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    for (int i = 0; i < 20; ++i) {
      Tensors first{at::ones({i % 2 == 0 ? 1 << 18 : 10})}, second{at::ones({1 << 16})};
      std::atomic<bool> done = false;
      const auto work = backend.allreduce(first);
      work->getFuture()->addCallback([&](c10::ivalue::Future&) {
        const auto inner = backend.allreduce(second)->getFuture();
        std::atomic<bool> seen = false;
        inner->addCallback([&](c10::ivalue::Future&) { seen = true; });
        inner->wait();
        while (!seen) std::this_thread::yield();
        done = true;
      });
      if (i % 3 == 0) work->wait();
      while (!done) std::this_thread::yield();
      EXPECT_EQ(second[0][0].item<int>(), backend.getSize());
    }
    backend.barrier()->wait();
  });
}

// So that what they start has one order on all ranks, although each waits in between. One that is
// added when its operation is over already runs in the thread that adds it.
TEST_P(Drivers, RunCallbacksInOrder) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    const int rank = backend.getRank(), size = backend.getSize();
    std::atomic<bool> begun = false, go = false;
    const int to = (rank + 1) % size, from = (rank + size - 1) % size;
    Tensors word{at::ones({1})}, got{at::zeros({1})};
    backend.recv(got, from, 0)->getFuture()->addCallback([&](c10::ivalue::Future&) {
      begun = true;
      while (!go) std::this_thread::yield();
    });
    store->add("attached", 1);
    while (store->add("attached", 0) < size) std::this_thread::yield();
    // It may run the callback, and this thread must not.
    std::thread sender([&] { backend.send(word, to, 0); });
    while (!begun) std::this_thread::yield();

    constexpr int kCalls = 5;
    std::vector<Tensors> all, in;
    std::vector<c10::intrusive_ptr<::c10d::Work>> sent;
    for (int i = 0; i < kCalls; ++i) {
      all.push_back({at::ones({1 << 18})});
      in.push_back({at::zeros({1})});
      sent.push_back(backend.send(word, to, 1 + i));
    }
    std::vector<int> order, late;
    bool runs = false;
    std::atomic<int> done = 0;
    const auto own = std::this_thread::get_id();
    for (int i = 0; i < kCalls; ++i) {
      backend.allreduce(all[i])->getFuture()->addCallback([&, i](c10::ivalue::Future&) {
        if (std::this_thread::get_id() == own) {
          late.push_back(i);
        } else {
          EXPECT_FALSE(std::exchange(runs, true));
          backend.recv(in[i], from, 1 + i)->getFuture()->wait();
          order.push_back(i);
          runs = false;
        }
        ++done;
      });
    }
    go = true;
    while (done < kCalls) std::this_thread::yield();
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
    sender.join();
    for (const int i : late) backend.recv(in[i], from, 1 + i)->wait();
    for (const auto& work : sent) work->wait();
    backend.barrier()->wait();
  });
}

// While a callback computes, a thread that waits for what it holds back leaves it the processor.
TEST_P(Drivers, SleepWhileACallbackHoldsThemBack) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    constexpr milliseconds kLong{300};
    Tensors one{at::ones({3})}, held{at::ones({3})};
    const bool attaches = backend.getRank() == 0;
    while (!attaches && store->add("attached", 0) == 0) std::this_thread::yield();
    std::atomic<bool> begun = false, waits = false;
    const auto first = backend.allreduce(one);
    if (attaches) {
      first->getFuture()->addCallback([&](c10::ivalue::Future&) {
        begun = true;
        while (!waits) std::this_thread::yield();
        for (const auto end = processor_time() + kLong; processor_time() < end;) continue;
      });
      store->add("attached", 1);
      while (!begun) std::this_thread::yield();
    }
    const auto second = backend.allreduce(held);
    const auto before = processor_time();
    waits = true;
    second->wait();
    const auto spent = processor_time() - before;
    EXPECT_TRUE(!attaches || spent < kLong / 3) << spent.count();
    first->wait();
  });
}

TEST(Failures, WrongArgumentsAreTheCallersAlone) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    Tensors wrong{at::ones({2}), at::ones({3})}, one{at::ones({2})};
    EXPECT_THROW(backend.allreduce(wrong), c10::ValueError);
    EXPECT_THROW(backend.send(one, backend.getRank(), 0), c10::ValueError);
    at::Tensor all = at::zeros({3});
    EXPECT_THROW(backend._allgather_base(all, one[0]), c10::ValueError);
    backend.allreduce(one)->wait();
    EXPECT_EQ(one[0][0].item<int>(), 2);
    EXPECT_EQ(backend.getError(), ::c10d::ErrorType::SUCCESS);
  });
}

TEST(Failures, DifferentCallsAreQuotedToAll) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    Tensors one{at::ones({3 + backend.getRank()})};
    const std::string text = thrown_by([&] { backend.allreduce(one)->wait(); });
    EXPECT_NE(text.find("float32 x 3"), std::string::npos) << text;
    EXPECT_NE(text.find("float32 x 4"), std::string::npos) << text;
    EXPECT_EQ(backend.getError(), ::c10d::ErrorType::COMM_ERROR);
    EXPECT_THROW(backend.barrier()->wait(), c10::DistBackendError);
  });
}

TEST(Failures, ADeadlineEndsAReceiveAndNotTheGroup) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    Tensors one{at::ones({3})};
    if (backend.getRank() == 0) {
      backend.setTimeout(milliseconds(400));
      const std::string text = thrown_by([&] { backend.recv(one, 1, 5)->wait(); });
      EXPECT_NE(text.find("got no message with tag 5 from rank 1"), std::string::npos) << text;
      backend.setTimeout(std::chrono::seconds(60));
    }
    backend.allreduce(one)->wait();
    if (backend.getRank() == 1) backend.send(one, 0, 5)->wait();
    backend.barrier()->wait();
  });
}

TEST(Failures, AKilledRankEndsAReceiveFromAny) {
  spawn_backends(2,
                 [](Backend& backend, const StorePtr&) {
                   if (backend.getRank() == 1) raise(SIGKILL);
                   Tensors one{at::ones({3})};
                   const std::string text =
                       thrown_by([&] { backend.recvAnysource(one, 0)->wait(); });
                   EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
                 },
                 {.doomed = {1}});
}

TEST(Failures, AnAbortEndsWhatWaits) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    Tensors one{at::ones({3})};
    if (backend.getRank() == 0) {
      const auto work = backend.allreduce(one);
      std::thread other([&] { backend.abort(); });
      EXPECT_THROW(work->wait(), c10::DistBackendError);
      other.join();
      EXPECT_EQ(backend.getError(), ::c10d::ErrorType::COMM_ERROR);
    } else {
      // Rank 0 may have gone before this rank comes, or while it waits.
      Tensors two{at::ones({4})};
      EXPECT_THROW(backend.recv(two, 0, 0)->wait(), c10::DistBackendError);
    }
  });
}

TEST(Ends, FinishWhatOthersWaitFor) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    Tensors one{at::ones({1 << 20})};
    const auto work = backend.allreduce(one);
    if (backend.getRank() == 1) work->wait();
    backend.shutdown();  // rank 0 has not waited
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(one[0][5].item<int>(), 2);
    EXPECT_THROW(backend.barrier(), c10::DistBackendError);
  });
}

// Not for the timeout: the receiver may have ended its group, too.
TEST(Ends, WaitASecondForAReceiver) {
  const auto timeout = std::chrono::seconds(20);
  spawn_backends(2,
                 [&](Backend& backend, const StorePtr& store) {
                   const bool sends = backend.getRank() == 0;
                   Tensors small{at::ones({10})}, large{at::ones({1 << 20})};
                   std::vector<c10::intrusive_ptr<::c10d::Work>> sent;
                   for (int i = 0; sends && i < 5; ++i) sent.push_back(backend.send(small, 1, i));
                   if (sends) sent.push_back(backend.send(large, 1, 5));
                   const auto start = std::chrono::steady_clock::now();
                   backend.shutdown();
                   EXPECT_LT(std::chrono::steady_clock::now() - start, timeout / 2);
                   for (const auto& work : sent) EXPECT_TRUE(work->isCompleted());
                   if (sends) {
                     EXPECT_FALSE(sent.back()->isSuccess());
                     store->add("ended", 1);
                   }
                   // Its process lives on, from which rank 0 would learn that it has gone.
                   while (store->add("ended", 0) == 0) std::this_thread::yield();
                 },
                 {.timeout = timeout});
}

TEST(Subgroups, AreSplitOff) {
  spawn_backends(3, [](Backend& backend, const StorePtr& store) {
    if (backend.getRank() == 1) return backend.barrier()->wait(), void();
    const auto own = c10::make_intrusive<::c10d::PrefixStore>("split", store);
    const auto part = backend.split(own, {2, 0}, backend.getBackendOptions());
    EXPECT_EQ(part->getSize(), 2);
    EXPECT_EQ(part->getRank(), backend.getRank() == 2 ? 0 : 1);
    Tensors one{at::full({2}, float(backend.getRank()))};
    part->broadcast(one)->wait();
    EXPECT_EQ(one[0][0].item<int>(), 2);
    backend.barrier()->wait();
  });
}

TEST(Alone, OneRankNeedsNobody) {
  spawn_bare(1, [](int) {
    const auto backend =
        c10d_backend::make_backend(c10::make_intrusive<::c10d::HashStore>(), {0, 1});
    Tensors one{at::ones({3})};
    backend->allreduce(one)->wait();
    backend->barrier()->wait();
    EXPECT_EQ(one[0][0].item<int>(), 1);
    EXPECT_EQ(backend->getBackendName(), "lockstep");
  });
}

}  // namespace
}  // namespace lockstep::test
