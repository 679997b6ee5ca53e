#include "comm/worker.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace lockstep::comm {
namespace {

class TaskWork : public c10d::Work {
 public:
  explicit TaskWork(std::function<void()> task) : task_(std::move(task)) {}
  void run() {
    try {
      // What the task holds is let go before anybody learns that it is over.
      std::exchange(task_, nullptr)();
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
  }

 private:
  std::function<void()> task_;
};

}  // namespace

// Owned by the thread, too: it may be in a task when the group goes away.
struct Worker::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<TaskWork>> tasks;
  bool busy = false;
  bool closed = false;
  std::thread thread;

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      busy = false;
      changed.wait(lock, [this] { return closed || !tasks.empty(); });
      if (tasks.empty()) return;
      busy = true;
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task->run();
      lock.lock();
    }
  }
};

Worker::Worker() : queue_(std::make_shared<Queue>()) {}

Worker::~Worker() {
  std::unique_lock lock(queue_->mutex);
  queue_->closed = true;
  queue_->changed.notify_all();
  if (!queue_->thread.joinable()) return;
  if (queue_->busy || !queue_->tasks.empty()) {
    queue_->thread.detach();
  } else {
    lock.unlock();
    queue_->thread.join();
  }
}

WireWork Worker::run(std::function<void()> task) {
  auto work = c10::make_intrusive<TaskWork>(std::move(task));
  const std::lock_guard lock(queue_->mutex);
  queue_->tasks.push_back(work);
  if (!queue_->thread.joinable()) {
    queue_->thread = std::thread([queue = queue_] { queue->serve(); });
  }
  queue_->changed.notify_all();
  return work;
}

WireWork Worker::run_apart(std::function<void()> task) {
  auto work = c10::make_intrusive<TaskWork>(std::move(task));
  std::thread([work] { work->run(); }).detach();
  return work;
}

}  // namespace lockstep::comm
