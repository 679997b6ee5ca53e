// Runs calls that have no deadline in a thread of their own.
#pragma once

#include <chrono>
#include <future>
#include <type_traits>
#include <utility>

#include "core/process/thread.h"

namespace lockstep::comm {

// A call in a thread of its own, which continues when the caller stops waiting for it: `call` owns
// all that it uses. Costs some 40 us (two busy cores).
template <class Call>
class Later {
 public:
  using Result = std::invoke_result_t<Call>;

  explicit Later(Call call) {
    std::packaged_task<Result()> task(std::move(call));
    result_ = task.get_future();
    thread_without_signals(std::move(task)).detach();
  }
  bool is_over(std::chrono::milliseconds limit) const {
    return result_.wait_for(limit) == std::future_status::ready;
  }
  // What the call returned or threw.
  Result get() { return result_.get(); }

 private:
  std::future<Result> result_;
};

}  // namespace lockstep::comm
