// The end of a driver: what is finished for other ranks, and for how long.
#include <algorithm>
#include <utility>

#include "c10d/driver.h"
#include "core/time_limit.h"

namespace lockstep::c10d_backend {
namespace {

// For how long at least an end waits for callbacks of futures.
constexpr milliseconds kCallbacks{1000};

// How long messages wait for a receiver: it may have gone without having received them.
milliseconds patience_of(const Messages& messages) {
  constexpr int64_t kBytesPerMs = 50'000;
  return milliseconds(1000 + messages.bytes_to_send() / kBytesPerMs);
}

}  // namespace

void Driver::check_open(Lock& lock) {
  if (!ending_) return;
  stay_if_leaving(lock);
  std::rethrow_exception(failure("[lockstep] the process group was destroyed"));
}

void Driver::stay_if_leaving(Lock& lock) {
  const auto self = std::this_thread::get_id();
  if (leaver_ == std::thread::id() || leaver_ == self || served_here != nullptr) return;
  changed_.wait(lock, [] { return false; });
}

// Takes the group over for good and finishes what others wait for. False where another caller has.
bool Driver::drain(Lock& lock, milliseconds patience) {
  if (ending_) return false;
  const auto until = Clock::now() + bounded(patience);
  ending_ = true;  // threads that wait leave the group to this call
  if (own_callback()) {
    // What it holds back would wait for its return.
    jobs_.let_all_through();
    has_news_ = true;
  }
  woken_.notify_all();
  // Receives are this rank's own affair.
  size_t sends = 0;
  auto sends_until = Clock::time_point::min();
  const auto can_move = [&] {
    if (has_news_ || has_callbacks() || !flights_.empty() || !ready_.empty()) return true;
    if (messages_.sends() != std::exchange(sends, messages_.sends()))
      sends_until = Clock::now() + patience_of(messages_);
    return messages_.sending() && Clock::now() < sends_until;
  };
  while (is_driven_ || ((can_move() || !jobs_.empty()) && Clock::now() < until)) {
    if (is_driven_) {
      changed_.wait(lock);
    } else if (can_move()) {
      drive(lock, kLongest);
    } else {
      changed_.wait_until(lock, until);  // for callbacks that run in other threads
    }
  }
  return true;
}

// Callbacks that have not returned when the timeout expires are detached: they may never return.
void Driver::end_threads(Lock& lock, milliseconds patience) {
  const int own = served_here == this ? 1 : 0;  // a callback may end the group
  const auto are_over = [&] { return static_cast<int>(threads_.size()) - serving_ <= own; };
  const bool over = changed_.wait_for(lock, bounded(std::max(patience, kCallbacks)), are_over);
  auto threads = std::exchange(threads_, {});
  lock.unlock();
  for (std::thread& thread : threads) {
    if (!over || thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void Driver::close(milliseconds patience) noexcept {
  if (!is_here()) return;
  std::vector<Finished> spent;
  Lock lock(mutex_);
  if (!drain(lock, patience)) {
    changed_.wait(lock, [&] { return closed_; });
    stay_if_leaving(lock);
    return;
  }
  const auto error = failure("[lockstep] the process group was destroyed");
  for (Flight& flight : flights_) spent.push_back(ended(std::move(flight.job), error));
  for (Job& job : ready_) spent.push_back(ended(std::move(job), error));
  while (auto job = jobs_.pop()) spent.push_back(ended(std::move(*job), error));
  flights_.clear();
  ready_.clear();
  messages_.fail_sends(error, spent);
  messages_.fail_receives(error, spent);
  settle(std::exchange(spent, {}));
  call_back(lock);
  closed_ = true;
  spent.swap(spent_);
  changed_.notify_all();
  end_threads(lock, patience);
}

void Driver::leave(milliseconds patience) noexcept {
  if (!is_here()) return;
  Lock lock(mutex_);
  leaver_ = std::this_thread::get_id();
  if (!drain(lock, patience)) return;
  closed_ = true;
  changed_.notify_all();
  end_threads(lock, patience);
}

}  // namespace lockstep::c10d_backend
