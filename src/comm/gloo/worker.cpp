#include "comm/gloo/worker.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/process/own_process.h"
#include "core/process/thread.h"

namespace lockstep::comm {
namespace {

// Measured: with one, two hosts of two ranks at 1 Gbit/s need 1.12 times the wire's time instead
// of 1.09.
constexpr size_t kThreads = 2;

class TaskWork : public c10d::Work {
 public:
  explicit TaskWork(std::function<void()> task) : task_(std::move(task)) {}
  void run() {
    try {
      // The task's references are released before the work counts as over.
      std::exchange(task_, nullptr)();
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
  }

 private:
  std::function<void()> task_;
};

// Threads that have run a task wait for the next, as many as there were tasks at once: libtorch
// keeps 128 bytes for every thread that has ever waited for one of its works.
class Threads {
 public:
  // Never destroyed. A child by fork() has none of this process's, so it gets its own.
  static Threads& of_this_process() {
    static std::atomic<Threads*> own = nullptr;
    Threads* threads = own.load();
    if (threads != nullptr && threads->process_.is_here()) return *threads;
    auto made = std::make_unique<Threads>();
    return own.compare_exchange_strong(threads, made.get()) ? *made.release() : *threads;
  }

  void run(c10::intrusive_ptr<TaskWork> task) {
    const std::lock_guard lock(mutex_);
    if (tasks_.size() == idle_) {
      thread_without_signals([this] { serve(); }).detach();
      ++idle_;
    }
    tasks_.push_back(std::move(task));
    given_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      given_.wait(lock, [this] { return !tasks_.empty(); });
      --idle_;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task->run();
      task.reset();
      lock.lock();
      ++idle_;
    }
  }

  const OwnProcess process_;
  std::mutex mutex_;
  std::condition_variable given_;
  std::deque<c10::intrusive_ptr<TaskWork>> tasks_;  // that no thread has taken yet
  size_t idle_ = 0;  // threads that run none, at least one for each of these
};

}  // namespace

// Owned by the thread, too: it may be in a task when the group goes away.
struct Worker::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<TaskWork>> tasks;
  int busy = 0;
  bool closed = false;
  std::vector<std::thread> threads;

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return closed || !tasks.empty(); });
      if (tasks.empty()) return;
      ++busy;
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task->run();
      lock.lock();
      --busy;
    }
  }
};

Worker::Worker() : queue_(std::make_shared<Queue>()) {}

Worker::~Worker() {
  std::unique_lock lock(queue_->mutex);
  queue_->closed = true;
  queue_->changed.notify_all();
  const bool idle = queue_->busy == 0 && queue_->tasks.empty();
  lock.unlock();
  for (std::thread& thread : queue_->threads) {
    if (idle) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

WireWork Worker::run(std::function<void()> task) {
  auto work = c10::make_intrusive<TaskWork>(std::move(task));
  const std::lock_guard lock(queue_->mutex);
  queue_->tasks.push_back(work);
  const size_t wanted = std::min(kThreads, queue_->tasks.size() + queue_->busy);
  while (queue_->threads.size() < wanted) {
    queue_->threads.push_back(thread_without_signals([queue = queue_] { queue->serve(); }));
  }
  queue_->changed.notify_all();
  return work;
}

WireWork Worker::run_apart(std::function<void()> task) {
  auto work = c10::make_intrusive<TaskWork>(std::move(task));
  Threads::of_this_process().run(work);
  return work;
}

}  // namespace lockstep::comm
