// Launchers without processes, sockets or a clock: nodes on a network that delays, cuts and breaks
// as a seed says, with ranks that are nothing but the times at which they end. What must hold is
// checked all the time, and everything that happens is the seed's.
#pragma once

#include <fmt/format.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "launch/rendezvous/node/node.h"

namespace lockstep::launch::testing {

inline Time ms(int64_t count) { return std::chrono::milliseconds(count); }

// A fault in the launchers or between them that the checks must find.
enum class Planted {
  None,
  HastyCoordinator,  // it takes silent hosts for dead sooner than they do themselves
  EndlessLease,      // hosts go on whether they are answered or not
  EarlyReady,        // a host says that its ranks have ended when it has only told them to
  WrongSeats,        // one host reads another order of hosts
  ForgottenLoss,     // the coordinator does not see that it has lost a host
  LostStop,          // the order to stop is lost on the way to one host
  LostEnd,           // and the last word of the job
};

struct Scenario {
  int hosts = 4;
  JobSpec job_spec{4, 4, 0};
  Timing timing;
  Time work = ms(20'000);    // that an attempt takes when nothing happens
  Time arrival = ms(2'000);  // hosts come within
  Time delay = ms(20);       // a message takes at most
  double rank_failures = 0;  // chances that a host's rank fails in an attempt
  int crashes = 0, power_offs = 0, partitions = 0, freezes = 0, newcomers = 0, interrupts = 0;
  int notices = 0;                      // of preemption
  Time chaos_until = ms(60'000);        // faults come before
  bool coordinator_comes_back = false;  // a new one, when it has crashed
  Planted planted = Planted::None;
};

class Simulation {
 public:
  Simulation(const Scenario& scenario, uint64_t seed);

  // Until every launcher has ended, or `limit`. Returns what was violated; empty when all held.
  std::vector<std::string> run(Time limit);

  struct End {
    int status = -1;
    std::string why;
    Time at{};
  };
  // By host; launchers that were killed have none.
  std::map<int, End> ends;
  uint32_t attempts = 0;
  std::map<uint32_t, std::map<int, Launch>> launches;  // by attempt and host
  // Of the coordinators that come after the first, attempts count from 1000, 2000 and so on.
  static uint32_t number_of(const Launch& launch) {
    return launch.attempt + 1000 * (static_cast<uint32_t>(launch.coordinator) - 1);
  }
  std::vector<std::string> said;
  Time now{};
  bool trace = false;

  // For scripts.
  void at(Time time, std::function<void()> what);
  void crash(int host);
  void power_off(int host);
  void fail_rank(int host, Failure::Kind kind);
  void interrupt(int host);
  void interrupt_again(int host);
  void notify(int host);  // of a preemption
  void cut(const std::set<int>& hosts, Time until);
  void freeze(int host, Time until);
  void boot(int host);

 private:
  struct Host {
    std::string name;
    std::unique_ptr<Node> node;
    bool powered = true;
    Time frozen_until{};
    uint32_t ranks = 0;       // the attempt of which some are alive; 0: none
    uint32_t failed = 0;      // the attempt in which one of them failed
    uint32_t stopping = 0;    // the attempt whose ranks were told to stop
    Time stops{};             // when they do
    uint64_t generation = 0;  // of ranks, and of the launcher: late events are void
    uint64_t attempt = 0;
    Time thawed{};
    int boots = 0;
    uint64_t ticks = 0;
  };
  struct Side {
    int host = 0;
    ConnectionId link = 0;
    bool open = true;
    std::deque<MessagePtr> to_here;
    Time last{};
    bool closing = false, refused = false;  // after what is to_here
  };
  struct Connection {
    Side sides[2];
    bool established = false;
  };
  struct Event {
    Time time;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };

  int64_t random(int64_t below) {
    return below <= 0 ? 0 : static_cast<int64_t>(random_() % static_cast<uint64_t>(below));
  }
  Time random(Time below) { return Time(random(below.count())); }
  bool chance(double p) { return static_cast<double>(random_() % 1'000'000) < p * 1e6; }
  bool blocked(int a, int b) const;

  void act(int host);
  void perform(int host, const Dial& dial);
  void perform(int host, const Send& send);
  void perform(int host, const Hang& hang);
  void perform(int host, const Launch& launch);
  void perform(int host, const Halt& halt);
  void perform(int host, const Say& say);
  void note(const std::string& text);
  void perform(int host, const Leave& leave);
  void perform(int, const MeetAgain&) {}  // no port is held
  void knock(const std::shared_ptr<Connection>& connection, int target);
  void deliver(const std::shared_ptr<Connection>& connection, int side);
  void schedule(const std::shared_ptr<Connection>& connection, int side);
  // Runs `what` on the host's node: later while it is frozen, never when it has ended since.
  void on_node(int host, uint64_t attempt, std::function<void(Node&)> what);
  void end_ranks(int host, const std::optional<Failure>& failure, Time after);
  void hang_all(int host, bool silently);
  void violation(std::string text) {
    violations_.push_back(
        fmt::format("{:.3f} s: {}", std::chrono::duration<double>(now).count(), text));
  }
  void check_attempt(uint32_t attempt);
  bool tampered(int to, MessagePtr& message) const;

  const Scenario scenario_;
  std::mt19937_64 random_;
  std::priority_queue<Event> events_;
  uint64_t numbers_ = 0;
  std::vector<Host> hosts_;
  std::map<std::pair<int, ConnectionId>, std::pair<std::shared_ptr<Connection>, int>> links_;
  std::vector<std::pair<std::set<int>, Time>> cuts_;
  std::vector<std::string> violations_;
};

}  // namespace lockstep::launch::testing
