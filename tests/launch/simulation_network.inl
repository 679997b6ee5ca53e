// The simulation's insides: the network, and what is planted in it. See simulation.h.
#pragma once

#include <algorithm>

#include "launch/simulation.h"

namespace lockstep::launch::testing {

inline void Simulation::at(Time time, std::function<void()> what) {
  events_.push({time, ++numbers_, std::move(what)});
}

inline bool Simulation::blocked(int a, int b) const {
  for (const auto& [apart, until] : cuts_) {
    if (now < until && apart.contains(a) != apart.contains(b)) return true;
  }
  return false;
}

inline void Simulation::perform(int index, const Dial& dial) {
  note(fmt::format("host{} dials {}", index, dial.address));
  const int target = std::stoi(dial.address);
  auto connection = std::make_shared<Connection>();
  connection->sides[0].host = index;
  connection->sides[0].link = dial.link;
  connection->sides[1].host = target;
  links_[{index, dial.link}] = {connection, 0};
  at(now + random(scenario_.delay), [=, this] { knock(connection, target); });
}

inline void Simulation::knock(const std::shared_ptr<Connection>& connection, int target) {
  const int from = connection->sides[0].host;
  if (!connection->sides[0].open) return;
  Host& host = hosts_[target];
  if (blocked(from, target) || !host.powered || now < host.frozen_until) {
    at(now + ms(200), [=, this] { knock(connection, target); });
    return;
  }
  if (!host.node || host.node->is_over()) {
    connection->sides[0].closing = connection->sides[0].refused = true;
    connection->sides[1].open = false;
    return schedule(connection, 0);
  }
  connection->sides[1].link = host.node->accept(now);
  connection->established = true;
  links_[{target, connection->sides[1].link}] = {connection, 1};
  const ConnectionId link = connection->sides[0].link;
  const uint64_t attempt = hosts_[from].attempt;
  connection->sides[0].last = now + random(scenario_.delay);
  at(connection->sides[0].last, [=, this] {
    if (!connection->sides[0].open) return;
    on_node(from, attempt, [=, this](Node& node) { node.connected(link, now); });
  });
}

// Whether the message is lost; it may also have been changed.
inline bool Simulation::tampered(int to, MessagePtr& message) const {
  const auto is = [&message]<class Kind>(Kind*) { return std::holds_alternative<Kind>(*message); };
  switch (scenario_.planted) {
    case Planted::WrongSeats:
      if (const auto* start = std::get_if<Start>(message.get()); start && to == 1) {
        Start other = *start;
        std::rotate(other.hosts.begin(), other.hosts.begin() + 1, other.hosts.end());
        message = std::make_shared<const Message>(other);
      }
      return false;
    case Planted::LostStop:
      return to == 1 && is(static_cast<Stop*>(nullptr));
    case Planted::LostEnd:
      return to == 1 && is(static_cast<launch::End*>(nullptr));
    default:
      return false;
  }
}

inline void Simulation::perform(int index, const Send& send) {
  const auto found = links_.find({index, send.link});
  if (found == links_.end()) return;
  const auto [connection, side] = found->second;
  Side& other = connection->sides[1 - side];
  if (!connection->established || !other.open) return;
  MessagePtr message = send.message;
  if (tampered(other.host, message)) return;
  other.to_here.push_back(message);
  schedule(connection, 1 - side);
}

inline void Simulation::perform(int index, const Hang& hang) {
  const auto found = links_.find({index, hang.link});
  if (found == links_.end()) return;
  const auto [connection, side] = found->second;
  links_.erase(found);
  connection->sides[side].open = false;
  if (!connection->established) return;
  connection->sides[1 - side].closing = true;
  schedule(connection, 1 - side);
}

inline void Simulation::schedule(const std::shared_ptr<Connection>& connection, int side) {
  Side& here = connection->sides[side];
  here.last = std::max(here.last, now + random(scenario_.delay));  // in order, as TCP has it
  at(here.last, [=, this] { deliver(connection, side); });
}

inline void Simulation::deliver(const std::shared_ptr<Connection>& connection, int side) {
  Side& here = connection->sides[side];
  const int from = connection->sides[1 - side].host;
  if (!here.open) return;
  if (blocked(from, here.host) || now < hosts_[here.host].frozen_until) {
    at(now + ms(50), [=, this] { deliver(connection, side); });
    return;
  }
  const uint64_t attempt = hosts_[here.host].attempt;
  const ConnectionId link = here.link;
  while (here.open && !here.to_here.empty()) {
    const MessagePtr message = here.to_here.front();
    here.to_here.pop_front();
    on_node(here.host, attempt, [=, this](Node& node) { node.receive(link, message, now); });
  }
  if (!here.open || !here.closing || !here.to_here.empty()) return;
  here.open = false;
  links_.erase({here.host, link});
  if (scenario_.planted == Planted::ForgottenLoss && here.host == 0) return;
  const bool refused = here.refused;
  on_node(here.host, attempt, [=, this](Node& node) { node.closed(link, refused, now); });
}

inline void Simulation::hang_all(int index, bool silently) {
  std::vector<ConnectionId> links;
  for (const auto& [key, connection] : links_) {
    if (key.first == index) links.push_back(key.second);
  }
  for (const ConnectionId link : links) {
    if (silently) {
      const auto [connection, side] = links_.at({index, link});
      connection->sides[side].open = false;
      links_.erase({index, link});
    } else {
      perform(index, Hang{link});
    }
  }
}

inline void Simulation::cut(const std::set<int>& apart, Time until) {
  note(fmt::format("cut of {} hosts until {:.3f}", apart.size(),
                   std::chrono::duration<double>(until).count()));
  cuts_.emplace_back(apart, until);
}

}  // namespace lockstep::launch::testing
