// What a launcher does when a time has passed: it connects again, stops waiting, and prints what it
// waits for.
#include <fmt/format.h>

#include <algorithm>

#include "launch/rendezvous/node/node.h"

namespace lockstep::launch {
namespace {

constexpr Time kMostPause = std::chrono::seconds(1);
constexpr Time kQuiet = std::chrono::milliseconds(1500);  // then a line says what is awaited

}  // namespace

void Node::dial(Time now) {
  phase_ = Phase::Dialling;
  link_ = ++last_link_;
  dialled_ = now;
  actions_.emplace_back(Dial{*link_, options_.coordinator});
}

void Node::look_for_coordinator(Time patience, Time now) {
  patience_ = patience;
  dialling_until_ = now + patience;
  quiet_until_ = now + kQuiet;
}

void Node::retry(Time now) {
  phase_ = Phase::Pausing;
  if (ranks_) {
    next_dial_ = now + options_.timing.survivor_interval;
    return;
  }
  next_dial_ = now + pause_;
  pause_ = std::min(2 * pause_, kMostPause);
}

void Node::expect_a_start(Time now) { quiet_until_ = now + kQuiet; }

// Nothing unless that is not a launcher, as far as is known.
std::string Node::who_holds_the_port() const {
  if (!options_.port_is_held || past_.coordinator != 0 || !waiting_for_.empty()) return "";
  return "another program of this host holds the port and does not answer ('ss -ltnp' names it; "
         "--rdzv-endpoint takes another port)";
}

void Node::say_what_is_awaited(Time now) {
  if (!quiet_until_ || now < *quiet_until_) return;
  quiet_until_.reset();
  if (phase_ == Phase::Member) {
    if (!ranks_ && !done_) {
      actions_.emplace_back(Say{
          fmt::format("joined the job at {}; waiting for its other hosts", options_.coordinator)});
    }
  } else if (!ranks_ && phase_ != Phase::Ending && waiting_for_.empty()) {
    const std::string holder = who_holds_the_port();
    actions_.emplace_back(Say{fmt::format(
        "waiting for the coordinator at {}: {}; this host waits for {:g} s (--rdzv-conf "
        "{}){}{}",
        options_.coordinator,
        nobody_listens_  ? "nothing listens there yet"
        : holder.empty() ? "no answer"
                         : holder,
        seconds(patience_), attempt_ > 0 ? "rejoin_timeout" : "join_timeout",
        missed_.empty() ? "" : "; tried ", missed_)});
  }
}

bool Node::lease_is_over(Time now) const {
  return phase_ == Phase::Member && !is_root() && now >= lease_from_ + options_.timing.lease;
}

void Node::tick(Time now) {
  const Timing& timing = options_.timing;
  if (phase_ == Phase::Over) return;
  std::vector<ConnectionId> silent;
  for (const auto& [link, caller] : callers_) {
    if (now >= caller.heard + timing.lease) silent.push_back(link);
  }
  for (const ConnectionId link : silent) {
    if (callers_.contains(link)) drop(link, true, now);
  }
  if (is_root()) {
    coordinator_->tick(now);
    broadcast(now);
  }
  if (phase_ == Phase::Ending && now >= end_by_) {
    while (!callers_.empty()) hang_up(callers_.extract(callers_.begin()).key());
    leave_if_alone();
  }
  const bool dialling = phase_ == Phase::Dialling || phase_ == Phase::Asking;
  if (dialling && now >= dialled_ + timing.lease) {
    disconnect();
    retry(now);
  }
  if ((dialling || phase_ == Phase::Pausing) && !ranks_ && now >= dialling_until_) {
    disconnect();
    const std::string holder = who_holds_the_port();
    // What is known to be in the way says more.
    const std::string tried =
        missed_.empty() || !holder.empty() || !waiting_for_.empty()
            ? ""
            : fmt::format(
                  "; tried {} (is a launcher started there, and does every firewall on the "
                  "way let this host reach it?)",
                  missed_);
    return end(
        1,
        fmt::format("could not reach a coordinator at {} within {:g} s{}{}{}{}",
                    options_.coordinator, seconds(patience_), holder.empty() ? "" : ": " + holder,
                    waiting_for_.empty() ? "" : "; last error: " + waiting_for_, tried,
                    why_.empty() ? "" : "; earlier: " + why_),
        now);
  }
  say_what_is_awaited(now);
  if (phase_ == Phase::Pausing && now >= next_dial_) dial(now);
  if (phase_ == Phase::Member && !is_root()) {
    if (lease_is_over(now)) {
      return orphaned(fmt::format("no answer for {:g} s (--rdzv-conf heartbeat_timeout)",
                                  seconds(timing.lease)),
                      now);
    }
    if (now >= next_ping_) {
      next_ping_ = now + timing.interval;
      unanswered_[++pings_] = now;
      send(*link_, Ping{pings_});
    }
  }
}

Time Node::deadline(Time now) const {
  const Timing& timing = options_.timing;
  Time next = now + std::chrono::hours(1);
  const auto by = [&next](Time time) { next = std::min(next, time); };
  for (const auto& [link, caller] : callers_) by(caller.heard + timing.lease);
  if (is_root()) {
    if (const auto time = coordinator_->deadline(now)) by(*time);
  }
  if (quiet_until_) by(*quiet_until_);
  // After that only ranks are awaited, and the worker group ends them.
  if (phase_ == Phase::Ending && now < end_by_) by(end_by_);
  if (phase_ == Phase::Dialling || phase_ == Phase::Asking) {
    by(dialled_ + timing.lease);
    if (!ranks_) by(dialling_until_);
  }
  if (phase_ == Phase::Pausing) by(ranks_ ? next_dial_ : std::min(next_dial_, dialling_until_));
  if (phase_ == Phase::Member && !is_root()) by(std::min(lease_from_ + timing.lease, next_ping_));
  return next;
}

}  // namespace lockstep::launch
