// The simulation's insides: hosts and their ranks, faults, and what must hold. See simulation.h.
#pragma once

#include <algorithm>

#include "launch/simulation.h"

namespace lockstep::launch::testing {

inline Simulation::Simulation(const Scenario& scenario, uint64_t seed)
    : scenario_(scenario), random_(seed) {
  hosts_.resize(static_cast<size_t>(scenario.hosts + scenario.newcomers));
  for (int i = 0; i < static_cast<int>(hosts_.size()); ++i) {
    hosts_[i].name = fmt::format("host{}", i);
    const bool late = i >= scenario.hosts;
    at(late ? random(scenario.chaos_until) : random(scenario.arrival), [this, i] { boot(i); });
  }
  const auto some_host = [this] {
    return static_cast<int>(random(static_cast<int64_t>(hosts_.size())));
  };
  for (int i = 0; i < scenario.crashes; ++i) {
    at(random(scenario.chaos_until), [=, this] {
      const int host = some_host();
      crash(host);
      if (chance(0.7)) at(now + random(ms(10'000)), [=, this] { boot(host); });
    });
  }
  for (int i = 0; i < scenario.power_offs; ++i) {
    at(random(scenario.chaos_until), [=, this] {
      const int host = some_host();
      power_off(host);
      if (chance(0.7)) at(now + random(ms(20'000)), [=, this] { boot(host); });
    });
  }
  for (int i = 0; i < scenario.partitions; ++i) {
    at(random(scenario.chaos_until), [this] {
      std::set<int> apart;
      for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
        if (chance(0.3)) apart.insert(host);
      }
      cut(apart, now + random(ms(15'000)));
    });
  }
  for (int i = 0; i < scenario.freezes; ++i) {
    at(random(scenario.chaos_until), [=, this] { freeze(some_host(), now + random(ms(12'000))); });
  }
  for (int i = 0; i < scenario.interrupts; ++i) {
    at(random(scenario.chaos_until), [=, this] { interrupt(some_host()); });
  }
  for (int i = 0; i < scenario.notices; ++i) {
    at(random(scenario.chaos_until), [=, this] { notify(some_host()); });
  }
}

inline void Simulation::boot(int index) {
  Host& host = hosts_[index];
  host.powered = true;
  if (host.node) return;
  ++host.attempt;
  NodeOptions options;
  options.self = {
      .launcher = static_cast<uint64_t>(index) << 32 | static_cast<uint64_t>(++host.boots),
      .host = host.name,
      .ranks = 1 + index % 3,
      .address = fmt::format("{}", index),
      .job_spec = scenario_.job_spec};
  options.timing = scenario_.timing;
  options.coordinator = "0:1";
  options.is_coordinator = index == 0;
  options.store_port = static_cast<uint16_t>(1000 + index);
  if (index == 0 && host.boots > 1 && !scenario_.coordinator_comes_back) return;
  if (scenario_.planted == Planted::HastyCoordinator && index == 0) {
    options.timing.lease = ms(2'000);
    options.timing.stop = ms(0);
  }
  if (scenario_.planted == Planted::EndlessLease && index != 0)
    options.timing.lease = ms(1'000'000);
  if (scenario_.planted == Planted::ForgottenLoss && index == 0)
    options.timing.lease = std::chrono::hours(10);
  host.node = std::make_unique<Node>(options, now);
  act(index);
}

inline void Simulation::on_node(int index, uint64_t attempt, std::function<void(Node&)> what) {
  Host& host = hosts_[index];
  if (!host.node || host.attempt != attempt) return;
  if (now < host.frozen_until) {
    at(host.frozen_until, [=, this] { on_node(index, attempt, what); });
    return;
  }
  what(*host.node);
  act(index);
}

inline void Simulation::act(int index) {
  Host& host = hosts_[index];
  while (host.node) {
    auto actions = host.node->take_actions();
    if (actions.empty()) break;
    for (const Action& action : actions) {
      if (!host.node) return;
      std::visit([&](const auto& one) { perform(index, one); }, action);
    }
  }
  if (!host.node) return;
  const uint64_t tick = ++host.ticks, attempt = host.attempt;
  at(std::max(now + Time(1), host.node->deadline(now)), [=, this] {
    if (hosts_[index].ticks != tick) return;
    on_node(index, attempt, [this](Node& node) { node.tick(now); });
  });
}

inline void Simulation::note(const std::string& text) {
  if (trace) fmt::print("{:9.3f} {}\n", std::chrono::duration<double>(now).count(), text);
}

inline void Simulation::perform(int index, const Say& say) {
  said.push_back(hosts_[index].name + ": " + say.text);
  note(said.back());
}

inline void Simulation::perform(int index, const Launch& launch) {
  Host& host = hosts_[index];
  const uint32_t attempt = number_of(launch);
  if (host.ranks != 0)
    violation(fmt::format("{} starts attempt {} over attempt {}", host.name, attempt, host.ranks));
  for (const Host& other : hosts_) {
    const bool was_frozen = now < other.frozen_until ||
                            now < other.thawed + scenario_.timing.stop + scenario_.timing.lease;
    if (other.ranks != 0 && other.ranks != attempt && !was_frozen) {
      violation(fmt::format("{} starts attempt {} while {} still has ranks of attempt {}",
                            host.name, attempt, other.name, other.ranks));
    }
  }
  host.ranks = attempt;
  note(fmt::format("{} starts attempt {} as node {} of {}", host.name, attempt, launch.node_rank,
                   launch.nodes));
  ++host.generation;
  attempts = std::max(attempts, attempt);
  launches[attempt].emplace(index, launch);
  check_attempt(attempt);
  if (chance(scenario_.rank_failures)) {
    const uint64_t generation = host.generation;
    at(now + random(scenario_.work), [=, this] {
      if (hosts_[index].generation == generation) fail_rank(index, Failure::Kind::Killed);
    });
  }
  end_ranks(index, std::nullopt, scenario_.work + random(ms(1000)));
}

// The ranks of this host end after that long, unless something else happens before.
inline void Simulation::end_ranks(int index, const std::optional<Failure>& failure, Time after) {
  Host& host = hosts_[index];
  host.stops = now + after;
  const uint64_t generation = ++host.generation, attempt = host.attempt;
  at(now + after, [=, this] {
    Host& same = hosts_[index];
    if (same.generation != generation || !same.powered) return;
    if (now < same.frozen_until) return end_ranks(index, failure, same.frozen_until - now);
    same.ranks = 0;
    on_node(index, attempt, [=, this](Node& node) {
      node.ranks_over(failure, static_cast<uint16_t>(2000 + index), now);
    });
  });
}

inline void Simulation::fail_rank(int index, Failure::Kind kind) {
  Host& host = hosts_[index];
  if (host.ranks == 0 || !host.node || now < host.frozen_until) return;
  if (std::exchange(host.failed, host.ranks) == host.ranks) return;
  const Failure failure{.kind = kind,
                        .rank = index,
                        .status = kind == Failure::Kind::Killed ? 137 : 3,
                        .what = fmt::format("a rank on {} failed", host.name)};
  host.stopping = host.ranks;
  end_ranks(index, failure, random(scenario_.timing.stop));
  on_node(index, host.attempt, [=, this](Node& node) { node.rank_failed(failure, now); });
}

inline void Simulation::interrupt(int index) {
  Host& host = hosts_[index];
  if (!host.node || now < host.frozen_until) return;
  const Failure failure{
      .kind = Failure::Kind::Signalled, .status = 143, .what = host.name + " got SIGTERM"};
  if (host.ranks != 0 && host.stopping != host.ranks) {
    host.stopping = host.ranks;
    end_ranks(index, std::nullopt, random(scenario_.timing.stop_after_signal));
  }
  on_node(index, host.attempt, [=, this](Node& node) { node.interrupt(failure, now); });
}

inline void Simulation::interrupt_again(int index) {
  Host& host = hosts_[index];
  const Failure failure{.kind = Failure::Kind::Signalled,
                        .status = 128 + SIGKILL,
                        .what = host.name + " kills the ranks"};
  if (host.ranks != 0) end_ranks(index, std::nullopt, random(scenario_.timing.stop_at_once));
  on_node(index, host.attempt, [=, this](Node& node) { node.interrupt(failure, now); });
}

inline void Simulation::notify(int index) {
  const Failure failure{.kind = Failure::Kind::Signalled,
                        .status = kRequeueStatus,
                        .what = hosts_[index].name + " got SIGUSR1"};
  on_node(index, hosts_[index].attempt, [=, this](Node& node) { node.interrupt(failure, now); });
}

inline void Simulation::perform(int index, const Halt& halt) {
  note(fmt::format("host{} halts: {}", index, halt.why));
  Host& host = hosts_[index];
  if (host.ranks == 0) return;
  if (scenario_.planted == Planted::EarlyReady) {
    const uint64_t generation = ++host.generation;
    at(now + random(scenario_.timing.stop), [=, this] {
      if (hosts_[index].generation == generation) hosts_[index].ranks = 0;
    });
    return on_node(index, host.attempt,
                   [this](Node& node) { node.ranks_over(std::nullopt, 1, now); });
  }
  const auto& timing = scenario_.timing;
  Time after = random(halt.signal == SIGKILL ? timing.stop_at_once
                      : halt.signal != 0     ? timing.stop_after_signal
                                             : timing.stop);
  if (host.stopping == host.ranks) {  // only ever sooner
    if (halt.signal != SIGKILL && (halt.signal != 0 || host.failed == host.ranks)) return;
    after = std::min(after, host.stops - now);
  }
  host.stopping = host.ranks;
  end_ranks(index, std::nullopt, after);
}

inline void Simulation::perform(int index, const Leave& leave) {
  Host& host = hosts_[index];
  if (host.ranks != 0)
    violation(fmt::format("{} leaves its ranks of attempt {} alone", host.name, host.ranks));
  ends[index] = {leave.status, leave.why, now};
  note(fmt::format("{} leaves with {}: {}", host.name, leave.status, leave.why));
  hang_all(index, false);
  host.node.reset();
}

inline void Simulation::crash(int index) {
  Host& host = hosts_[index];
  if (!host.node || now < host.frozen_until) return;
  note(fmt::format("host{} crashes", index));
  host.ranks = 0;  // the kernel kills them
  ++host.generation;
  host.node.reset();
  hang_all(index, false);
}

inline void Simulation::power_off(int index) {
  note(fmt::format("host{} loses power", index));
  Host& host = hosts_[index];
  host.ranks = 0;
  ++host.generation;
  host.node.reset();
  host.powered = false;
  hang_all(index, true);
}

inline void Simulation::freeze(int index, Time until) {
  Host& host = hosts_[index];
  note(fmt::format("host{} freezes until {:.3f}", index,
                   std::chrono::duration<double>(until).count()));
  host.frozen_until = host.thawed = std::max(host.frozen_until, until);
}

// Every host has read the same order, and the ranks are 0 to world - 1, each once.
inline void Simulation::check_attempt(uint32_t attempt) {
  const auto& all = launches.at(attempt);
  const Launch& first = all.begin()->second;
  std::map<int, int> blocks;
  for (const auto& [index, launch] : all) {
    if (launch.world_size != first.world_size || launch.nodes != first.nodes ||
        launch.master_addr != first.master_addr || launch.master_port != first.master_port) {
      violation(fmt::format("attempt {}: {} has another plan", attempt, hosts_[index].name));
    }
    const int ranks = 1 + index % 3;
    if (launch.first_rank + ranks > launch.world_size)
      violation(fmt::format("attempt {}: ranks beyond the world", attempt));
    if (!blocks.emplace(launch.first_rank, launch.first_rank + ranks).second) {
      violation(fmt::format("attempt {}: two hosts have rank {}", attempt, launch.first_rank));
    }
  }
  int end = 0;
  for (const auto& [begin, stop] : blocks) {
    if (begin < end) violation(fmt::format("attempt {}: two hosts have rank {}", attempt, begin));
    end = stop;
  }
  const bool complete = static_cast<int>(all.size()) == first.nodes;
  int sum = 0;
  for (const auto& [begin, stop] : blocks) sum += stop - begin;
  if (complete && sum != first.world_size)
    violation(fmt::format("attempt {}: {} ranks of {}", attempt, sum, first.world_size));
}

inline std::vector<std::string> Simulation::run(Time limit) {
  const auto alive = [this] {
    int count = 0;
    for (const Host& host : hosts_) count += host.node != nullptr;
    return count;
  };
  size_t steps = 0;
  while (!events_.empty() && events_.top().time <= limit && violations_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now = event.time;
    if (++steps > 3'000'000) return violation("a storm of events"), violations_;
    event.what();
    if (now > scenario_.chaos_until && alive() == 0) break;
  }
  for (const Host& host : hosts_) {
    if (host.node) violation(fmt::format("{} has not ended", host.name));
    if (host.ranks != 0)
      violation(fmt::format("{} has left ranks of attempt {}", host.name, host.ranks));
  }
  return violations_;
}

}  // namespace lockstep::launch::testing
