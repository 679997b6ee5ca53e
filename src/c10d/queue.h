// Collectives that were submitted and have not been handed to the group, in the order in which all
// ranks start them.
//
// Callbacks of futures may start collectives, at a moment that depends on timing, while the program
// starts others. What a callback starts has the place in the order at which it was attached: where
// the operation was over already, it ran there, in the thread that attached it. So a collective
// whose future has callbacks holds back those that are submitted from then on until the callbacks
// have returned, and what they start goes before those that are held back; a future without
// callbacks holds nothing back. The order is that of a traversal, depth first.
//
// It is seen at the next submission whether there are callbacks. So between two of them callbacks
// of several operations have to be attached in the order of the operations, and all of one
// operation's between the same two.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "c10d/work.h"
#include "lockstep/comm/group.h"

namespace lockstep::c10d_backend {

// A part of a collective: starts what it consists of. The next one starts when all of that is over.
using Stage = std::function<std::vector<comm::Work>()>;

struct Job {
  std::vector<Stage> stages;
  c10::intrusive_ptr<BackendWork> work;
  // Worth a few microseconds in the caller's thread, although no caller waits yet.
  bool is_short = false;
  // Until which it may be held back.
  std::chrono::steady_clock::time_point deadline = {};
  // Of those that have places, the ones up to this number hold it back.
  uint64_t after = 0;
};

// Used with the driver's mutex held.
class Queue {
  using Clock = std::chrono::steady_clock;

 public:
  bool empty() const { return jobs_.empty(); }
  void add(Job job);
  // The first one, unless it is held back.
  std::optional<Job> next();
  // The first one in any case.
  std::optional<Job> pop();
  // When overdue() has to be called at the latest.
  Clock::time_point next_look() const { return std::min(deadline_, looked_ + kLook); }
  // Once next() has returned nothing: says what holds back one whose deadline has passed, if any.
  // Gives back the time for which the process was stopped.
  std::optional<std::string> overdue(Clock::time_point now);
  // A future of it is asked for, so that callbacks may follow. A message holds nothing back: its
  // peer may send or receive it after a collective that comes later here.
  void expect_callbacks(BackendWork& work);
  // Its callbacks begin, and no more can be added to them: gives it a place, unless it has one.
  void give_place(BackendWork& work);
  // While none runs: whether its callbacks are the next, in the order of places.
  bool may_call(const BackendWork& work) const;
  // Its callbacks have returned, or there are none.
  void forget(const BackendWork& work);
  // For a callback that waits for this operation, which is held back until the callback returns.
  void let_through(const BackendWork& work);
  // For one that ends the group.
  void let_all_through();

 private:
  // Gives those a place that have callbacks by now.
  void see_callbacks();
  using Awaited = std::multimap<Place, const BackendWork*>;
  static constexpr auto kNever = Clock::time_point::max();
  static constexpr std::chrono::seconds kLook{1};

  Awaited::const_iterator holder_of(const Job& job) const;
  bool is_held(const Job& job) const { return holder_of(job) != awaited_.end(); }

  std::deque<Job> jobs_;
  Clock::time_point deadline_ = kNever;  // none is before it
  Clock::time_point looked_;             // last, since there have been jobs
  Awaited awaited_;
  std::map<uint64_t, BackendWork*> expected_;  // by number: futures, and no place yet
  uint64_t places_ = 0;
};

}  // namespace lockstep::c10d_backend
