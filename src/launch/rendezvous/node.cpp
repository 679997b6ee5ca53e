#include "launch/rendezvous/node.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep::launch {
namespace {

constexpr Time kFirstPause = std::chrono::milliseconds(50);
constexpr Time kQuiet =
    std::chrono::milliseconds(1500);  // then people want to know what is awaited

}  // namespace

Node::Node(const NodeOptions& options, Time now)
    : options_(options), store_port_(options.store_port), pause_(kFirstPause) {
  if (!options.is_coordinator) {
    look_for_coordinator(options.timing.join, now);
    dial(now);
    return;
  }
  coordinator_.emplace(options.self.job_spec, options.timing, options.fanout, now);
  coordinator_->limit_spares(options.spares);
  answered(coordinator_->place(options.self, now), now);
}

void Node::send(ConnectionId link, Message message) {
  actions_.emplace_back(Send{link, std::make_shared<const Message>(std::move(message))});
}

void Node::hang_up(ConnectionId link) { actions_.emplace_back(Hang{link}); }

// Towards the coordinator.
void Node::up(const Message& message, Time now) {
  if (is_root()) {
    coordinator_->receive(message, now);
    broadcast(now);
  } else if (parent_ && phase_ != Phase::Attaching) {
    send(*parent_, message);
  }
}

void Node::broadcast(Time now) {
  for (Message& message : coordinator_->take_broadcasts()) {
    down(std::make_shared<const Message>(std::move(message)), now);
  }
  for (std::string& remark : coordinator_->take_remarks()) actions_.emplace_back(Say{remark});
}

void Node::down(const MessagePtr& message, Time now) {
  for (const auto& [link, child] : children_) {
    if (child.id != 0) actions_.emplace_back(Send{link, message});
  }
  follow(*message, now);
}

// What the coordinator says to all.
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
      done_ = true;
      return rank_failed(*interrupted_, now);
    }
    ranks_ = true;
    halted_ = false;
    actions_.emplace_back(std::move(launch));
  } else if (const auto* stop = std::get_if<Stop>(&message)) {
    if (ranks_ && !halted_) {
      halted_ = true;
      actions_.emplace_back(Halt{stop->why, stop->signal});
    } else if (done_) {
      report_ready(now);
    }
  } else if (const auto* end_of_job = std::get_if<End>(&message)) {
    end(end_of_job->status, end_of_job->why, now);
  } else if (const auto* wait = std::get_if<Wait>(&message)) {
    if (ranks_ || done_) return;
    quiet_until_.reset();
    obstructed(wait->reason);
  } else if (const auto* remark = std::get_if<Remark>(&message)) {
    if (remark->id != id_) actions_.emplace_back(Say{remark->text});
  } else if (const auto* forget = std::get_if<Forget>(&message)) {
    if (forget->id == id_) orphaned("the coordinator has given it up", now);
  }
}

ConnectionId Node::accept(Time now) {
  const ConnectionId link = ++last_link_;
  children_[link] = {0, now};
  return link;
}

void Node::connected(ConnectionId link, Time now) {
  if (link != parent_) return;
  dialled_ = now;
  if (phase_ == Phase::Dialling) {
    phase_ = Phase::Asking;
    Join join = options_.self;
    join.past = past_;
    join.past.has_ranks = asked_with_ranks_ = ranks_;
    send(link, std::move(join));
  } else if (phase_ == Phase::Attaching) {
    send(link, Attach{id_, parent_launcher_});
    attached(now);
  }
}

void Node::closed(ConnectionId link, bool refused, Time now) {
  if (children_.contains(link)) return drop_child(link, false, now);
  if (link != parent_) return;
  parent_.reset();
  if (phase_ == Phase::Member) return orphaned("its connection was closed", now);
  // It listens for as long as it lives.
  if (refused && attempt_ > 0 && phase_ == Phase::Dialling && !ranks_) {
    return end(
        1, fmt::format("the coordinator at {} has ended; before: {}", options_.coordinator, why_),
        now);
  }
  nobody_listens_ = refused;
  if (phase_ != Phase::Ending && phase_ != Phase::Over) retry(now);
}

void Node::receive(ConnectionId link, const MessagePtr& message, Time now) {
  if (phase_ == Phase::Over) return;
  if (children_.contains(link)) return from_child(link, message, now);
  if (link != parent_) return;
  if (phase_ == Phase::Asking) return answered(*message, now);
  if (phase_ != Phase::Member) return;
  // A word that comes too late may have been overtaken by others.
  if (lease_is_over(now)) return tick(now);
  if (const auto* pong = std::get_if<Pong>(message.get())) {
    const auto ping = unanswered_.find(pong->number);
    if (ping == unanswered_.end()) return;
    lease_from_ = ping->second;
    pause_ = kFirstPause;
    held_ = true;
    unanswered_.erase(unanswered_.begin(), std::next(ping));
  } else {
    down(message, now);
  }
}

