// A launcher as a member of its job: it finds the coordinator (or is it), runs its ranks when
// ordered to, and stops them when it has lost the connection to the coordinator. Pure, as the
// coordinator: events and the time go in, actions come out.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launch/rendezvous/coordinator/coordinator.h"

namespace lockstep::launch {

using ConnectionId = int;  // a connection, by a number that is never used twice

// The actions that a node asks for. Dial is answered by connected() or closed(); Launch by
// ranks_over(), perhaps after rank_failed(); after Hang nothing more comes from that link. Leave,
// or MeetAgain, is the last one.
struct Dial {
  ConnectionId link;
  std::string address;
};
struct Send {
  ConnectionId link;
  MessagePtr message;
};
struct Hang {
  ConnectionId link;
};
struct Launch {
  uint64_t coordinator = 0;  // its launcher's number: with the attempt it is one of its kind
  uint32_t attempt = 0;
  int first_rank = 0;
  int world_size = 0;
  int node_rank = -1;
  int nodes = 0;
  std::string master_addr;
  uint16_t master_port = 0;
};
struct Halt {
  std::string why;
  int signal;  // to be handed on to the ranks; 0 after a failure
};
struct Say {
  std::string text;
};
struct Leave {
  int status;
  std::string why;
};
struct MeetAgain {};  // the coordinator's port on this host is free again
using Action = std::variant<Dial, Send, Hang, Launch, Halt, Say, Leave, MeetAgain>;

struct NodeOptions {
  Join self;
  Timing timing;
  std::string coordinator;  // its address
  bool is_coordinator = false;
  bool port_is_held = false;                 // see Meeting
  std::optional<int> spares = std::nullopt;  // see Rendezvous
  uint16_t store_port = 0;                   // see Ready
};

class Node {
 public:
  Node(const NodeOptions& options, Time now);

  // A launcher that knows the token has connected. Only the coordinator listens.
  ConnectionId accept(Time now);
  void connected(ConnectionId link, Time now);
  // The peer closed it, or it could not be opened. `refused`: there is no listener at the address.
  void closed(ConnectionId link, bool refused, Time now);
  void receive(ConnectionId link, const MessagePtr& message, Time now);
  // Why the coordinator could not be joined so far; printed once, and again when time has run out.
  void obstructed(const std::string& why);

  // The coordinator's name has been looked up, which may have taken longer than an answer may.
  void resolved(ConnectionId link, Time now);
  // Which addresses of the coordinator's were dialled, and what came of each; for what is printed.
  void missed(std::string addresses) { missed_ = std::move(addresses); }

  // A connection to this coordinator was refused, for its user.
  void refused(const std::string& text);

  // For the users of all other hosts.
  void remark(const std::string& text, Time now);
  void rank_failed(const Failure& failure, Time now);
  // No rank of this host is left; with a failure, or every rank has exited with 0, or none of that
  // because of Halt. `store_port` is for the next attempt.
  void ranks_over(const std::optional<Failure>& failure, uint16_t store_port, Time now);
  // The launcher was asked to end; its ranks, if any, are stopped by the caller. Once more with
  // 128 + SIGKILL: all ranks are to be killed. A notice of preemption ends nothing while ranks run.
  void interrupt(const Failure& failure, Time now);

  void tick(Time now);
  // When tick() is to be called at the latest.
  Time deadline(Time now) const;
  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }

  // It starts no ranks any more.
  bool is_leaving() const {
    return phase_ == Phase::Ending || phase_ == Phase::Over || ends_with_ranks_;
  }
  bool is_over() const { return phase_ == Phase::Over; }
  bool has_ranks() const { return ranks_; }
  bool has_done() const { return done_; }
  uint32_t attempt() const { return attempt_; }
  const Coordinator* coordinator() const { return coordinator_ ? &*coordinator_ : nullptr; }

 private:
  enum class Phase {
    Dialling,  // the coordinator
    Asking,    // it for a place
    Member,
    Pausing,  // before dialling again
    Ending,   // until no rank runs here and no launcher is connected
    Over,
  };
  struct Caller {   // of the coordinator
    NodeId id = 0;  // 0: no member
    Time heard{};
  };

  void send(ConnectionId link, Message message);
  void report(const Message& message, Time now);
  void broadcast(Time now);
  void follow(const Message& message, Time now);
  void from_caller(ConnectionId link, const Message& message, Time now);
  void answered(const Message& message, Time now);
  void joined(Time now);
  void orphaned(const std::string& why, Time now);
  void retry(Time now);
  void look_for_coordinator(Time patience, Time now);
  void dial(Time now);
  void hang_up(ConnectionId link);
  void disconnect();
  void drop(ConnectionId caller, bool silent, Time now);
  void end(int status, const std::string& why, Time now);
  void leave_if_alone();
  bool lease_is_over(Time now) const;
  void report_ready(Time now);
  void expect_a_start(Time now);
  void say_what_is_awaited(Time now);
  std::string who_holds_the_port() const;
  bool is_root() const { return coordinator_.has_value(); }

  const NodeOptions options_;
  std::optional<Coordinator> coordinator_;
  Phase phase_ = Phase::Dialling;
  std::vector<Action> actions_;
  ConnectionId last_link_ = 0;
  std::optional<ConnectionId> link_;  // to the coordinator
  std::map<ConnectionId, Caller> callers_;
  NodeId id_ = 0;
  uint64_t coordinator_launcher_ = 0;
  Past past_;  // of the last order to start

  bool ranks_ = false;    // some run here
  bool halted_ = false;   // and were told to stop
  bool done_ = false;     // the attempt's have all exited with 0
  bool seated_ = false;   // it has ranks in that attempt, or had some
  uint32_t attempt_ = 0;  // of them
  uint16_t store_port_ = 0;
  std::optional<Failure> failure_;  // of that attempt, here
  Time failed_at_{};
  std::optional<Failure> interrupted_;  // this launcher was asked to end
  // Why it ends as soon as its ranks have: until then it reports them to a coordinator that has
  // replaced the old one.
  std::optional<std::string> ends_with_ranks_;
  bool asked_with_ranks_ = false;  // at the last try

  uint64_t pings_ = 0;
  bool held_ = false;  // the lease has been extended since we joined
  std::map<uint64_t, Time> unanswered_;
  Time lease_from_{}, next_ping_{}, dialling_until_{}, patience_{}, next_dial_{}, pause_{},
      dialled_{};
  std::string waiting_for_;  // printed already
  std::string missed_;
  // When to print that the coordinator has not been reached, or that no attempt has begun; empty
  // once that was printed.
  std::optional<Time> quiet_until_;
  bool nobody_listens_ = false;  // at the coordinator's address, at the last try
  Time end_by_{};
  int status_ = 0;
  std::string why_;
};

}  // namespace lockstep::launch
