#include "launch/rendezvous/coordinator/coordinator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>

#include "launch/rendezvous/coordinator/job_spec.h"

namespace lockstep::launch {
namespace {

// Failures that lie closer together than this count as one: the consequence may have been reported
// first.
constexpr Time kEcho = std::chrono::seconds(1);

constexpr int kSigkill = 128 + SIGKILL;  // as an exit status: it comes from outside

}  // namespace

Coordinator::Coordinator(const JobSpec& job_spec, const Timing& timing, std::string where, Time now)
    : job_spec_(job_spec),
      timing_(timing),
      where_(std::move(where)),
      restarts_(job_spec.max_restarts),
      gathering_since_(now),
      not_before_(now + timing.survivors),
      remarks_(now) {}

void Coordinator::set_state(Host& host, State state) {
  --counts_[static_cast<size_t>(std::exchange(host.state, state))];
  ++counts_[static_cast<size_t>(state)];
}

Message Coordinator::place(const Join& join, Time now) {
  Message message = answer(join, now);
  remarks_.on_answer(join, message);
  return message;
}

Message Coordinator::answer(const Join& join, Time now) {
  if (phase_ == Phase::Ended) {
    // Who was in no job yet is of the next one.
    if (join.past.coordinator == 0) return Wait{"an earlier job at this address is ending"};
    return Refuse{"the job has ended"};
  }
  if (last_id_ == 0) own_launcher_ = join.launcher;
  predecessors_.note(join.past, own_launcher_, now + timing_.lease + timing_.stop);
  const std::string theirs = difference(join.job_spec, job_spec_);
  // A coordinator that has replaced another goes on with its numbers, so that a restart's files and
  // keys are its own.
  if (seated_.empty() && theirs.empty()) attempt_ = std::max(attempt_, join.past.attempt);
  if (join.past.has_ranks) {
    fences_.emplace(join.launcher, now + timing_.stop);
    return Wait{"its ranks of an earlier start are being stopped"};
  }
  if (!theirs.empty()) {
    return Refuse{fmt::format(
        "{} was started with {}, the job has {}: start all hosts with the same options{}",
        join.host, theirs, difference(job_spec_, join.job_spec),
        join.job_spec.command_hash == job_spec_.command_hash
            ? ""
            : ", and jobs with another --rdzv-id (where hosts are to run "
              "different commands: --rdzv-conf same_command=0)")};
  }
  if (join.node_rank >= job_spec_.max_nodes) {
    return Refuse{fmt::format("--node-rank {} with --nnodes {}: they count from 0", join.node_rank,
                              job_spec_.max_nodes)};
  }
  if (const auto known = by_launcher_.find(join.launcher); known != by_launcher_.end()) {
    lost(known->second, false, now);  // the launcher has noticed the loss before this one did
  }
  fences_.erase(join.launcher);  // it asks only when none of its ranks is left
  if (const auto taken = by_node_rank_.find(join.node_rank); taken != by_node_rank_.end()) {
    const Join& other = hosts_.at(taken->second).join;
    return Wait{
        fmt::format("node rank {} is {}'s ({})", join.node_rank, other.host, other.address)};
  }
  const size_t places = static_cast<size_t>(job_spec_.max_nodes);
  if (spares_ && hosts_.size() >= places + static_cast<size_t>(*spares_)) {
    return Refuse{fmt::format(
        "all {} places of the job are taken, and --spares {} keeps no more launchers waiting",
        job_spec_.max_nodes, *spares_)};
  }
  const NodeId id = ++last_id_;
  by_launcher_[join.launcher] = id;
  if (join.node_rank >= 0) by_node_rank_[join.node_rank] = id;
  ++counts_[static_cast<size_t>(State::Placed)];
  hosts_.emplace(id, Host{.join = join});
  return Welcome{.id = id,
                 .coordinator = own_launcher_,
                 .attempt = attempt_,
                 .hosts = static_cast<uint32_t>(seated_.size())};
}

void Coordinator::receive(NodeId from, const Message& message, Time now) {
  // A member's report of a failure may arrive after the member was lost.
  if (!hosts_.contains(from) && !std::holds_alternative<Failed>(message)) return;
  std::visit([&](const auto& one) { on(from, one, now); }, message);
}

void Coordinator::on(NodeId from, const Ready& ready, Time now) {
  Host& host = hosts_.at(from);
  const bool ran = has_seat(from) && ready.attempt == attempt_;
  if (has_seat(from) && !ran) return;
  set_state(host, State::Ready);
  host.store_port = ready.store_port;
  const bool over = phase_ == Phase::Gathering || phase_ == Phase::Ended;
  if (ran && ready.failure && !over) {
    // This report says more than the earlier one that a rank had failed.
    std::erase_if(failures_, [&](const Event& event) { return event.host == from; });
    note(from, *ready.failure, now);
  }
  if (phase_ == Phase::Gathering) return consider_start(now);
  if (phase_ == Phase::Stopping) return settle(now);
  if (phase_ != Phase::Running) return;
  if (ran) {
    std::string what = host.join.host + " has stopped by itself";
    if (!ready.failure) note(from, Failure{.what = what}, now);
    stop(ready.failure ? ready.failure->what : what, now);
    settle(now);
  } else if (was_notified_) {  // they save and end, and are not to be stopped and started again
    remarks_.on_notified(host.join);
    broadcasts_.push_back(Wait{words_for_the_notified()});
  } else if (seated_.size() < static_cast<size_t>(job_spec_.max_nodes) && in(State::Done) == 0) {
    stop(host.join.host + " joins", now);
  } else {
    remarks_.on_spare(host.join, seated_.size());
    broadcasts_.push_back(Wait{words_for_a_spare(seated_.size())});
  }
}

void Coordinator::on(NodeId from, const Failed& failed, Time now) {
  if (!has_seat(from) || failed.attempt != attempt_) return;
  if (failed.failure.is_kill()) return kill(failed.failure.what, now);
  // No rank runs any more, and none is to run again.
  if (phase_ == Phase::Gathering && failed.failure.is_final()) {
    return end(failed.failure.status, failed.failure.what);
  }
  stop_after(from, failed.failure, now);
}

void Coordinator::stop_after(NodeId host, const Failure& failure, Time now) {
  if (phase_ == Phase::Running && failure.is_notice()) {
    was_notified_ = true;
    return;
  }
  if (phase_ == Phase::Running || phase_ == Phase::Stopping) note(host, failure, now);
  if (phase_ == Phase::Running) stop(failure.what, now);
}

void Coordinator::on(NodeId from, const Remark& remark, Time) {
  broadcasts_.push_back(Remark{from, remark.text});
}

void Coordinator::on(NodeId from, const Done& done, Time now) {
  Host& host = hosts_.at(from);
  if (done.attempt != attempt_ || phase_ != Phase::Running || host.state != State::Running) return;
  set_state(host, State::Done);
  if (in(State::Done) == 1) late_at_ = now + timing_.late;
  if (in(State::Running) == 0) end(0, "");
}

void Coordinator::interrupt(const Failure& failure, Time now) {
  if (failure.is_kill()) return kill(failure.what, now);
  if (phase_ == Phase::Gathering) return end(failure.status, failure.what);
  stop_after(0, failure, now);
}

void Coordinator::lost(NodeId id, bool silent, Time now) {
  const auto found = hosts_.find(id);
  if (found == hosts_.end()) return;
  const Host host = hosts_.extract(found).mapped();
  --counts_[static_cast<size_t>(host.state)];
  by_launcher_.erase(host.join.launcher);
  if (host.join.node_rank >= 0) by_node_rank_.erase(host.join.node_rank);
  if (host.state == State::Running) {
    // A silent member has had no answer for as long, and has stopped its ranks by now.
    fences_[host.join.launcher] = now + timing_.stop + (silent ? Time(0) : timing_.lease);
    const std::string how =
        silent ? fmt::format("no sign of life for {:g} s (--rdzv-conf heartbeat_timeout)",
                             seconds(timing_.lease))
               : "its launcher has ended, or was cut off";
    const Failure failure{
        .kind = Failure::Kind::Lost,
        .what = fmt::format("{} ({}) was lost: {}", host.join.host, host.join.address, how)};
    stop_after(id, failure, now);
  }
  if (phase_ == Phase::Stopping) settle(now);
  if (phase_ == Phase::Gathering) consider_start(now);
}

void Coordinator::note(NodeId host, const Failure& failure, Time now) {
  failures_.push_back({now - failure.ago, host, failure});
}

void Coordinator::stop(const std::string& why, Time now) {
  const auto is_signal = [](const Event& event) {
    return event.failure.kind == Failure::Kind::Signalled;
  };
  const auto signal = std::find_if(failures_.begin(), failures_.end(), is_signal);
  const bool signalled = signal != failures_.end();
  phase_ = Phase::Stopping;
  if (!signalled) done_before_ = words_for_the_done();
  stop_until_ = now + timing_.lease + (signalled ? timing_.stop_after_signal : timing_.stop);
  broadcasts_.push_back(
      Stop{attempt_, signalled ? signal->failure.signal() : 0, why + done_before_});
  why_ = why;
}

// The job ends as it would have ended, only sooner.
void Coordinator::kill(const std::string& why, Time now) {
  if (phase_ != Phase::Stopping) return;
  stop_until_ = std::min(stop_until_, now + timing_.lease + timing_.stop_at_once);
  broadcasts_.push_back(Stop{attempt_, SIGKILL, why});
}

void Coordinator::settle(Time now) {
  if (phase_ != Phase::Stopping || in(State::Running) + in(State::Done) > 0) return;
  if (failures_.empty()) return gather(now);
  const Event& event = cause();
  const Failure& first = event.failure;
  if (first.is_final()) return end(first.status, first.what);
  const bool from_outside = first.kind == Failure::Kind::Lost || first.status == kSigkill;
  const auto decision = restarts_.after(Restarts::Fault{first.rank, first.status, from_outside},
                                        event.time - started_);
  const std::string text = fmt::format("{}{}{}{}", first.what, done_before_,
                                       decision.text.empty() ? "" : "; ", decision.text);
  if (!decision.pause) return end(first.status, text);
  why_ = text;
  not_before_ = now + *decision.pause;
  gather(now);
}

// The earliest one; but a rank that was killed, or a host that was lost, comes before another's
// exit, which may well be a consequence.
const Coordinator::Event& Coordinator::cause() const {
  Time earliest = failures_.front().time;
  for (const Event& event : failures_) earliest = std::min(earliest, event.time);
  const auto order = [earliest](const Event& event) {
    const bool echo = event.failure.kind == Failure::Kind::Exited || event.time > earliest + kEcho;
    return std::make_tuple(!event.failure.is_final(), echo, event.time);
  };
  return *std::min_element(failures_.begin(), failures_.end(),
                           [&](const Event& a, const Event& b) { return order(a) < order(b); });
}

void Coordinator::gather(Time now) {
  phase_ = Phase::Gathering;
  gathering_since_ = now;
  remarks_.on_gathering(now);
  enough_since_.reset();
  consider_start(now);
}

Time Coordinator::fenced_until() const {
  Time until = std::max(not_before_, predecessors_.fenced_until());
  for (const auto& [launcher, time] : fences_) until = std::max(until, time);
  return until;
}

void Coordinator::consider_start(Time now) {
  const size_t ready = in(State::Ready);
  if (ready < static_cast<size_t>(job_spec_.min_nodes)) {
    enough_since_.reset();
    return;
  }
  if (!enough_since_) enough_since_ = now;
  if (now < fenced_until()) return;
  // All hosts of the last attempt are back, and all others that connected have joined: no host is
  // missing.
  const bool complete = !seated_.empty() && ready >= seated_.size() && ready == hosts_.size();
  if (ready >= static_cast<size_t>(job_spec_.max_nodes) || complete ||
      now >= *enough_since_ + timing_.last_call) {
    start(now);
  }
}

void Coordinator::start(Time now) {
  late_at_.reset();
  was_notified_ = false;
  done_before_.clear();
  std::vector<Candidate> candidates;
  for (const auto& [id, host] : hosts_) {
    if (host.state != State::Ready) continue;
    candidates.push_back({id, host.join.launcher, host.join.host, host.join.node_rank});
  }
  Start message{.attempt = ++attempt_, .why = std::exchange(why_, "")};
  const auto before = std::exchange(had_seat_, {});
  seated_.clear();
  for (const NodeId id : seating_.seat(std::move(candidates), job_spec_.max_nodes)) {
    Host& host = hosts_.at(id);
    set_state(host, State::Running);
    message.hosts.push_back({id, host.join.ranks});
    seated_.insert(id);
    had_seat_[host.join.launcher] = host.join.host;
  }
  message.why += successors(before, had_seat_);
  const Host& first = hosts_.at(message.hosts.front().id);
  message.master_addr = first.join.address;
  message.master_port = first.store_port;
  failures_.clear();
  fences_.clear();
  predecessors_.clear();
  started_ = now;
  phase_ = Phase::Running;
  broadcasts_.push_back(std::move(message));
}

void Coordinator::end(int status, const std::string& why) {
  phase_ = Phase::Ended;
  broadcasts_.push_back(End{status, why});
}

void Coordinator::tick(Time now) {
  if (phase_ == Phase::Running && late_at_ && now >= *late_at_) {
    late_at_.reset();
    remarks_.on_late(seated_.size(), hosts_in(State::Running), timing_);
  }
  if (phase_ == Phase::Gathering) {
    consider_start(now);
    const bool few = in(State::Ready) < static_cast<size_t>(job_spec_.min_nodes);
    if (phase_ == Phase::Gathering && few && now >= gathering_since_ + timing_.join) {
      end(1,
          fmt::format("{} of {} hosts came within {:g} s ({}): were the others started, with "
                      "the same --rdzv-endpoint? (--rdzv-conf join_timeout=SECONDS){}{}{}; do they "
                      "reach {} (a firewall, another address of this host: --local-addr)?",
                      in(State::Ready), job_spec_.min_nodes, seconds(timing_.join), who_is_here(),
                      remarks_.last_refusal(), why_.empty() ? "" : "; earlier: ", why_, where_));
    }
    remark_on_waiting(now);
  } else if (phase_ == Phase::Stopping && now >= stop_until_) {
    const std::vector<std::string> late = hosts_in(State::Running);
    end(failures_.empty() ? 1 : cause().failure.status,
        fmt::format("{}; then the ranks on {} did not end in time",
                    failures_.empty() ? why_ : cause().failure.what, fmt::join(late, ", ")));
  }
}

std::optional<Time> Coordinator::deadline(Time now) const {
  if (phase_ == Phase::Stopping) return stop_until_;
  if (phase_ == Phase::Running) return late_at_;
  if (phase_ != Phase::Gathering) return std::nullopt;
  Time next = enough_since_ ? *enough_since_ + timing_.last_call : gathering_since_ + timing_.join;
  next = std::min(next, remarks_.due());
  return enough_since_ && fenced_until() > now ? fenced_until() : next;
}

}  // namespace lockstep::launch
