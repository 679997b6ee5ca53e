// The messages of the launchers of a job. docs/launching_protocol.md has diagrams of the protocol.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/core/preemption.h"

namespace lockstep::launch {

// Since any fixed moment of a clock that only goes forward.
using Time = std::chrono::nanoseconds;
inline double seconds(Time time) { return std::chrono::duration<double>(time).count(); }

// A launcher's number in its job, given by the coordinator, never used twice; 0 is none.
using NodeId = uint32_t;

// What must be the same for every launcher of a job.
struct JobSpec {
  int min_nodes = 1;
  int max_nodes = 1;
  int max_restarts = 0;
  // The bound by which a lost host's ranks have ended follows from these two.
  Time lease = std::chrono::seconds(5);      // heartbeat_timeout
  std::optional<Time> grace = std::nullopt;  // --grace
  // Of the program's name and its arguments; 0 where hosts may have different ones.
  uint64_t command_hash = 0;
  std::string command = {};  // the beginning of it, for people
  bool operator==(const JobSpec&) const = default;
};

// Why an attempt could not continue.
struct Failure {
  enum class Kind : uint8_t {
    Exited,     // a rank's own exit
    Killed,     // a rank's end by a signal
    Lost,       // a host, or the connection to it
    Signalled,  // a launcher was asked to end
    Unstarted,  // a rank could not be started at all
  };
  Kind kind = Kind::Exited;
  int rank = -1;     // of the world; none when negative
  int status = 1;    // for the launchers' exit
  std::string what;  // "rank 3 on host2 was killed by SIGKILL after 3.21 s (pid 4242)"
  Time ago{};        // since it happened, when this was written
  bool operator==(const Failure&) const = default;

  // Another start would end in the same way.
  bool is_final() const { return kind == Kind::Signalled || kind == Kind::Unstarted; }
  // No failure of its own: who has stopped the job does not wait for its ranks any longer.
  bool is_kill() const { return kind == Kind::Signalled && status == 128 + SIGKILL; }
  // A scheduler's notice of preemption: ranks that run go on, or end by themselves.
  bool is_notice() const { return kind == Kind::Signalled && status == kRequeueStatus; }
  // That the launcher got; 0 for others.
  int signal() const { return kind != Kind::Signalled ? 0 : is_notice() ? SIGUSR1 : status - 128; }
};

// The last attempt of which a launcher knows. A coordinator that has replaced another one learns
// from it which ranks may still be alive.
struct Past {
  uint64_t coordinator = 0;  // its launcher's number; 0: there was none
  uint32_t attempt = 0;
  uint32_t hosts = 0;      // with ranks in that attempt
  NodeId id = 0;           // this launcher's, if it was one of them; else 0
  bool has_ranks = false;  // ranks that are still being stopped: it asks for no place yet
  bool operator==(const Past&) const = default;
};

// From a launcher to the coordinator, over a connection of its own.
struct Join {
  uint64_t launcher = 0;  // a random number for this process
  std::string host;
  int node_rank = -1;  // as the user gave it; negative when the coordinator may choose
  int ranks = 1;
  std::string address;  // "10.0.0.2", where the other hosts reach this one
  JobSpec job_spec;
  Past past = {};
  bool operator==(const Join&) const = default;
};

// The coordinator's answers.
struct Welcome {  // a member from now on
  NodeId id = 0;
  uint64_t coordinator = 0;  // the number of the coordinator's launcher
  uint32_t attempt = 0;      // the last one that was started, by this coordinator or one before it
  uint32_t hosts = 0;        // of this coordinator's (see Past)
  bool operator==(const Welcome&) const = default;
};
struct Wait {  // ask again
  std::string reason;
  bool operator==(const Wait&) const = default;
};
struct Refuse {  // for good
  std::string reason;
  bool operator==(const Refuse&) const = default;
};

// From a member to the coordinator, and back. A ping that is answered extends the member's lease
// from the moment at which it was sent.
struct Ping {
  uint64_t number = 0;
  bool operator==(const Ping&) const = default;
};
struct Pong {
  uint64_t number = 0;
  bool operator==(const Pong&) const = default;
};

// From a member to the coordinator.
struct Ready {              // has no rank running
  uint32_t attempt = 0;     // the last one it ran; 0 before the first
  uint16_t store_port = 0;  // a socket listens there already, should it be given rank 0
  std::optional<Failure> failure = std::nullopt;  // of that attempt, here
  bool operator==(const Ready&) const = default;
};
struct Failed {  // at once; its ranks still have to be stopped
  uint32_t attempt = 0;
  Failure failure;
  bool operator==(const Failed&) const = default;
};
struct Done {  // every rank of this host has exited with 0
  uint32_t attempt = 0;
  bool operator==(const Done&) const = default;
};

// From a member to the coordinator, and from there to all.
struct Remark {   // for the users of the other hosts
  NodeId id = 0;  // the launcher that it comes from
  std::string text;
  bool operator==(const Remark&) const = default;
};

// From the coordinator to all.
struct HostRanks {
  NodeId id = 0;
  int ranks = 0;
  bool operator==(const HostRanks&) const = default;
};
struct Start {
  uint32_t attempt = 0;
  std::vector<HostRanks> hosts;  // in the order of their ranks; launchers that are not listed wait
  std::string master_addr;
  uint16_t master_port = 0;
  std::string why;  // what ended the attempt before
  bool operator==(const Start&) const = default;
};
struct Stop {
  uint32_t attempt = 0;
  // To be passed on to the ranks, which have time to save, but for SIGKILL; 0 after a failure.
  int signal = 0;
  std::string why;
  bool operator==(const Stop&) const = default;
};
struct End {
  int status = 0;
  std::string why;
  bool operator==(const End&) const = default;
};

using Message = std::variant<Join, Welcome, Wait, Refuse, Ping, Pong, Ready, Failed, Done, Remark,
                             Start, Stop, End>;

using MessagePtr = std::shared_ptr<const Message>;

}  // namespace lockstep::launch