void Node::from_child(ConnectionId link, const MessagePtr& message, Time now) {
  Child& child = children_.at(link);
  child.heard = now;
  if (const auto* ping = std::get_if<Ping>(message.get())) {
    // Somebody who has lost its own way to the coordinator must not keep others going.
    if (phase_ == Phase::Member) send(link, Pong{ping->number});
    return;
  }
  if (const auto* attach = std::get_if<Attach>(message.get())) {
    child.id = attach->id;
    const bool meant = attach->parent_launcher == options_.self.launcher;
    if (phase_ != Phase::Member || !meant) drop_child(link, false, now);
    return;
  }
  if (const auto* join = std::get_if<Join>(message.get())) {
    if (!is_root()) return send(link, Refuse{"this launcher is not the coordinator"});
    const Message answer = coordinator_->place(*join, now);
    if (const auto* place = std::get_if<Welcome>(&answer); place && place->parent.empty()) {
      child.id = place->id;
    }
    send(link, answer);
    return broadcast(now);  // which may end the job, and with it the child
  }
  if (child.id == 0) return drop_child(link, false, now);
  const bool upward =
      std::holds_alternative<Ready>(*message) || std::holds_alternative<Failed>(*message) ||
      std::holds_alternative<Done>(*message) || std::holds_alternative<Lost>(*message) ||
      std::holds_alternative<Remark>(*message);
  if (!upward) return drop_child(link, false, now);
  if (phase_ == Phase::Member || phase_ == Phase::Ending) up(*message, now);
}

void Node::obstructed(const std::string& why) {
  if (why != waiting_for_) actions_.emplace_back(Say{why});
  waiting_for_ = why;
}

void Node::answered(const Message& message, Time now) {
  if (asked_with_ranks_) {  // there was nothing to ask for
    hang_up(*std::exchange(parent_, std::nullopt));
    return retry(now);
  }
  if (const auto* place = std::get_if<Welcome>(&message)) {
    id_ = place->id;
    parent_launcher_ = place->parent_launcher;
    coordinator_launcher_ = place->coordinator;
    past_ = {.coordinator = place->coordinator, .attempt = place->attempt, .hosts = place->hosts};
    if (is_root() || place->parent.empty()) {
      phase_ = Phase::Member;
      return attached(now);
    }
    hang_up(*parent_);
    phase_ = Phase::Attaching;
    parent_ = ++last_link_;
    dialled_ = now;
    actions_.emplace_back(Dial{*parent_, place->parent});
  } else if (const auto* wait = std::get_if<Wait>(&message)) {
    obstructed("waiting: " + wait->reason);
    hang_up(*std::exchange(parent_, std::nullopt));
    retry(now);
  } else if (const auto* refuse = std::get_if<Refuse>(&message)) {
    end(2,
        fmt::format("the coordinator at {} refuses this host: {}", options_.coordinator,
                    refuse->reason),
        now);
  } else {
    hang_up(*std::exchange(parent_, std::nullopt));
    retry(now);
  }
}

void Node::attached(Time now) {
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
  up(Ready{id_, attempt_, store_port_, failure_}, now);
}

// The way to the coordinator is lost.
void Node::orphaned(const std::string& why, Time now) {
  if (parent_) hang_up(*std::exchange(parent_, std::nullopt));
  while (!children_.empty()) drop_child(children_.begin()->first, false, now);
  id_ = 0;
  const std::string what =
      "lost the way to the coordinator at " + options_.coordinator + ": " + why;
  const bool had_part = ranks_ || done_;
  // Also when a signal is stopping them: the lease leaves less time than that would.
  if (ranks_) actions_.emplace_back(Halt{what, 0});
  halted_ = halted_ || ranks_;
  if (interrupted_) return end(interrupted_->status, interrupted_->what, now);
  if (had_part && options_.self.job_spec.max_restarts == 0) {
    if (!ranks_) return end(1, what, now);
    ends_with_ranks_ = what;
  }
  actions_.emplace_back(Say{what});
  done_ = false;
  why_ = what;
  // Before the first answer nothing has changed.
  if (held_) look_for_coordinator(options_.timing.rejoin, now);
  retry(now);
}

void Node::drop_child(ConnectionId link, bool silent, Time now) {
  const NodeId id = children_.extract(link).mapped().id;
  hang_up(link);
  if (id != 0 && (phase_ == Phase::Member || phase_ == Phase::Ending)) up(Lost{id, silent}, now);
  if (phase_ == Phase::Ending) leave_if_alone();
}

void Node::remark(const std::string& text, Time now) {
  if (phase_ == Phase::Member) up(Remark{id_, text}, now);
}

void Node::rank_failed(const Failure& failure, Time now) {
  failure_ = failure;
  failed_at_ = now - failure.ago;
  if (phase_ == Phase::Member) up(Failed{id_, attempt_, failure}, now);
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
    if (parent_) hang_up(*std::exchange(parent_, std::nullopt));
    return end(1, *ends_with_ranks_, now);
  }
  pause_ = kFirstPause;
  if (phase_ != Phase::Member) return;
  if (failure_ || halted_) return report_ready(now);
  done_ = true;
  up(Done{id_, attempt_}, now);
}

}  // namespace lockstep::launch
