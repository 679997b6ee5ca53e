// The coordinator's address, and whether this launcher is the coordinator.
#pragma once

#include <string>

#include "core/network/address.h"
#include "launch/job/session.h"
#include "launch/rendezvous/rendezvous.h"

namespace lockstep::launch {

struct Meeting {
  std::string coordinator;  // "host1:29400"
  bool is_coordinator = false;
  Address own;  // where the others reach this host
  Fd socket;    // the coordinator's listens there; the others have none
  // This host has the coordinator's address, and a program listens there: another launcher, or one
  // that is none.
  bool port_is_held = false;
  std::optional<int> signal = std::nullopt;  // came first; nothing else is set then
};

// The coordinator's endpoint. Throws ConfigError when none is given, or none that another host
// could resolve.
Endpoint meeting_place(const Rendezvous& rendezvous);

// Finds out whether this launcher is the coordinator, and listens if it is. Waits for the
// endpoint's name to be known, such as a Kubernetes pod's is only after a while, for a route to it,
// and for an own address that is new: no longer than the join timeout. Throws ConfigError when it
// cannot be.
Meeting prepare_meeting(const Rendezvous& rendezvous, Session& session);

}  // namespace lockstep::launch
