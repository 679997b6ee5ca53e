#include "rl/policy/agreed.h"

#include <fmt/format.h>

#include <algorithm>

#include "rl/policy/groups.h"

namespace lockstep::rl {
namespace {

// Episodes whose rewards count, group by group.
struct Counting {
  std::vector<size_t> numbers;
  std::vector<double> rewards;
  std::vector<int64_t> groups;  // their sizes
};

// Those that are neither held nor lost; a group of which nothing is left is none.
Counting counting_of(const Rollout& rollout, int64_t group_size) {
  std::vector<size_t> unheld;
  for (size_t i = 0; i < rollout.outcomes.size(); ++i) {
    if (rollout.held.empty() || rollout.held.at(i) == 0) unheld.push_back(i);
  }
  Counting out;
  size_t next = 0;
  for (const int64_t size : whole_groups(unheld.size(), group_size)) {
    const size_t before = out.numbers.size();
    for (int64_t i = 0; i < size; ++i) {
      const size_t number = unheld[next++];
      if (is_lost(rollout.outcomes[number])) continue;
      out.numbers.push_back(number);
      out.rewards.push_back(rollout.outcomes[number].reward);
    }
    if (out.numbers.size() > before) {
      out.groups.push_back(static_cast<int64_t>(out.numbers.size() - before));
    }
  }
  return out;
}

}  // namespace

bool is_lost(const Outcome& outcome) { return outcome.end == static_cast<double>(End::EnvError); }

Agreed agree(const Rollout& rollout, const LearnerOptions& options, Learnt& learnt) {
  const auto& outcomes = rollout.outcomes;
  const auto left = static_cast<double>(outcomes.size()) -
                    static_cast<double>(std::count_if(outcomes.begin(), outcomes.end(), is_lost));
  Agreed out{.advantages = std::vector<double>(outcomes.size(), 0),
             .kept = std::vector<uint8_t>(outcomes.size(), 1),
             .counts = {.longest = options.longest}};
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (is_lost(outcomes[i])) out.kept[i] = 0;
    if (out.kept[i] != 0) learnt.reward += outcomes[i].reward / left;
  }
  const Counting counting = counting_of(rollout, options.group_size);
  const auto equal = equal_groups(counting.rewards, counting.groups);
  const auto of_rewards = advantages(counting.rewards, counting.groups, options.scale);
  for (size_t group = 0, next = 0; group < counting.groups.size(); ++group) {
    for (int64_t i = 0; i < counting.groups[group]; ++i, ++next) {
      const size_t number = counting.numbers[next];
      out.advantages[number] = of_rewards[next];
      const bool is_left_out = options.use_grpo ? options.drop_equal_groups && equal[group] != 0
                                                : outcomes[number].reward != 1;
      if (is_left_out) out.kept[number] = 0;
    }
    learnt.equal_share += static_cast<double>(equal[group]) / static_cast<double>(equal.size());
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (out.kept[i] == 0) continue;
    out.counts.tokens += static_cast<int64_t>(outcomes[i].own_tokens);
    ++out.counts.sequences;
  }
  learnt.kept = out.counts.sequences;
  learnt.tokens = out.counts.tokens;
  return out;
}

std::string misfit(const Rollout& rollout, int64_t own_lanes, int64_t lanes) {
  const auto played = static_cast<int64_t>(rollout.numbers.size());
  if (played != own_lanes) {
    return fmt::format(
        "the rollout has {} lanes of this rank, the learner {}: RolloutPlan::lanes and "
        "LearnerOptions::lanes, which is {}, have to be the same",
        played, own_lanes, lanes);
  }
  if (rollout.episodes.size() != rollout.numbers.size()) {
    return fmt::format("the rollout has episodes of {} lanes and numbers of {}",
                       rollout.episodes.size(), rollout.numbers.size());
  }
  for (size_t lane = 0; lane < rollout.numbers.size(); ++lane) {
    const auto& numbers = rollout.numbers[lane];
    if (rollout.episodes[lane].size() != numbers.size()) {
      return fmt::format("lane {} of this rank has {} episodes and {} numbers", lane,
                         rollout.episodes[lane].size(), numbers.size());
    }
    for (const size_t number : numbers) {
      if (number < rollout.outcomes.size()) continue;
      return fmt::format("lane {} of this rank has episode {}, and there are {} outcomes", lane,
                         number, rollout.outcomes.size());
    }
  }
  if (!rollout.held.empty() && rollout.held.size() != rollout.outcomes.size()) {
    return fmt::format("{} episodes are held or not, and there are {} outcomes",
                       rollout.held.size(), rollout.outcomes.size());
  }
  return "";
}

}  // namespace lockstep::rl
