// A thread that writes what a run reports. Needs no torch.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "core/process/own_process.h"
#include "lockstep/train/run_log.h"

namespace lockstep::train {

// Hands records over to a thread of its own: appending never waits for a disk. Of more than
// kWaiting records that wait the oldest are dropped. What was appended is also written when the
// process ends by exit(), abort(), an uncaught exception or a fault, which wait for it for at most
// a second. In a child by fork(), which has no such thread, nothing is appended.
class RecordQueue {
 public:
  static constexpr size_t kWaiting = 4096;
  // Takes a record, in the thread. `missing`: this many before it were dropped. Must not throw.
  using Take = std::function<void(const LogRecord& record, double unix_seconds, uint64_t missing)>;

  explicit RecordQueue(Take take);
  // flush(), for at most 1 s: a disk that hangs holds up no process. `take` lives on until it does
  // not hang any more.
  ~RecordQueue();
  RecordQueue(const RecordQueue&) = delete;
  RecordQueue& operator=(const RecordQueue&) = delete;

  // From any thread; never blocks.
  void append(LogRecord record);
  // Returns when all that was appended has been taken, or after `timeout`. Whether it has.
  bool flush(std::chrono::milliseconds timeout = std::chrono::seconds(10));

 private:
  struct State;
  std::shared_ptr<State> state_;
  const OwnProcess process_;
  std::thread thread_;
};

}  // namespace lockstep::train
