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
// For how long the group is taken over at first, so that others are not kept waiting; longer while
// nothing happens.
constexpr microseconds kFirst{100};

// Of the callback that this thread runs, if it does.
thread_local std::shared_ptr<const Scopes> scopes;

// Of a callback in an operation that was started in `outer`.
std::shared_ptr<const Scopes> scopes_within(const std::shared_ptr<const Scopes>& outer,
                                            Scope scope) {
  auto all = std::make_shared<Scopes>();
  if (outer) {
    for (const Scope& one : *outer) {
      if (one.driver != scope.driver) all->push_back(one);
    }
  }
  all->push_back(std::move(scope));
  return all;
}

}  // namespace

Driver::Driver(comm::Group group) : group_(std::move(group)), messages_(group_) {}

Driver::~Driver() { close(milliseconds(0)); }

thread_local const Driver* Driver::served_here = nullptr;

void Driver::check_process() const {
  if (!is_here())
    std::rethrow_exception(failure("[lockstep] " + process_.refusal("process group")));
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
  work->set_scopes(scopes);
  job.deadline = Clock::now() + bounded(work->getTimeout());
  Lock lock(mutex_);
  check_open(lock);
  spent.swap(spent_);
  jobs_.add(std::move(job));
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
  work->set_scopes(scopes);
  Lock lock(mutex_);
  check_open(lock);
  spent.swap(spent_);
  queue.push_back(std::move(operation));
  has_news_ = true;
  attempt(lock, *work);
  wake(lock);
  stay_if_leaving(lock);
}

// Where the group is free, sees whether the operation ends at once. Leaves all callbacks.
void Driver::attempt(Lock& lock, const BackendWork& work) {
  const auto until = Clock::now() + kAttempt;
  do {
    if (is_driven_) return;
    progress(lock, kAttempt / 3, &work);
  } while (!work.is_done() && Clock::now() < until);
}

// A thread of the driver's does what is left: callbacks where a caller waits, else everything.
void Driver::wake(Lock&) {
  if (ending_ || !(has_callbacks() || (waiting_ == 0 && (has_work() || !jobs_.empty())))) return;
  if (serving_ == 0) {
    threads_.push_back(thread_without_signals([self = shared_from_this()] { self->serve(); }));
    ++serving_;
  }
  woken_.notify_one();
}

void Driver::expect_callbacks(BackendWork& work) {
  if (!is_here()) return;
  const std::lock_guard lock(mutex_);
  if (!work.is_done()) jobs_.expect_callbacks(work);
}

void Driver::begin_callbacks(BackendWork& work) {
  const std::lock_guard lock(mutex_);
  jobs_.give_place(work);
  scopes = scopes_within(work.scopes(), {this, work.getSequencenumber(), work.place()});
}

// The callback of this driver's that this thread runs, or in which it runs one of another driver's.
const Scope* Driver::own_callback() const {
  if (!scopes) return nullptr;
  for (const Scope& one : *scopes) {
    if (one.driver != this) continue;
    const bool runs = std::count(callbacks_.begin(), callbacks_.end(), one.callback) > 0;
    return runs ? &one : nullptr;
  }
  return nullptr;
}

void Driver::wait(const BackendWork& work, milliseconds timeout) {
  check_process();
  const auto deadline =
      timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + bounded(timeout);
  std::vector<Finished> spent;
  Micros patience = kFirst;
  Lock lock(mutex_);
  const Scope* const own = own_callback();
  // What this callback has started itself waits for none but other callbacks.
  if (own && work.scope().callback != own->callback) {
    jobs_.let_through(work);
    has_news_ = true;
  }
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
    // Its callbacks run, or will, in another thread; or it is held back by some that do.
    const bool is_idle = !own && (work.is_settled() || !(is_driven_ || has_news_ || is_moving_));
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
    drive(lock, std::min(patience, left), &waiting_, &work);
    patience = std::min(2 * patience, kLongest);
  }
  --waiting_;
  spent.swap(spent_);
  wake(lock);
  stay_if_leaving(lock);
  if (!work.is_done()) check_open(lock);
}

void Driver::drive(Lock& lock, Micros patience, int* drivers, const BackendWork* wanted) {
  progress(lock, patience, wanted);
  call_back(lock, drivers, wanted);
}

