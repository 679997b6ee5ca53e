// Operations of a group that nobody holds a handle of any more.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/comm/work.h"

namespace lockstep::comm {

class Unfinished {
 public:
  // What belongs to no group, of this thread: it is finished in the thread's next call or wait on
  // any.
  static Unfinished& of_this_thread() { return *shared_by_this_thread(); }
  static const std::shared_ptr<Unfinished>& shared_by_this_thread();

  // The next of the group's operations; dropped ones are finished in this order.
  uint64_t next_number() { return ++numbers_; }

  // Any thread may drop.
  void keep(std::shared_ptr<Pending> dropped) noexcept;
  // Finishes those that share memory with `uses`, where one of the two writes it, or may do so.
  void finish_before(const Uses& uses);
  // Finishes all. Does nothing inside itself.
  void finish_all();
  // Takes all further; true when finish_all() would not block, but for what then() has left to do.
  bool poll();
  // The group goes away: nobody finishes them.
  void close() noexcept;

 private:
  std::shared_ptr<Pending> take_first(const Uses* conflicting);

  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Pending>> dropped_;
  bool closed_ = false;
  bool finishing_ = false;
  uint64_t numbers_ = 0;
};

}  // namespace lockstep::comm
