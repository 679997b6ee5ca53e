// Episodes of a plan, played on the rank that has their lane, and what came of them on all ranks.
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <string_view>

#include "comm/text.h"
#include "comm/transport.h"
#include "core/counted.h"
#include "lockstep/core/error.h"
#include "lockstep/rl/learner.h"

namespace lockstep::rl {
namespace {

// What the outcomes of a rank begin with; else it is an error's text.
constexpr std::string_view kOutcomes = "=";

double part(const Reward& reward, const char* name) {
  const auto found = reward.parts.find(name);
  return found == reward.parts.end() ? 0 : found->second;
}

Outcome outcome_of(const Played& played, double seconds) {
  return {.reward = played.reward.value,
          .end = static_cast<double>(played.end),
          .turns = static_cast<double>(played.turns),
          .calls = static_cast<double>(played.calls),
          .errors = static_cast<double>(played.errors),
          .own_tokens = static_cast<double>(played.own_tokens()),
          .state = part(played.reward, "state"),
          .told = part(played.reward, "told"),
          .policy = part(played.reward, "policy"),
          .seconds = seconds};
}

}  // namespace

Rollout run_rollout(const RolloutPlan& plan, const comm::Group& group,
                    const std::function<std::vector<Played>(const std::vector<Planned>&)>& play) {
  if (plan.lanes < group.size()) {
    throw ConfigError(fmt::format("[rollout] {} for {} ranks: each rank needs one",
                                  counted(plan.lanes, "lane"), group.size()));
  }
  if (plan.group_size < 1)
    throw ConfigError(fmt::format("[rollout] group_size = {}: above 0", plan.group_size));
  Rollout out;
  out.outcomes.resize(plan.episodes.size());
  std::vector<std::pair<uint64_t, Outcome>> mine;
  std::string problem;
  const auto own = Shard{group.rank(), group.size()}.of(plan.lanes);
  for (int64_t lane = own.begin; lane < own.end; ++lane) {
    std::vector<size_t> numbers;
    std::vector<Planned> episodes;
    for (size_t i = 0; i < plan.episodes.size(); ++i) {
      if (plan.lane_of(static_cast<int64_t>(i)) != lane) continue;
      numbers.push_back(i);
      episodes.push_back(plan.episodes[i]);
    }
    const auto begin = std::chrono::steady_clock::now();
    std::vector<Played> played;
    try {
      if (!episodes.empty()) played = play(episodes);
    } catch (const CommError&) {
      throw;  // the others' own
    } catch (...) {
      // They may have minutes of episodes left before the exchange.
      group.transport().abort_all(
          fmt::format("[rollout] rank {}: {}", group.rank(), comm::thrown_text()));
      throw;
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (played.size() != episodes.size()) {
      problem = fmt::format("[rollout] rank {}: play() returned {} episodes for the {} of lane {}",
                            group.rank(), played.size(), episodes.size(), lane);
      break;
    }
    for (size_t i = 0; i < played.size(); ++i) {
      mine.emplace_back(numbers[i],
                        outcome_of(played[i], taken.count() / static_cast<double>(played.size())));
    }
    out.numbers.push_back(std::move(numbers));
    out.episodes.push_back(std::move(played));
  }
  const comm::CallOptions exchange{.timeout = plan.timeout, .label = "outcomes"};
  // A rank that cannot go on says so in the exchange that the others wait in.
  std::string bytes(kOutcomes);
  bytes.append(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(mine[0]));
  if (!problem.empty()) bytes = problem;
  for (const auto& from : group.all_gather_bytes(bytes, exchange)) {
    if (!from.starts_with(kOutcomes)) throw ConfigError(from);
    for (size_t at = kOutcomes.size(); at < from.size(); at += sizeof(mine[0])) {
      std::pair<uint64_t, Outcome> one;
      std::memcpy(static_cast<void*>(&one), from.data() + at, sizeof(one));
      out.outcomes.at(one.first) = one.second;
    }
  }
  return out;
}

}  // namespace lockstep::rl
