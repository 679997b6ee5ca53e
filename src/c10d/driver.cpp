#include "c10d/driver.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/transport.h"
#include "core/process/thread.h"
#include "core/time_limit.h"
#include "lockstep/core/error.h"

namespace lockstep::c10d_backend {
namespace {

using std::chrono::microseconds;

// How long a caller that need not wait looks whether an operation is over already.
constexpr microseconds kAttempt{30};
// For how long the group is taken over at a time: short at first, so that others are not kept
// waiting, longer while nothing happens.
constexpr microseconds kFirst{100};
constexpr microseconds kLongest{2000};

// For how long at least an end waits for callbacks of futures.
constexpr milliseconds kCallbacks{1000};

// Whose own thread this is. It has to end: it runs callbacks of futures, and they may call.
thread_local const Driver* served = nullptr;

// The callback that this thread runs, if it does.
struct Callback {
  const Driver* driver = nullptr;
  uint64_t number = 0;
};
thread_local Callback callback;

}  // namespace

Driver::Driver(comm::Group group) : group_(std::move(group)), messages_(group_) {}

Driver::~Driver() { close(milliseconds(0)); }

void Driver::check_process() const {
  if (!is_here())
    std::rethrow_exception(failure("[lockstep] " + process_.refusal("process group")));
}

void Driver::check_open(Lock& lock) {
  if (!ending_) return;
  stay_if_leaving(lock);
  std::rethrow_exception(failure("[lockstep] the process group was destroyed"));
}

void Driver::stay_if_leaving(Lock& lock) {
  const auto self = std::this_thread::get_id();
  if (leaver_ == std::thread::id() || leaver_ == self || served != nullptr) return;
  changed_.wait(lock, [] { return false; });
}

bool Driver::is_dead() const {
  if (!is_here()) return true;
  const std::lock_guard lock(mutex_);
  return dead_;
}

void Driver::submit(Job job, bool waits) {
  check_process();
  std::vector<Finished> spent;  // freed without the mutex
  const auto work = job.work;
  const bool is_short = job.is_short;
  if (callback.driver == this) work->set_parent(callback.number);
  Lock lock(mutex_);
  check_open(lock);
  spent.swap(spent_);
  jobs_.push_back(std::move(job));
  has_news_ = true;
  if (waits) {
    lock.unlock();
    work->wait();
    return;
  }
  if (is_short) attempt(lock, *work);
  wake(lock);
  stay_if_leaving(lock);
  if (work->is_done() && work->error()) std::rethrow_exception(work->error());
}

void Driver::submit(Send send) { enqueue(sends_, std::move(send)); }

void Driver::submit(Receive receive) { enqueue(receives_, std::move(receive)); }

template <class Operation>
void Driver::enqueue(std::vector<Operation>& queue, Operation operation) {
  check_process();
  std::vector<Finished> spent;
  const auto work = operation.work;
  if (callback.driver == this) work->set_parent(callback.number);
  Lock lock(mutex_);
  check_open(lock);
  spent.swap(spent_);
  queue.push_back(std::move(operation));
  has_news_ = true;
  attempt(lock, *work);
  wake(lock);
  stay_if_leaving(lock);
}

// Where the group is free, sees whether the operation ends at once.
void Driver::attempt(Lock& lock, const BackendWork& work) {
  const auto until = Clock::now() + kAttempt;
  do {
    if (is_driven_) return;
    drive(lock, kAttempt / 3);
  } while (!work.is_done() && Clock::now() < until);
}

// A thread of the driver's does what is left, unless a caller waits.
void Driver::wake(Lock&) {
  if (waiting_ > 0 || ending_ || !has_work()) return;
  if (serving_ == 0) {
    threads_.push_back(thread_without_signals([self = shared_from_this()] { self->serve(); }));
    ++serving_;
  }
  woken_.notify_one();
}

void Driver::wait(const BackendWork& work, milliseconds timeout) {
  check_process();
  const auto deadline =
      timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + bounded(timeout);
  std::vector<Finished> spent;
  Micros patience = kFirst;
  Lock lock(mutex_);
  ++waiting_;
  while (!work.is_done()) {
    const auto now = Clock::now();
    if (now >= deadline) {
      --waiting_;
      wake(lock);
      stay_if_leaving(lock);
      std::rethrow_exception(failure(
          fmt::format("[lockstep] an operation was not over within {} ms", timeout.count())));
    }
    // Its callbacks run, or will, in another thread.
    const bool is_idle = work.is_settled() && callback.driver != this;
    if (is_idle || is_driven_ || ending_) {
      const auto free = [&] {
        return work.is_done() || closed_ || (!is_idle && !is_driven_ && !ending_);
      };
      if (is_idle) {
        --waiting_;
        wake(lock);
      }
      if (deadline == Clock::time_point::max()) {
        changed_.wait(lock, free);
      } else {
        changed_.wait_until(lock, deadline, free);
      }
      if (is_idle) ++waiting_;
      if (closed_ && !work.is_done()) break;
      continue;
    }
    const auto left = std::chrono::duration_cast<Micros>(deadline - now);
    drive(lock, std::min(patience, left), &waiting_, callback.driver == this ? &work : nullptr);
    patience = std::min(2 * patience, kLongest);
  }
  --waiting_;
  spent.swap(spent_);
  wake(lock);
  stay_if_leaving(lock);
  if (!work.is_done()) check_open(lock);
}

// `drivers` counts this thread. `wanted` is what a callback in this thread waits for.
void Driver::drive(Lock& lock, Micros patience, int* drivers, const BackendWork* wanted) {
  is_driven_ = true;
  take_news();
  lock.unlock();
  std::vector<Finished> finished;
  {
    const at::NoGradGuard no_grad;
    finished = step(patience);
  }
  lock.lock();
  is_moving_ = !flights_.empty() || !ready_.empty() || messages_.sending() || messages_.receiving();
  is_driven_ = false;
  dead_ = dead_ || failed_;
  finish(lock, std::move(finished), drivers, wanted);
  changed_.notify_all();
}

Driver::Untold::iterator Driver::next_untold(const BackendWork* wanted) {
  if (callbacks_.empty()) return untold_.begin();
  return std::find_if(untold_.begin(), untold_.end(), [&](const auto& one) {
    const BackendWork& work = *one.first.work;
    return work.parent() == callbacks_.back() || &work == wanted;
  });
}

void Driver::finish(Lock& lock, std::vector<Finished> finished, int* drivers,
                    const BackendWork* wanted) {
  for (Finished& one : finished) {
    if (auto future = one.work->settle(one.error)) {
      untold_.emplace_back(std::move(one), std::move(future));
    } else {
      one.work->mark_done();
      spent_.push_back(std::move(one));
    }
  }
  for (auto next = next_untold(wanted); next != untold_.end(); next = next_untold(wanted)) {
    auto [one, future] = std::move(*next);
    untold_.erase(next);
    const uint64_t number = ++callbacks_begun_;
    callbacks_.push_back(number);
    if (drivers) --*drivers;
    changed_.notify_all();
    wake(lock);
    lock.unlock();
    const Callback before = std::exchange(callback, {this, number});
    one.work->tell(*future);
    future.reset();
    callback = before;
    lock.lock();
    if (drivers) ++*drivers;
    std::erase(callbacks_, number);
    one.work->mark_done();
    spent_.push_back(std::move(one));
  }
}

void Driver::serve() {
  served = this;
  Micros patience = kFirst;
  Lock lock(mutex_);
  while (true) {
    woken_.wait(lock, [&] { return ending_ || (has_work() && waiting_ == 0 && !is_driven_); });
    if (ending_) return;
    patience = has_news_ ? kFirst : std::min(2 * patience, kLongest);
    drive(lock, patience, &serving_);
  }
}

// With the mutex held: what was submitted becomes the driver's.
void Driver::take_news() {
  if (!has_news_) return;
  has_news_ = false;
  for (Job& job : jobs_) ready_.push_back(std::move(job));
  jobs_.clear();
  if (asked_to_abort_) aborted_ = std::exchange(asked_to_abort_, std::nullopt);
}

std::vector<Finished> Driver::step(Micros patience) {
  std::vector<Finished> finished;
  std::vector<Send> sends;
  std::vector<Receive> receives;
  {
    const std::lock_guard lock(mutex_);
    sends.swap(sends_);
    receives.swap(receives_);
  }
  for (Send& send : sends) messages_.add(std::move(send), finished);
  for (Receive& receive : receives) messages_.add(std::move(receive), finished);
  if (aborted_) abort_all(*std::exchange(aborted_, std::nullopt), finished);
  start_ready(finished);
  bool moved = messages_.step(finished);
  moved = move_flights(finished) || moved;
  if (!moved && finished.empty() && patience > Micros(0)) idle(patience, finished);
  return finished;
}

void Driver::abort_all(const std::string& why, std::vector<Finished>& finished) {
  group_.transport().abort_all(why);
  const auto error = failure("[lockstep] " + why);
  for (Flight& flight : flights_) finished.push_back(ended(std::move(flight.job), error));
  for (Job& job : ready_) finished.push_back(ended(std::move(job), error));
  flights_.clear();
  ready_.clear();
  messages_.fail_sends(error, finished);
  messages_.fail_receives(error, finished);
}

// The current exception as one of c10d's; an error of the group also ends it.
std::exception_ptr Driver::failed() {
  const std::exception_ptr error = std::current_exception();
  try {
    std::rethrow_exception(error);
  } catch (const CommError&) {
    failed_ = true;
  } catch (...) {
  }
  return translated(error);
}

// A collective of several stages is alone under way, so that with any timing all ranks start their
// collectives in one order.
void Driver::start_ready(std::vector<Finished>& finished) {
  while (!ready_.empty()) {
    if (!flights_.empty() && flights_.back().job.stages.size() > 1) return;
    Flight flight{std::move(ready_.front()), 0, {}};
    ready_.pop_front();
    try {
      flight.works = flight.job.stages[flight.next++]();
      flights_.push_back(std::move(flight));
    } catch (...) {
      finished.push_back(ended(std::move(flight.job), failed()));
    }
  }
}

// They end in the order in which they were started.
bool Driver::move_flights(std::vector<Finished>& finished) {
  bool moved = false;
  while (!flights_.empty()) {
    Flight& flight = flights_.front();
    std::exception_ptr error;
    try {
      for (comm::Work& work : flight.works) {
        if (!work.is_completed()) return moved;
        work.wait();
      }
      moved = true;
      if (flight.next < flight.job.stages.size()) {
        flight.works = flight.job.stages[flight.next++]();
        continue;
      }
    } catch (...) {
      error = failed();
    }
    flight.works.clear();
    finished.push_back(ended(std::move(flight.job), error));
    flights_.pop_front();
    start_ready(finished);
    moved = true;
  }
  return moved;
}

void Driver::idle(Micros patience, std::vector<Finished>& finished) {
  if (flights_.empty()) {
    messages_.idle(patience, finished);
    return;
  }
  for (comm::Work& work : flights_.front().works) {
    try {
      if (!work.wait_for(patience)) break;
    } catch (const std::exception&) {
      break;  // thrown again by the next caller
    }
  }
  move_flights(finished);
  messages_.step(finished);
}

void Driver::abort(const std::string& why) {
  if (!is_here()) return;
  Lock lock(mutex_);
  stay_if_leaving(lock);
  if (ending_) return;
  dead_ = true;
  asked_to_abort_ = why;
  has_news_ = true;
  if (!is_driven_) drive(lock, Micros(0));
  wake(lock);
}

// Takes the group over for good and finishes what others wait for. False where another caller has.
bool Driver::drain(Lock& lock, milliseconds patience) {
  if (ending_) return false;
  const auto until = Clock::now() + patience;
  ending_ = true;  // threads that wait leave the group to this call
  woken_.notify_all();
  // Receives are this rank's own affair.
  const auto others_wait = [&] {
    return has_news_ || !flights_.empty() || !ready_.empty() || messages_.sending();
  };
  while (is_driven_ || (others_wait() && Clock::now() < until)) {
    if (is_driven_) {
      changed_.wait(lock);
    } else {
      drive(lock, kLongest);
    }
  }
  return true;
}

// Callbacks that have not returned when the timeout expires are detached: they may never return.
void Driver::end_threads(Lock& lock, milliseconds patience) {
  const int own = served == this ? 1 : 0;  // a callback may end the group
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
  flights_.clear();
  ready_.clear();
  messages_.fail_sends(error, spent);
  messages_.fail_receives(error, spent);
  finish(lock, std::exchange(spent, {}));
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
