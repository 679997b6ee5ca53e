// Collectives that were submitted and have not been handed to the group, in the order in which all
// ranks start them.
//
// Callbacks of futures may start collectives, at a moment that depends on timing, while the program
// starts others. So that the order is the same on all ranks, a collective whose future was asked
// for holds back those that are submitted after it until its callbacks have returned, and what they
// start goes before those that are held back. The order is that of a traversal, depth first: an
// operation, what its callbacks start, the next operation.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
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
  // Of those whose futures were asked for, the ones up to this number hold it back.
  uint64_t after = 0;
};

// Used with the driver's mutex held.
class Queue {
 public:
  bool empty() const { return jobs_.empty(); }
  void add(Job job);
  // The first one, unless it is held back.
  std::optional<Job> next();
  // The first one in any case.
  std::optional<Job> pop();
  // A future of it is asked for, so that callbacks may follow. A message holds nothing back: its
  // peer may send or receive it after a collective that comes later here.
  void expect_callbacks(BackendWork& work);
  // Its callbacks have returned, or there are none.
  void forget(const BackendWork& work);
  // For a callback that waits for this operation, which is held back until the callback returns.
  void let_through(const BackendWork& work);
  // For one that ends the group.
  void let_all_through();

 private:
  bool is_held(const Job& job) const;

  std::deque<Job> jobs_;
  std::multiset<Place> awaited_;
  uint64_t asked_ = 0;
};

}  // namespace lockstep::c10d_backend
