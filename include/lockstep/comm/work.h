// A collective in flight.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

namespace lockstep::comm {

// What a transport keeps of an operation until it is over. Private to the library.
class Pending {
 public:
  virtual ~Pending() = default;

  void wait();
  bool poll();
  // The number that the flight recorder gave the call.
  void set_call(uint32_t call) { call_ = call; }

 private:
  // Blocks until the operation is over; throws CommError. Not called again.
  virtual void finish() = 0;
  // Takes the operation further without blocking; true when finish() would not block.
  virtual bool advance() = 0;

  bool over_ = false;
  std::exception_ptr error_;
  uint32_t call_ = 0;
};

// Handle of an operation that was started. Until wait() has returned, the operation's tensors may
// be neither read nor written (the operation itself keeps their storage alive). Dropping it
// unwaited is allowed: the group's next call finishes the operation. Copies share the operation.
// Over shared memory an operation moves on only inside calls on its own group, so a rank that waits
// for operations of several groups waits for them in the same order as the other ranks do.
// For tensors on a device, wait() blocks no thread: it makes the stream that is current on the
// device when it is first called wait for the operation, and what the operation still runs into is
// thrown by the group's next call. is_completed() asks the device.
class [[nodiscard]] Work {
 public:
  Work() = default;  // an operation that is over
  explicit Work(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {}

  // Blocks until the operation is over on this rank. Throws CommError (peer lost, deadline,
  // mismatch), on every copy and every call alike.
  void wait() {
    if (pending_) pending_->wait();
  }

  // Private to the library.
  void set_call(uint32_t call) const;

  // True when wait() would return or throw at once. Never blocks, never throws; drives the
  // operation forward, so calling it between pieces of other work overlaps the two.
  bool is_completed() { return !pending_ || pending_->poll(); }

 private:
  std::shared_ptr<Pending> pending_;
};

// The operation that is over when `first` is, `next` was called and the operation it returned is
// over. `next` runs inside wait() and never inside is_completed(), so collectives that it starts come
// in the order in which this rank waits, which has to be the other ranks' order too.
Work then(Work first, std::function<Work()> next);

}  // namespace lockstep::comm
