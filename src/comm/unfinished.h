// Operations of a group whose handles have all been dropped.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "core/process/own_process.h"
#include "lockstep/comm/work.h"

namespace lockstep::comm {

inline bool overlap(const Span& a, const Span& b) { return a.begin < b.end && b.begin < a.end; }

class Unfinished {
 public:
  // With a process: other processes, such as children by fork(), cannot use the group.
  explicit Unfinished(std::optional<OwnProcess> process = std::nullopt) : process_(process) {}

  // What belongs to no group, of this thread: it is finished in the thread's next call or wait on
  // any.
  static Unfinished& of_this_thread() { return *shared_by_this_thread(); }
  static const std::shared_ptr<Unfinished>& shared_by_this_thread();

  // Whether this process is a rank of the group; a child of one is not.
  bool is_here() const noexcept { return !process_ || process_->is_here(); }
  // Throws ConfigError where it has none. `what`: a call, such as "all_reduce".
  void check_process(std::string_view what) const {
    if (!is_here()) refuse_child(what);
  }
  // The reason as text.
  std::string refusal() const { return process_->refusal("group"); }

  // The next of the group's operations; dropped ones are finished in this order.
  uint64_t next_number() { return ++numbers_; }

  // Any thread may drop.
  void keep(std::shared_ptr<Pending> dropped) noexcept;
  // Finishes those that share memory with `uses`, where one of the two writes it, or may do so.
  void finish_before(const Uses& uses);
  // Finishes all. Does nothing inside itself.
  void finish_all();
  // Takes all further; true when finish_all() would not block, but for what then() has left to do.
  // Does nothing inside itself.
  bool poll();
  // The group is destroyed: they are not finished.
  void close() noexcept;

 private:
  [[noreturn]] void refuse_child(std::string_view what) const;
  std::shared_ptr<Pending> take_first(const Uses* conflicting);

  const std::optional<OwnProcess> process_;
  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Pending>> dropped_;
  bool closed_ = false;
  bool finishing_ = false;
  bool polling_ = false;
  uint64_t numbers_ = 0;
};

}  // namespace lockstep::comm
