#include "train/report/log/record_queue.h"

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <utility>

#include "core/flight/last_work.h"
#include "core/process/thread.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

// Of all queues of this process. A process that ends looks at them, from a signal handler, too.
std::atomic<uint64_t> g_appended{0}, g_handled{0};
std::atomic<pid_t> g_pid{0};  // whose threads they are: a child has none of them

void wait_for_all() noexcept {
  if (getpid() != g_pid) return;
  constexpr timespec kLook{.tv_sec = 0, .tv_nsec = 1'000'000};
  for (int look = 0; look < 1000 && g_handled < g_appended; ++look) nanosleep(&kLook, nullptr);
}

}  // namespace

// Shared with the thread, which may outlive the object when the disk hangs.
struct RecordQueue::State {
  struct Waiting {
    LogRecord record;
    double time;
  };

  const Take take;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Waiting> queue;
  uint64_t appended = 0, handled = 0;
  uint64_t dropped = 0;  // since the last record that was taken
  bool closing = false;

  explicit State(Take its_take) : take(std::move(its_take)) {}

  void count(uint64_t records) {
    handled += records;
    g_handled += records;
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return closing || !queue.empty(); });
      if (queue.empty()) return;
      std::deque<Waiting> batch;
      batch.swap(queue);
      uint64_t missing = std::exchange(dropped, 0);
      lock.unlock();
      for (const auto& [record, time] : batch) take(record, time, std::exchange(missing, 0));
      lock.lock();
      count(batch.size());
      changed.notify_all();
    }
  }
};

RecordQueue::RecordQueue(Take take) : state_(std::make_shared<State>(std::move(take))) {
  g_pid = getpid();
  [[maybe_unused]] static const int registered = std::atexit(wait_for_all);
  flight::set_last_work(wait_for_all);
  thread_ = thread_without_signals([shared = state_] { shared->run(); });
}

RecordQueue::~RecordQueue() {
  if (!process_.is_here()) {
    // Of no use to the child, whose threads may have the memory by which detach() finds this one.
    static_cast<void>(new std::thread(std::move(thread_)));
    return;
  }
  const bool is_written = flush(std::chrono::seconds(1));
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
  }
  if (is_written) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void RecordQueue::append(LogRecord record) {
  if (!process_.is_here()) return;
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  ++state.appended;
  ++g_appended;
  if (state.queue.size() >= kWaiting) {
    state.queue.pop_front();  // the newest say more
    ++state.dropped;
    state.count(1);
  }
  state.queue.push_back({std::move(record), unix_now()});
  state.changed.notify_all();
}

bool RecordQueue::flush(std::chrono::milliseconds timeout) {
  if (!process_.is_here()) return true;
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const uint64_t until = state.appended;
  return state.changed.wait_for(lock, timeout, [&] { return state.handled >= until; });
}

}  // namespace lockstep::train
