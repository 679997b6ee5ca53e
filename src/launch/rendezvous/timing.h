// How long launchers wait for each other. The names are torchrun's where it has one (--rdzv-conf).
#pragma once

#include "launch/rendezvous/network/message.h"

namespace lockstep::launch {

struct Timing {
  Time join = std::chrono::seconds(600);      // until enough hosts have come (join_timeout)
  Time last_call = std::chrono::seconds(30);  // for more of them, once they are enough
  Time interval = std::chrono::seconds(1);    // between two heartbeats (keep_alive_interval)
  Time lease = std::chrono::seconds(5);       // without one a host is lost (heartbeat_timeout)
  Time rejoin = std::chrono::seconds(30);     // for a host that has lost its job to find it again
  // From the beginning of a coordinator to the first start. Launchers whose coordinator was killed,
  // and that have ranks left, report them to the new one; they try each `survivor_interval`.
  Time survivors = std::chrono::milliseconds(150);
  Time survivor_interval = std::chrono::milliseconds(50);
  // From the end of a host's ranks until the hosts whose ranks still run are named.
  Time late = std::chrono::seconds(30);
  // From the order to stop until every rank has surely ended: after a failure, and after a signal,
  // when programs may save.
  Time stop = std::chrono::seconds(5);
  Time stop_after_signal = std::chrono::seconds(14);
  // The same from the order to kill them.
  Time stop_at_once = std::chrono::seconds(3);
};

}  // namespace lockstep::launch
