#include "launch/rendezvous/node/node.h"

#include <fmt/format.h>

#include <csignal>

namespace lockstep::launch {
namespace {

constexpr Time kFirstPause = std::chrono::milliseconds(50);

}  // namespace

Node::Node(const NodeOptions& options, Time now)
    : options_(options), store_port_(options.store_port), pause_(kFirstPause) {
  if (!options.is_coordinator) {
    look_for_coordinator(options.timing.join, now);
    dial(now);
    return;
  }
  coordinator_.emplace(options.self.job_spec, options.timing, options.coordinator, now);
  coordinator_->limit_spares(options.spares);
  answered(coordinator_->place(options.self, now), now);
}

void Node::send(ConnectionId link, Message message) {
  actions_.emplace_back(Send{link, std::make_shared<const Message>(std::move(message))});
}

void Node::hang_up(ConnectionId link) { actions_.emplace_back(Hang{link}); }

void Node::disconnect() {
  if (link_) hang_up(*std::exchange(link_, std::nullopt));
}

// To the coordinator.
void Node::report(const Message& message, Time now) {
  if (is_root()) {
    coordinator_->receive(id_, message, now);
    broadcast(now);
  } else if (link_) {
    send(*link_, message);
  }
}

void Node::broadcast(Time now) {
  for (Message& one : coordinator_->take_broadcasts()) {
    const auto message = std::make_shared<const Message>(std::move(one));
    for (const auto& [link, caller] : callers_) {
      if (caller.id != 0) actions_.emplace_back(Send{link, message});
    }
    follow(*message, now);
  }
  for (std::string& remark : coordinator_->take_remarks()) actions_.emplace_back(Say{remark});
}

// Broadcasts of the coordinator.
void Node::follow(const Message& message, Time now) {
  if (const auto* start = std::get_if<Start>(&message)) {
    attempt_ = start->attempt;
    done_ = false;
    failure_.reset();
    if (!start->why.empty()) actions_.emplace_back(Say{start->why});
    Launch launch{.coordinator = coordinator_launcher_,
                  .attempt = attempt_,
                  .nodes = static_cast<int>(start->hosts.size()),
                  .master_addr = start->master_addr,
                  .master_port = start->master_port};
    for (size_t i = 0; i < start->hosts.size(); ++i) {
      if (start->hosts[i].id == id_) {
        launch.node_rank = static_cast<int>(i);
        launch.first_rank = launch.world_size;
      }
      launch.world_size += start->hosts[i].ranks;
    }
    quiet_until_.reset();
    seated_ = launch.node_rank >= 0;
    past_ = {.coordinator = coordinator_launcher_,
             .attempt = attempt_,
             .hosts = static_cast<uint32_t>(start->hosts.size()),
             .id = seated_ ? id_ : 0};
    if (!seated_) return obstructed(words_for_a_spare(start->hosts.size()));
    waiting_for_.clear();
    if (interrupted_) {  // while the order to start was on its way
      failure_ = interrupted_;
      failed_at_ = now;
      return report_ready(now);
    }
    ranks_ = true;
    halted_ = false;
    actions_.emplace_back(std::move(launch));
  } else if (const auto* stop = std::get_if<Stop>(&message)) {
    if (ranks_ && (!halted_ || stop->signal == SIGKILL)) {
      halted_ = true;
      actions_.emplace_back(Halt{stop->why, stop->signal});
    } else if (done_) {
      report_ready(now);
    }
  } else if (const auto* end_of_job = std::get_if<End>(&message)) {
    // A spare, or a host that came after a notice of preemption.
    const bool is_outside = !seated_ && end_of_job->status == 0 && end_of_job->why.empty();
    end(end_of_job->status,
        is_outside ? "the job has ended; this launcher ran none of its last ranks"
                   : end_of_job->why,
        now);
  } else if (const auto* wait = std::get_if<Wait>(&message)) {
    if (ranks_ || done_) return;
    quiet_until_.reset();
    obstructed(wait->reason);
  } else if (const auto* remark = std::get_if<Remark>(&message)) {
    if (remark->id != id_) actions_.emplace_back(Say{remark->text});
  }
}

ConnectionId Node::accept(Time now) {
  const ConnectionId link = ++last_link_;
  callers_[link] = {0, now};
  return link;
}

void Node::resolved(ConnectionId link, Time now) {
  if (link == link_ && phase_ == Phase::Dialling) dialled_ = now;
}

void Node::connected(ConnectionId link, Time now) {
  if (link != link_ || phase_ != Phase::Dialling) return;
  dialled_ = now;
  phase_ = Phase::Asking;
  Join join = options_.self;
  join.past = past_;
  join.past.has_ranks = asked_with_ranks_ = ranks_;
  send(link, std::move(join));
}

void Node::closed(ConnectionId link, bool refused, Time now) {
  if (callers_.contains(link)) return drop(link, false, now);
  if (link != link_) return;
  link_.reset();
  if (phase_ == Phase::Member) return orphaned("its connection was closed", now);
  // It listens for as long as it lives.
  if (refused && attempt_ > 0 && phase_ == Phase::Dialling && !ranks_) {
    return end(
        1, fmt::format("the coordinator at {} has ended; earlier: {}", options_.coordinator, why_),
        now);
  }
  const bool may_lead = options_.port_is_held && past_.coordinator == 0 &&
                        now + std::chrono::seconds(1) < dialling_until_;
  if (refused && may_lead && phase_ == Phase::Dialling) {
    phase_ = Phase::Over;
    actions_.emplace_back(MeetAgain{});
    return;
  }
  nobody_listens_ = refused;
  if (phase_ != Phase::Ending && phase_ != Phase::Over) retry(now);
}

void Node::receive(ConnectionId link, const MessagePtr& message, Time now) {
  if (phase_ == Phase::Over) return;
  if (callers_.contains(link)) return from_caller(link, *message, now);
  if (link != link_) return;
  if (phase_ == Phase::Asking) return answered(*message, now);
  if (phase_ != Phase::Member) return;
  // A message that arrives after the lease may have been superseded.
  if (lease_is_over(now)) return tick(now);
  if (const auto* pong = std::get_if<Pong>(message.get())) {
    const auto ping = unanswered_.find(pong->number);
    if (ping == unanswered_.end()) return;
    lease_from_ = ping->second;
    pause_ = kFirstPause;
    held_ = true;
    unanswered_.erase(unanswered_.begin(), std::next(ping));
  } else {
    follow(*message, now);
  }
}

void Node::from_caller(ConnectionId link, const Message& message, Time now) {
  Caller& caller = callers_.at(link);
  caller.heard = now;
  if (const auto* ping = std::get_if<Ping>(&message)) {
    if (phase_ == Phase::Member) send(link, Pong{ping->number});
    return;
  }
  if (const auto* join = std::get_if<Join>(&message); join && caller.id == 0) {
    const Message answer = coordinator_->place(*join, now);
    if (const auto* place = std::get_if<Welcome>(&answer)) caller.id = place->id;
    send(link, answer);
    // It asks again, and must not keep this one from leaving.
    if (phase_ == Phase::Ending) return drop(link, false, now);
    return broadcast(now);  // which may end the job, and with it the caller
  }
  const bool is_report =
      std::holds_alternative<Ready>(message) || std::holds_alternative<Failed>(message) ||
      std::holds_alternative<Done>(message) || std::holds_alternative<Remark>(message);
  if (caller.id == 0 || !is_report) return drop(link, false, now);
  coordinator_->receive(caller.id, message, now);
  broadcast(now);
}

void Node::obstructed(const std::string& why) {
  if (why != waiting_for_) actions_.emplace_back(Say{why});
  waiting_for_ = why;
}

void Node::answered(const Message& message, Time now) {
  if (asked_with_ranks_) {  // there was nothing to ask for
    disconnect();
    return retry(now);
  }
  if (const auto* place = std::get_if<Welcome>(&message)) {
    id_ = place->id;
    coordinator_launcher_ = place->coordinator;
    past_ = {.coordinator = place->coordinator, .attempt = place->attempt, .hosts = place->hosts};
    joined(now);
  } else if (const auto* wait = std::get_if<Wait>(&message)) {
    obstructed("waiting: " + wait->reason);
    disconnect();
    retry(now);
  } else if (const auto* refuse = std::get_if<Refuse>(&message)) {
    end(2,
        fmt::format("the coordinator at {} refuses this host: {}", options_.coordinator,
                    refuse->reason),
        now);
  } else {
    disconnect();
    retry(now);
  }
}

void Node::joined(Time now) {
  phase_ = Phase::Member;
  unanswered_.clear();
  // The coordinator takes us for a member from now on at the earliest.
  lease_from_ = now;
  next_ping_ = now + options_.timing.interval;
  held_ = false;
  if (!is_root()) expect_a_start(now);
  report_ready(now);
}

void Node::report_ready(Time now) {
  done_ = false;
  if (failure_) failure_->ago = now - failed_at_;
  report(Ready{attempt_, store_port_, failure_}, now);
}

// The connection to the coordinator is lost.
void Node::orphaned(const std::string& why, Time now) {
  disconnect();
  id_ = 0;
  const std::string what =
      "lost the connection to the coordinator at " + options_.coordinator + ": " + why;
  const bool is_reported = ranks_ && !halted_;  // once they have ended
  // Also when a signal is stopping them: the lease leaves less time than that would.
  if (ranks_) actions_.emplace_back(Halt{what, 0});
  halted_ = halted_ || ranks_;
  if (interrupted_) return end(interrupted_->status, interrupted_->what, now);
  // Where hosts may join, ranks are also stopped for that, which uses up no restart.
  const JobSpec& job_spec = options_.self.job_spec;
  const bool may_start_again =
      !ranks_ && !done_ && !failure_ && job_spec.min_nodes < job_spec.max_nodes;
  if (seated_ && job_spec.max_restarts == 0 && !may_start_again) {
    if (!ranks_) return end(failure_ ? failure_->status : 1, what, now);
    ends_with_ranks_ = what;
  }
  if (!is_reported) actions_.emplace_back(Say{what});
  done_ = false;
  why_ = what;
  // Before the first answer nothing has changed.
  if (held_) look_for_coordinator(options_.timing.rejoin, now);
  retry(now);
}

void Node::drop(ConnectionId caller, bool silent, Time now) {
  const NodeId id = callers_.extract(caller).mapped().id;
  hang_up(caller);
  if (id != 0) {
    coordinator_->lost(id, silent, now);
    broadcast(now);
  }
  if (phase_ == Phase::Ending) leave_if_alone();
}

void Node::refused(const std::string& text) {
  actions_.emplace_back(Say{text});
  if (is_root()) coordinator_->note_refusal(text);
}

void Node::remark(const std::string& text, Time now) {
  if (phase_ == Phase::Member) report(Remark{.text = text}, now);
}

void Node::rank_failed(const Failure& failure, Time now) {
  failure_ = failure;
  failed_at_ = now - failure.ago;
  if (phase_ == Phase::Member) report(Failed{attempt_, failure}, now);
}

void Node::ranks_over(const std::optional<Failure>& failure, uint16_t store_port, Time now) {
  ranks_ = false;
  store_port_ = store_port;
  if (failure && !interrupted_) {
    failure_ = failure;
    failed_at_ = now - failure->ago;
  }
  if (phase_ == Phase::Ending) return leave_if_alone();
  if (ends_with_ranks_) {
    disconnect();
    return end(1, *ends_with_ranks_, now);
  }
  pause_ = kFirstPause;
  if (phase_ != Phase::Member) {
    // While it had ranks it could not be given a place, and --grace may be longer than the time to
    // find the coordinator again.
    if (held_) look_for_coordinator(options_.timing.rejoin, now);
    return;
  }
  if (failure_ || halted_) return report_ready(now);
  done_ = true;
  report(Done{attempt_}, now);
}

}  // namespace lockstep::launch
