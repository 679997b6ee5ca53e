#include "launch/job/background.h"

#include <netdb.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "core/process/thread.h"
#include "launch/output/writer.h"

namespace lockstep::launch {
namespace {

struct Work {
  Bell bell;
  std::function<void()> task;
  std::exception_ptr error;
  std::atomic<bool> over{false};
};

void start(const std::shared_ptr<Work>& work) {
  try {
    thread_without_signals([work] {
      try {
        work->task();
      } catch (...) {
        work->error = std::current_exception();
      }
      work->over = true;
      work->bell.ring();
    }).detach();
  } catch (const std::system_error&) {
    work->task();  // no thread can be started: then this one has to wait
    work->over = true;
  }
}

}  // namespace

bool run_in_background(Session& session, Outside* outside, Outcome& outcome,
                       std::function<void()> task) {
  const auto work = std::make_shared<Work>();
  work->task = std::move(task);
  start(work);
  while (!work->over) {
    std::vector<pollfd> events = {{session.signals.fd(), POLLIN, 0},
                                  {work->bell.fd.get(), POLLIN, 0}};
    session.output.await(events);
    int timeout = -1;
    if (outside != nullptr) {
      if (const auto until = outside->await(events)) {
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(*until - Outside::Clock::now());
        timeout = static_cast<int>(std::max<int64_t>(0, left.count()));
      }
    }
    poll(events.data(), events.size(), timeout);
    session.output.pump();
    if (work->over) break;
    if (const auto signal = session.next_end()) {
      outcome.signal = signal;
      if (outside != nullptr) outside->on_signal(*signal);
      return false;
    }
    if (outside == nullptr) continue;
    if (const auto order = outside->attend()) {
      outcome.outside = order->why;
      return false;
    }
  }
  if (work->error) std::rethrow_exception(work->error);
  return true;
}

std::vector<Address> resolve_in_background(Session& session, Outcome& outcome,
                                           const Endpoint& endpoint) {
  auto known = resolve(endpoint.host, endpoint.port, AI_NUMERICHOST).addresses;
  if (!known.empty()) return known;
  const auto found = std::make_shared<std::vector<Address>>();
  const auto ask = [found, endpoint] { *found = resolve(endpoint.host, endpoint.port).addresses; };
  if (!run_in_background(session, nullptr, outcome, ask)) return {};
  return *found;
}

}  // namespace lockstep::launch
