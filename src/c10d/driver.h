// Lets a group's operations progress: in the threads that wait for them, else in a thread of its
// own.
//
// A group may be called by one thread at a time, and operations progress inside calls only. A
// thread that waits therefore takes the group over for a short while at a time, drives all that has
// been started, and passes it to another caller that waits; so an operation that is waited for
// costs no change of threads. The driver's thread does the same while no caller waits.
//
// Callbacks of futures run one at a time, in the order of c10d/queue.h, in the driver's thread or
// in that of a caller who waits for their operation. Collectives that are submitted after they were
// attached start when they have returned, and what they start goes first, so that all ranks start
// collectives in one order; one that is held back beyond its timeout aborts the group, since the
// other ranks do not skip it. A callback may wait for what it has started itself: meanwhile another
// thread drives, of the driver's own where no caller waits, and completes that. It may also wait
// for a collective that is held back until the callback returns; that one is then let through.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "c10d/messages.h"
#include "c10d/queue.h"
#include "c10d/work.h"
#include "core/process/own_process.h"
#include "lockstep/comm/group.h"

namespace lockstep::c10d_backend {

// Any thread may call it.
class Driver : public std::enable_shared_from_this<Driver> {
 public:
  explicit Driver(comm::Group group);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Whether this process made it. A child of that one gets errors, and destroys nothing.
  bool is_here() const { return process_.is_here(); }
  // For what runs inside a stage.
  const comm::Group& group() const { return group_; }

  // Collectives start in the order in which they are submitted, those of callbacks as c10d/queue.h
  // says. Blocks until it is over if `waits`; throws where it could not be started.
  void submit(Job job, bool waits);
  void submit(Send send);
  void submit(Receive receive);
  // Before a future of it is made.
  void expect_callbacks(BackendWork& work);
  // The first callback of each future that may get others: what they start has this scope.
  void begin_callbacks(BackendWork& work);
  // Until it is over; throws c10::DistBackendError at the deadline, if there is one.
  void wait(const BackendWork& work, milliseconds timeout);
  // Ends what is under way with an error, on all ranks.
  void abort(const std::string& why);
  // Whether the group has failed or was aborted.
  bool is_dead() const;
  // Drops receives, finishes for `patience` at most what others wait for, and ends the threads. Of
  // that, messages which no rank receives have a second since the last one was taken, and as long
  // again for each 50 MB.
  void close(milliseconds patience) noexcept;
  // The same before the process ends, by the thread that ends it. Other threads do not come back
  // from their calls any more: one that came back to an interpreter that ends would abort the
  // process.
  void leave(milliseconds patience) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;
  using Micros = std::chrono::microseconds;
  // What is over, with a future that has callbacks and has not been told.
  using Untold = std::deque<std::pair<Finished, c10::intrusive_ptr<c10::ivalue::Future>>>;
  struct Flight {
    Job job;
    size_t next = 0;  // stage
    std::vector<comm::Work> works;
  };

  void check_process() const;
  void check_open(Lock& lock);
  void stay_if_leaving(Lock& lock);
  bool has_callbacks() { return next_untold(nullptr) != untold_.end(); }
  bool has_work() { return has_news_ || is_moving_ || has_callbacks(); }
  void attempt(Lock& lock, const BackendWork& work);
  void wake(Lock& lock);
  bool drain(Lock& lock, milliseconds patience);
  void end_threads(Lock& lock, milliseconds patience);
  void progress(Lock& lock, Micros patience, const BackendWork* wanted);
  void call_back(Lock& lock, int* drivers = nullptr, const BackendWork* wanted = nullptr);
  void drive(Lock& lock, Micros patience, int* drivers = nullptr,
             const BackendWork* wanted = nullptr);
  void settle(std::vector<Finished> finished);
  void finish_work(Finished one);
  const Scope* own_callback() const;
  Untold::iterator next_untold(const BackendWork* wanted);
  void serve();
  std::vector<Finished> step(Micros patience, const BackendWork* wanted);
  void take_news();
  void abort_all(const std::string& why, std::vector<Finished>& finished);
  std::exception_ptr failed();
  void start_ready(std::vector<Finished>& finished);
  bool move_flights(std::vector<Finished>& finished);
  void idle(Micros patience, const BackendWork* wanted, std::vector<Finished>& finished);
  // submit() of a message.
  template <class Operation>
  void enqueue(std::vector<Operation>& queue, Operation operation);

  // For how long the group is taken over at most.
  static constexpr Micros kLongest{2000};
  // Whose own thread this is. It has to end: it runs callbacks of futures, and they may call.
  static thread_local const Driver* served_here;

  const OwnProcess process_;
  const comm::Group group_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // for threads that wait
  std::condition_variable woken_;    // for the driver's own
  Untold untold_;
  std::vector<uint64_t> callbacks_;  // that run, each in the last one's wait: of which operations
  Queue jobs_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  std::optional<std::string> asked_to_abort_;
  bool has_news_ = false;
  bool is_moving_ = false;  // something was under way when the group was last handed over
  bool is_driven_ = false;
  bool dead_ = false;
  bool ending_ = false;
  bool closed_ = false;
  std::thread::id leaver_;
  int waiting_ = 0;  // callers that drive, or will; not those in a callback
  int serving_ = 0;  // of threads_, the same
  // The last reference to a tensor that Python knows takes the interpreter's lock, and a thread
  // that asks for it while the interpreter ends is unwound through noexcept frames, which aborts.
  // So callers free what the driver's thread has finished.
  std::vector<Finished> spent_;
  std::vector<std::thread> threads_;

  // Of the thread that drives.
  std::deque<Job> ready_;
  std::deque<Flight> flights_;
  Messages messages_;
  std::optional<std::string> aborted_;
  bool failed_ = false;
};

}  // namespace lockstep::c10d_backend
