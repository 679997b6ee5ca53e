// Decides a job's membership: which hosts belong to it, which attempt runs, when it starts, stops
// and ends. Pure: events and the time go in, messages come out; no socket, no clock. Its states are
// drawn in docs/launching_protocol.md.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launch/diagnosis/remarks.h"
#include "launch/job/restarts.h"
#include "launch/rendezvous/coordinator/predecessors.h"
#include "launch/rendezvous/coordinator/rank_assignment.h"
#include "launch/rendezvous/network/message.h"
#include "launch/rendezvous/timing.h"

namespace lockstep::launch {

class Coordinator {
 public:
  enum class Phase {
    Gathering,  // no rank runs anywhere; hosts come, and the next attempt starts when they are
                // enough
    Running,
    Stopping,  // until no rank of the attempt can be alive
    Ended,
  };

  // `where`: its launcher listens, for its user.
  Coordinator(const JobSpec& job_spec, const Timing& timing, std::string where, Time now);

  // A launcher asks to become a member: Welcome, Wait or Refuse. The first one is the coordinator's
  // own.
  Message place(const Join& join, Time now);
  // Ready, Failed, Done, Remark; others are ignored, as is what comes from an attempt that is over.
  void receive(NodeId from, const Message& message, Time now);
  // The way to a member. `silent`: its lease has run out; otherwise its connection was closed.
  void lost(NodeId id, bool silent, Time now);
  // Its own launcher was asked to end.
  void interrupt(const Failure& failure, Time now);
  // To be called at deadline(), or any time.
  void tick(Time now);
  std::optional<Time> deadline(Time now) const;

  // How many hosts beyond the places of the job may wait; any number when empty.
  void limit_spares(std::optional<int> most) { spares_ = most; }
  // A connection that was refused before it could ask for a place, for the user.
  void note_refusal(const std::string& text) { remarks_.note_refusal(text); }
  // Lines for the coordinator's user: what it waits for, which hosts it has refused, which are
  // spares.
  std::vector<std::string> take_remarks() { return remarks_.take(); }
  // Start, Stop, End, Remark, Wait (for those without ranks): for every member, in this order.
  std::vector<Message> take_broadcasts() { return std::exchange(broadcasts_, {}); }

  Phase phase() const { return phase_; }
  // The number of the last one that was started, by this coordinator or by one before it.
  uint32_t attempt() const { return attempt_; }

 private:
  enum class State { Placed, Ready, Running, Done };
  struct Event {
    Time time{};
    NodeId host = 0;
    Failure failure;
  };
  struct Host {
    Join join;
    State state = State::Placed;
    uint16_t store_port = 0;
  };

  void on(NodeId from, const Ready& ready, Time now);
  void on(NodeId from, const Failed& failed, Time now);
  void on(NodeId from, const Done& done, Time now);
  void on(NodeId from, const Remark& remark, Time now);
  template <class Other>
  void on(NodeId, const Other&, Time) {}

  void set_state(Host& host, State state);
  size_t in(State state) const { return counts_[static_cast<size_t>(state)]; }
  // A failure of that host, 0: of no host, or its launcher's notice.
  void stop_after(NodeId host, const Failure& failure, Time now);
  // No rank of the attempt is wanted any more.
  void stop(const std::string& why, Time now);
  void kill(const std::string& why, Time now);
  // Records a failure of that host; 0: of no host.
  void note(NodeId host, const Failure& failure, Time now);
  // The failure that the others follow from. There has to be one.
  const Event& cause() const;
  // When no remaining host has a rank: starts the next attempt, or ends the job.
  void settle(Time now);
  void gather(Time now);
  void consider_start(Time now);
  void start(Time now);
  void end(int status, const std::string& why);

  bool has_seat(NodeId id) const { return seated_.contains(id); }
  Time fenced_until() const;
  std::string who_is_here() const;
  std::string words_for_the_done() const;
  Message answer(const Join& join, Time now);
  void remark_on_waiting(Time now);
  std::vector<std::string> hosts_in(State state) const;

  const JobSpec job_spec_;
  const Timing timing_;
  const std::string where_;
  Phase phase_ = Phase::Gathering;
  uint32_t attempt_ = 0;
  NodeId last_id_ = 0;
  uint64_t own_launcher_ = 0;
  std::map<NodeId, Host> hosts_;
  std::array<size_t, 4> counts_{};  // of hosts in each state
  std::map<uint64_t, NodeId> by_launcher_;
  std::map<int, NodeId> by_node_rank_;
  RankAssignment seating_;
  Restarts restarts_;

  std::set<NodeId> seated_;      // in the attempt that runs, or ran last; none: nothing was started
  std::vector<Event> failures_;  // of this attempt
  // Launchers that were lost with ranks, and when these must have ended, wherever they are.
  std::map<uint64_t, Time> fences_;
  Predecessors predecessors_;
  Time started_{}, gathering_since_{}, not_before_{}, stop_until_{};
  std::optional<Time> enough_since_;  // hosts are ready
  std::optional<Time> late_at_;       // when hosts whose ranks still run are named
  bool was_notified_ = false;         // the ranks of the attempt, of a preemption
  std::string done_before_;           // the hosts that were done when it was stopped, for users
  std::string why_;                   // for the next start
  std::optional<int> spares_;
  std::map<uint64_t, std::string> had_seat_;  // in the last attempt: launchers and their hosts
  Remarks remarks_;
  std::vector<Message> broadcasts_;
};

}  // namespace lockstep::launch
