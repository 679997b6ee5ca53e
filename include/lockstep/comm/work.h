// A collective in flight.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::comm {

class Unfinished;

// Memory that an operation reads or writes, as addresses. Private to the library.
struct Span {
  const char* begin = nullptr;
  const char* end = nullptr;
};
// The memory of several tensors. Private to the library.
struct Memory {
  Span whole;               // from the first to the last element
  std::vector<Span> parts;  // a tensor each; none where there is only one
};
// All that an operation touches. Private to the library.
struct Uses {
  Memory reads;
  Memory writes;
  bool unknown = false;  // may use any
};

// A transport's part of an operation, kept until the operation is completed. Private to the
// library.
class Pending {
 public:
  virtual ~Pending() = default;

  // See Work::wait().
  void wait();
  // See Work::wait_for().
  bool wait_within(std::chrono::microseconds limit);
  // See Work::is_completed().
  bool poll();
  // Whether wait() has something to do that has to come in the order of waits, as of then().
  virtual bool runs_in_wait() const { return false; }
  // Where the operation goes when it is dropped.
  const std::shared_ptr<Unfinished>& group() const { return group_; }
  // The number that the flight recorder gave the call.
  void set_call(uint32_t call) { call_ = call; }
  // Whose operation it is, if it is to be finished when its handles are dropped.
  void belong_to(std::shared_ptr<Unfinished> group, Uses uses);

 protected:
  // For one that is over from the start.
  void set_over() { over_ = true; }

 private:
  friend class Unfinished;
  friend class Work;

  // Blocks until the operation is over; throws CommError. Not called again.
  virtual void finish() = 0;
  // As finish(), for a limited time: false when the operation is not over yet.
  virtual bool finish_within(std::chrono::microseconds) {
    finish();
    return true;
  }
  // Takes the operation further without blocking; true when finish() would not block.
  virtual bool advance() = 0;
  template <class Finish>
  bool end(const Finish& finish);
  // poll() without the group's dropped operations.
  bool poll_alone();
  void set_failed();

  bool over_ = false;
  std::atomic<int> handles_ = 1;
  uint32_t call_ = 0;
  std::exception_ptr error_;
  std::shared_ptr<Unfinished> group_;
  uint64_t number_ = 0;  // among the group's operations
  Uses uses_;
};

// Handle of an operation that was started. Until wait() has returned, the operation's tensors may
// be neither read nor written (the operation itself keeps their storage alive). Copies share the
// operation.
//
// While wait() waits, it drives everything that was started in the same group, so ranks may wait in
// different orders. Over shared memory and between hosts operations progress only inside calls on
// their own group: a rank that waits for operations of several groups has to wait for them in the
// same order as the other ranks.
//
// Dropping it unwaited is allowed: the group keeps the operation and finishes it, with all its
// effects. It is over when a later wait() on the group has returned, which therefore also waits for
// it; a call on the group whose tensors share memory with those of a dropped operation finishes
// that first, and any call finishes a dropped then(). An operation that is dropped after the last
// call on its group is not finished. Dropping itself never communicates.
//
// Threads: wait(), is_completed() and then() belong to the thread that calls the group. The last
// copy may be destroyed on any thread: an operation that is not over then goes to the group, which
// finishes it in a later call.
//
// For tensors on a device, wait() blocks no thread: it makes the stream that is current on the
// device when it is first called wait for the operation, and an error that the operation meets
// after that is thrown by the group's next call. is_completed() asks the device before that, and is
// true after it.
class [[nodiscard]] Work {
 public:
  Work() = default;  // an operation that is over
  // Private to the library.
  explicit Work(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {}
  Work(const Work& other) : pending_(other.pending_) {
    if (pending_) pending_->handles_.fetch_add(1, std::memory_order_relaxed);
  }
  Work(Work&& other) noexcept : pending_(std::move(other.pending_)) {}
  Work& operator=(Work other) noexcept {
    std::swap(pending_, other.pending_);
    return *this;
  }
  ~Work() {
    if (pending_ && pending_->handles_.fetch_sub(1, std::memory_order_acq_rel) == 1) drop();
  }

  // Blocks until the operation is over on this rank. Throws CommError (peer lost, deadline,
  // mismatch), on every copy and every call.
  void wait() {
    if (pending_) pending_->wait();
  }

  // True when wait() would return or throw at once (unless a dropped then() has to run first).
  // Never blocks, never throws. Drives the group's operations, so calling it between pieces of
  // other work overlaps the two.
  bool is_completed() { return !pending_ || pending_->poll(); }

  // As wait(), but returns false when the operation is not over after about `limit`, and harms
  // nothing then: it continues, and may be waited for again. The call's own deadline
  // (CallOptions::timeout) is counted on, and is an error. `limit` bounds the wait for this
  // operation, not for dropped ones. For tensors on a device as wait(): it blocks no thread.
  bool wait_for(std::chrono::microseconds limit) {
    return !pending_ || pending_->wait_within(limit);
  }

  // Private to the library.
  void set_call(uint32_t call) const;
  const std::shared_ptr<Pending>& pending() const { return pending_; }

 private:
  void drop() noexcept;

  std::shared_ptr<Pending> pending_;
};

// Waits for all of them, in their order; throws what the first that fails throws.
void wait_all(std::span<Work> works);

// Waits until one of them is over, and returns which; throws what it throws. To wait for the next
// one, call it again with the rest. Throws ConfigError for an empty list, and for an operation made
// by then(), whose collectives would come in another order on each rank.
size_t wait_any(std::span<Work> works);

// The operation that is over when `first` is, `next` was called and the operation it returned is
// over. `next` runs inside wait() and never inside is_completed(), so collectives that it starts
// come in the order in which this rank waits, which has to be the other ranks' order too. Where it
// was dropped, it runs before the next call on the group of `first`, or at the end of the next
// wait() on it; where `first` is of no group, like Work(), of this thread's next call or wait on
// any.
Work then(Work first, std::function<Work()> next);

}  // namespace lockstep::comm