// Takes the group over for a while.
void Driver::progress(Lock& lock, Micros patience, const BackendWork* wanted) {
  is_driven_ = true;
  take_news();
  lock.unlock();
  std::vector<Finished> finished;
  {
    const at::NoGradGuard no_grad;
    finished = step(patience, wanted);
  }
  lock.lock();
  is_moving_ = !flights_.empty() || !ready_.empty() || messages_.sending() || messages_.receiving();
  is_driven_ = false;
  dead_ = dead_ || failed_;
  settle(std::move(finished));
  changed_.notify_all();
}

Driver::Untold::iterator Driver::next_untold(const BackendWork* wanted) {
  const bool is_callback = own_callback() != nullptr;
  return std::find_if(untold_.begin(), untold_.end(), [&](const auto& one) {
    const BackendWork& work = *one.first.work;
    if (&work == wanted && is_callback) return true;
    if (wanted && &work != wanted && !is_callback) return false;
    return callbacks_.empty() ? jobs_.may_call(work) : work.scope().callback == callbacks_.back();
  });
}

void Driver::settle(std::vector<Finished> finished) {
  for (Finished& one : finished) {
    if (auto future = one.work->settle(one.error)) {
      untold_.emplace_back(std::move(one), std::move(future));
    } else {
      finish_work(std::move(one));
    }
  }
}

// Runs callbacks of what is over. `drivers` counts this thread. `wanted` is what a caller waits
// for, which runs no callbacks of other operations, since it would not be back at its deadline,
// unless it is a callback itself.
void Driver::call_back(Lock& lock, int* drivers, const BackendWork* wanted) {
  for (auto next = next_untold(wanted); next != untold_.end(); next = next_untold(wanted)) {
    auto [one, future] = std::move(*next);
    untold_.erase(next);
    const uint64_t number = one.work->getSequencenumber();
    callbacks_.push_back(number);
    if (drivers) --*drivers;
    changed_.notify_all();
    wake(lock);
    lock.unlock();
    const auto before = scopes;
    one.work->tell(*future);
    future.reset();
    scopes = before;
    lock.lock();
    if (drivers) ++*drivers;
    std::erase(callbacks_, number);
    finish_work(std::move(one));
    changed_.notify_all();
  }
  if (wanted) wake(lock);
}

void Driver::finish_work(Finished one) {
  one.work->mark_done();
  jobs_.forget(*one.work);
  has_news_ = has_news_ || !jobs_.empty();
  spent_.push_back(std::move(one));
}

void Driver::serve() {
  served_here = this;
  Micros patience = kFirst;
  Lock lock(mutex_);
  while (!ending_) {
    if (has_callbacks()) {
      call_back(lock, &serving_);
      continue;
    }
    const bool may_drive = waiting_ == 0 && !is_driven_;
    if (!may_drive || (!has_work() && jobs_.empty())) {
      woken_.wait(lock);
      patience = kFirst;  // a caller may be back soon
      continue;
    }
    if (!has_work() && Clock::now() < jobs_.next_look()) {
      woken_.wait_until(lock, jobs_.next_look());
      continue;
    }
    if (has_news_) patience = kFirst;
    drive(lock, patience, &serving_);
    patience = std::min(2 * patience, kLongest);
  }
}

// With the mutex held: what was submitted becomes the driver's.
void Driver::take_news() {
  if (std::exchange(has_news_, false)) {
    while (auto job = jobs_.next()) ready_.push_back(std::move(*job));
  }
  // Other ranks are in it or will be: without it, this one's next would meet it there.
  if (!asked_to_abort_) asked_to_abort_ = jobs_.overdue(Clock::now());
  if (!asked_to_abort_) return;
  // An abort ends all.
  dead_ = true;
  while (auto job = jobs_.pop()) ready_.push_back(std::move(*job));
  aborted_ = std::exchange(asked_to_abort_, std::nullopt);
}

std::vector<Finished> Driver::step(Micros patience, const BackendWork* wanted) {
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
  if (!moved && finished.empty() && patience > Micros(0)) idle(patience, wanted, finished);
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

// Waits for a message where the caller does: beside it a collective may wait for other ranks.
void Driver::idle(Micros patience, const BackendWork* wanted, std::vector<Finished>& finished) {
  const bool for_message =
      wanted && wanted->is_message() && (messages_.sending() || messages_.receiving());
  if (flights_.empty() || for_message) {
    messages_.idle(patience, finished);
    move_flights(finished);
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

}  // namespace lockstep::c10d_backend
