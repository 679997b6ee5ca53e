// Threads of a group that run its operations, begun one after another, and c10d's works to wait for
// them.
#pragma once

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::comm {

using WireWork = c10::intrusive_ptr<c10d::Work>;

class Worker {
 public:
  Worker();
  // Ends the threads, which it waits for only when they are idle.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Begins `task` after those before it; two run at a time, so that the end of one and the
  // beginning of the next share the wire. The work is over when it has returned or thrown.
  WireWork run(std::function<void()> task);
  // Runs `task` at once, in a thread that runs no other meanwhile. Tasks may wait for each other.
  static WireWork run_apart(std::function<void()> task);

 private:
  struct Queue;
  std::shared_ptr<Queue> queue_;
};

}  // namespace lockstep::comm
