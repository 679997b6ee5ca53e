// A deadline for calls that have none.
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>

namespace lockstep::comm {

constexpr const char* kUnanswered =
    "no answer: the process that serves it has ended or is stopped, or its host is cut off";

class Unanswered : public std::runtime_error {
 public:
  Unanswered() : std::runtime_error(kUnanswered) {}
};

// What `call` returns or throws; Unanswered when it takes longer than `limit`. It runs in a thread
// of its own, which then goes on alone: `call` owns all that it uses. Costs some 40 us (two busy
// cores).
template <class Call>
auto within(std::chrono::milliseconds limit, Call call) {
  std::packaged_task<std::invoke_result_t<Call>()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(limit) == std::future_status::timeout) {
    throw Unanswered();
  }
  return result.get();
}

}  // namespace lockstep::comm
