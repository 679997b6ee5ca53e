#include "rl/run/play_unit.h"

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/parallel/metrics.h"
#include "rl/run/policy.h"
#include "rl/run/record.h"

namespace lockstep::rl {
namespace {

// Throws where this rank plays for nothing.
class EndCheck {
 public:
  explicit EndCheck(const Players& players) : players_(players) {}

  void operator()() {
    if (players_.notice.received()) leave();
    if (std::chrono::steady_clock::now() >= next_look_) look();
  }
  // Looks in any case.
  void at_lane() {
    next_look_ = {};
    (*this)();
  }

 private:
  // Where another rank has failed, a call of the group throws at once, and says why. To look costs
  // a request over the network, which is seldom enough.
  void look() {
    next_look_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    if (players_.group.failure()) players_.group.barrier({.label = "outcomes"}).wait();
    if (players_.group.size() > 1 && is_left_by_others()) throw Preempted();
  }
  // The others may have minutes of episodes left.
  [[noreturn]] void leave() const {
    try {
      if (players_.group.size() > 1) players_.store.set(kNoticeKey, "");
    } catch (const CommError&) {  // they learn of it after the exchange
    }
    throw Preempted();
  }
  bool is_left_by_others() const {
    try {
      return players_.store.contains(kNoticeKey);
    } catch (const CommError&) {  // the group's next call says it better
      return false;
    }
  }

  const Players& players_;
  std::chrono::steady_clock::time_point next_look_ = {};
};

}  // namespace

void leave_where(bool is_so, const comm::Group& group) {
  if (parallel::any_rank(is_so, group)) throw Preempted();
}

Rollout play_unit(const Players& players, const RolloutPlan& plan, const Sampling& sampling,
                  RolloutLine& line) {
  std::string why;  // an environment died, the last time
  bool leaves = false;
  EndCheck check(players);
  players.learner.unshard();
  auto out = run_rollout(plan, players.group, [&](const std::vector<Planned>& episodes) {
    std::vector<Played> played;
    try {
      check.at_lane();
      played = roll_out(players.net, players.tokenizer, players.course.text, players.course.arenas,
                        episodes,
                        {.limits = limits_of(players.options),
                         .temperature = sampling.temperature,
                         .top_p = sampling.top_p,
                         .on_message = [&](const auto& lane) { line.show(lane); },
                         .check = [&] { check(); }});
    } catch (const Preempted&) {
      leaves = true;  // those that have played all are told after the exchange
      played.resize(episodes.size());
    }
    for (const auto& one : played) {
      if (one.end == End::EnvError) why = one.reward.note;
    }
    line.add(played);
    return played;
  });
  players.learner.reshard();
  try {
    leave_where(leaves, players.group);
  } catch (const Preempted&) {
    // Each of the ranks that have set it has come here.
    if (players.group.rank() == 0) players.store.erase(kNoticeKey);
    throw;
  }
  check_environments(out, why, players.group);
  return out;
}

}  // namespace lockstep::rl
