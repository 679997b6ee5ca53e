// A thread of a group that runs its operations one after another, and what they look like to those
// who wait for them.
#pragma once

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::comm {

using WireWork = c10::intrusive_ptr<c10d::Work>;

class Worker {
 public:
  Worker();
  // Ends the thread, which it waits for only when that is idle.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs `task` after those before it. The work is over when it has returned or thrown.
  WireWork run(std::function<void()> task);
  // Runs `task` at once, in a thread of its own.
  static WireWork run_apart(std::function<void()> task);

 private:
  struct Queue;
  std::shared_ptr<Queue> queue_;
};

}  // namespace lockstep::comm
