#include "launch/job/restarts.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

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
  Clock::duration ran{};
  for (const RankEnd& end : outcome.ends) {
    if (end.rank != outcome.cause) continue;
    // One that has reported its failure may be slow to end.
    const uint64_t slow_ns = end.at_ns - std::min(end.at_ns, said_ns(outcome, end));
    ran = end.ran - std::chrono::nanoseconds(slow_ns);
  }
  return after(outcome.cause, own_failures(outcome), ran);
}

Restarts::Decision Restarts::after(const Fault& fault, Clock::duration ran) {
  Ways ways;
  if (fault.rank >= 0 && !fault.from_outside) ways.emplace(fault.rank, fault.status);
  return after(fault.rank, std::move(ways), ran);
}

Restarts::Decision Restarts::after(std::optional<int> first, Ways ways, Clock::duration ran) {
  if (most_ == 0) return {};
  quick_ = ran < kQuick ? quick_ + 1 : 0;
  Ways again;
  std::set_intersection(common_.begin(), common_.end(), ways.begin(), ways.end(),
                        std::inserter(again, again.end()));
  same_ = quick_ == 0 || ways.empty() ? 0 : again.empty() ? 1 : same_ + 1;
  common_ = again.empty() ? std::move(ways) : std::move(again);
  if (used_ == most_) {
    return {std::nullopt, fmt::format("no restart is left of {} (--max-restarts)", most_)};
  }
  if (same_ >= kLoop) {
    const auto is_first = [&first](const auto& way) { return way.first == first; };
    const auto named = std::find_if(common_.begin(), common_.end(), is_first);
    return {std::nullopt,
            fmt::format("not restarted: rank {} failed in the same way {} times in a row, each "
                        "within {} s of its start; {} of {} restarts unused",
                        (named == common_.end() ? common_.begin() : named)->first, same_,
                        kQuick.count(), most_ - used_, most_)};
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
