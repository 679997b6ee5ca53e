#include "launch/job/restarts.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{250};
constexpr milliseconds kLongestPause{30'000};

// When the rank has reported a failure of its own; otherwise when its end was seen.
uint64_t said_ns(const Outcome& outcome, const RankEnd& end) {
  for (const Seen& seen : outcome.seen) {
    const auto& said = seen.log.failure;
    if (seen.rank == end.rank && said && said->blame == flight::Blame::Own) return said->at_ns;
  }
  return end.at_ns;
}

}  // namespace

Restarts::Decision Restarts::after(const Outcome& outcome) {
  if (outcome.succeeded() || outcome.signal) return {};
  Fault fault;
  Clock::duration ran{};
  for (const RankEnd& end : outcome.ends) {
    if (end.rank != outcome.cause) continue;
    const bool killed = WIFSIGNALED(end.wait_status) && WTERMSIG(end.wait_status) == SIGKILL;
    fault = {end.rank, end.wait_status, killed};
    // One that has reported its failure may be slow to end.
    const uint64_t slow_ns = end.at_ns - std::min(end.at_ns, said_ns(outcome, end));
    ran = end.ran - std::chrono::nanoseconds(slow_ns);
  }
  return after(fault, ran);
}

Restarts::Decision Restarts::after(const Fault& fault, Clock::duration ran) {
  if (most_ == 0) return {};
  quick_ = ran < kQuick ? quick_ + 1 : 0;
  const bool same = fault.rank == last_rank_ && fault.status == last_status_;
  same_ = quick_ == 0 || fault.rank < 0 ? 0 : same ? same_ + 1 : 1;
  last_rank_ = fault.rank;
  last_status_ = fault.status;
  const bool loops = same_ >= kLoop && !fault.from_outside;
  if (used_ == most_) {
    return {std::nullopt, fmt::format("no restart is left of {} (--max-restarts)", most_)};
  }
  if (loops) {
    return {std::nullopt,
            fmt::format("not restarted: rank {} failed in the same way {} times in a row, each "
                        "within {} s of its start; {} of {} restarts unused",
                        last_rank_, same_, kQuick.count(), most_ - used_, most_)};
  }
  ++used_;
  milliseconds pause{0};
  if (quick_ > 1) pause = std::min(kLongestPause, kFirstPause * (1 << std::min(quick_ - 2, 10)));
  const std::string when = pause.count() == 0
                               ? "now"
                               : fmt::format("in {:g} s", static_cast<double>(pause.count()) / 1e3);
  return {pause, fmt::format("restart {} of {}, {}", used_, most_, when)};
}

}  // namespace lockstep::launch
